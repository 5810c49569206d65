"""The work of a step: a plan, and the FLOPs, bytes and collectives that it needs."""

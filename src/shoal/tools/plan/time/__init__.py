"""Seconds of a step, from its work and the rates of a machine."""

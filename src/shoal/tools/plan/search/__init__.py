"""The fastest plans that fit a machine."""

"""Coupled layers in a parallelized model: BatchNorm, the search for others, and what is printed."""

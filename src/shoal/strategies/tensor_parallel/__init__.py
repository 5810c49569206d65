"""Tensor parallelism by a plan that is checked on the first batch."""

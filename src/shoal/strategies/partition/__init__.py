"""Splitting a model into stages: the trace, the stages, the comparison with the original model."""

"""Models cut into stages: the trace, the stages, the check against the whole model."""

"""The implementation of `shoal.tools.submit.scheduler` for clusters of Ray."""

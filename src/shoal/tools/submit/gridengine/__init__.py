"""The implementation of `shoal.tools.submit.scheduler` for Grid Engine."""

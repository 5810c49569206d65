"""The implementation of `shoal.tools.submit.scheduler` for PBS Professional and OpenPBS."""

"""Slurm behind the contract of `shoal.launcher.submit.scheduler`."""

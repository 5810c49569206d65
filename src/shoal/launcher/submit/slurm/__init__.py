"""The implementation of `shoal.launcher.submit.scheduler` for Slurm."""

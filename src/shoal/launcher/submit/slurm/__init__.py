"""Slurm: the batch script, its commands."""

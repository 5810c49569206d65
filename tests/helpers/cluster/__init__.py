"""A real Slurm cluster on one machine."""

"""Checks of a machine, or of all ranks of a job, before training: `shoal doctor`."""

"""The optimizer step, the run directory, the training loop, evaluation and export.

Also schedules, preemption, early stopping and averages of parameters. Scripts import the public names
from `shoal`.
"""

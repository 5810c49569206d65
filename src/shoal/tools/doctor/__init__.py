"""Checks of a machine, or of all ranks of a job, before training, and information about them.

`runner` is `shoal doctor`, `support_bundle` makes its archive, and `info` is `shoal info`. Each check
measures on every rank and judges on rank 0.
"""

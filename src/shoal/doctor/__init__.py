"""Checks of a machine, or of all ranks of a job, before training, and what is installed there.

It offers `runner` for `shoal doctor`, `support_bundle` for its archive and `info` for `shoal info`;
each check measures in every rank and judges on rank 0.
"""

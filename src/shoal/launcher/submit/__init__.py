"""Jobs for a scheduler: checked against the site, written as a batch script, submitted, followed.

`scheduler` is the contract that a scheduler implements, `slurm` the first one that does. Pure functions
of plain values decide what a job becomes; few lines act. Nothing here imports torch: a login node may
have no GPU and little memory.
"""

"""Jobs for Slurm: checked against the site, written as a batch script, submitted, followed.

What a job is going to be is decided by pure functions of plain values; few lines act. Nothing here
imports torch: a login node may have no GPU and little memory.
"""

"""Jobs for a scheduler: checked against the site, written as a batch script, submitted, followed.

`scheduler` is the contract that a scheduler implements, and `slurm` the first implementation. Pure
functions of plain values make the decisions; few lines have side effects. No module here imports torch,
since a login node may have no GPU and little memory.
"""

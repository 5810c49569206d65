"""Injects faults into a training script and compares its result with an undisturbed run.

`faults` draws the faults from a seed, `rank` injects them in the ranks, and `storm` runs all of it.
`containment` makes the Linux namespaces that end with the command, and `first_process` is theirs.
"""

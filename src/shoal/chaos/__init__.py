"""Injects faults into a training script and compares its result with an undisturbed run.

`plan` draws the faults from a seed, `rank` injects them in the ranks, and `storm` runs all of it inside
Linux namespaces that end with it. `containment` makes those.
"""

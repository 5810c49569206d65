"""What a rank uses: memory, power, cores, and how much of what its device could compute.

One thread of each rank looks now and then; nothing is spent in a step.
"""

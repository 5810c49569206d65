"""The resources that a rank uses: memory, power, cores, and the fraction of its device's FLOPS.

One thread of each rank samples them periodically, so a step spends no time on it.
"""

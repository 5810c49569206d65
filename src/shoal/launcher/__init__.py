"""Start of processes: on this machine, on several nodes, from a function, or as jobs of a scheduler.

It provides `launch` and the code of `shoal run` and `shoal submit`. If ranks fail, it reports once
which of them failed first.
"""

from shoal.launcher.function import launch

__all__ = ["launch"]

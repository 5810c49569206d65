"""Starts processes: here, on several nodes, from a function, or as jobs of a scheduler.

It offers `launch` and what `shoal run` and `shoal submit` call; when ranks fail, it says once and
clearly which of them failed first.
"""

from shoal.launcher.function import launch

__all__ = ["launch"]

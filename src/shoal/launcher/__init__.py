"""Starting the processes of a run, and saying once and clearly which of them failed first."""

from shoal.launcher.function import launch

__all__ = ["launch"]

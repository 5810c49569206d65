"""Starting the processes of a run, and saying once and clearly which of them failed first."""

from .caller import launch

__all__ = ["launch"]

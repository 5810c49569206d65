"""Atomic checkpoints, readable at any number of ranks.

`Checkpoints` saves and loads state; `inspect` reads files without a process group. Names are imported
when they are first used: code that only reads file names and manifests needs no torch.
"""

from __future__ import annotations

from shoal.util.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(__name__, __file__)

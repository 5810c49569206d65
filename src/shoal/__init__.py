"""Shoal: distributed PyTorch training from one process to a cluster, with the same numbers everywhere.

The public names are those that `__init__.pyi` imports. Each is imported on its first use (PEP 562), so
that `shoal --help` needs no torch.
"""

from __future__ import annotations

from shoal.util.lazy_names import lazy_names
from shoal.util.user_frames import shorten_tracebacks

__version__ = "0.1.0"

_NAMES, __getattr__ = lazy_names(__name__, __file__)
__all__ = _NAMES  # noqa: PLE0605


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


shorten_tracebacks()

"""Shoal: distributed PyTorch training from one process to a cluster, with the same numbers everywhere.

The public names are those that `__init__.pyi` imports. Each is imported on its first use (PEP 562), so
that `shoal --help` needs no torch.
"""

from __future__ import annotations

import ast
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from shoal.util.user_code import shorten_tracebacks

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        near = get_close_matches(name, __all__, n=1)
        hint = f"; did you mean shoal.{near[0]}?" if near else ""
        raise AttributeError(f"module 'shoal' has no attribute {name!r}{hint}")
    globals()[name] = getattr(import_module(_MODULES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


shorten_tracebacks()

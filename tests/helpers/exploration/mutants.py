"""Modules of Shoal with one planted defect."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def load_variant(module: ModuleType, old: str = "", new: str = "") -> ModuleType:
    """Return a second copy of a module, in which `new` replaces `old`, which occurs exactly once."""
    source = Path(str(module.__file__)).read_text()
    if old and source.count(old) != 1:
        raise ValueError(f"{module.__name__} has {source.count(old)} times: {old}")
    name = f"{module.__name__}_variant"
    copy = ModuleType(name)
    copy.__file__ = module.__file__
    copy.__package__ = module.__package__
    sys.modules[name] = copy  # dataclasses look their module up
    text = source.replace(old, new) if old else source
    exec(compile(text, str(module.__file__), "exec"), copy.__dict__)
    return copy

"""Which modules of a model make a unit that is gathered, checkpointed or compiled as one."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from shoal.errors import StepError


def find_units(model: nn.Module, patterns: Sequence[str] | None) -> list[nn.Module]:
    """The modules whose names match `patterns`, innermost first; the repeated blocks where None.

    Repeated blocks are the layers of a ModuleList or Sequential that have layers themselves, two or
    more of one class; the outermost ones.
    """
    if patterns is None:
        return _repeated(model)
    named = dict(model.named_modules())
    found = [part for name, part in named.items() if name and _matches(name, patterns)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named if name):
            raise StepError(
                given=f"units={tuple(patterns)!r}",
                found=f"no module of {type(model).__name__} is named like {pattern!r}; its parts are "
                + ", ".join(name for name, _ in model.named_children()),
                fix='units=("blocks.*",), with names as in model.named_modules()',
            )
    return found[::-1]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatchcase(name, pattern) and name.count(".") == pattern.count(".") for pattern in patterns
    )


def _repeated(model: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for part in model.children():
        layers = list(part.children()) if isinstance(part, nn.ModuleList | nn.Sequential) else []
        kinds = [type(layer) for layer in layers if any(True for _ in layer.children())]
        alike = [layer for layer in layers if kinds.count(type(layer)) > 1]
        blocks += alike or _repeated(part)
    return blocks

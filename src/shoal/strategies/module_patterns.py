"""Which modules of a model are meant: by patterns of names, or the blocks that repeat."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from shoal.util.errors import StepError


def find_units(model: nn.Module, patterns: Sequence[str] | None) -> list[nn.Module]:
    """The modules whose names match `patterns`, innermost first; the repeated blocks where None.

    Repeated blocks are the layers of a ModuleList or Sequential that have layers themselves, two or
    more of one class; the outermost ones.
    """
    if patterns is None:
        return _repeated(model)
    names = {
        name for pattern in patterns for name in named_like(model, pattern, f"modules={patterns!r}")
    }
    deepest_first = sorted(names, key=lambda name: -name.count("."))
    return [model.get_submodule(name) for name in deepest_first]


def named_like(model: nn.Module, pattern: str, given: str) -> list[str]:
    """The names of modules like `pattern`, in which `*` stands for one part of a name.

    Raises StepError, with `given` for what was asked, where there is none.
    """
    wanted = pattern.split(".")
    names = [name for name, _ in model.named_modules() if alike(name.split("."), wanted)]
    if not names:
        raise StepError(
            given=given,
            found=f"no module of {type(model).__name__} is named like {pattern!r}; its parts are "
            + ", ".join(name for name, _ in model.named_children()),
            fix='"blocks.*" for the blocks, with names as in model.named_modules()',
        )
    return names


def alike(name: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a name, in its parts, is like a pattern, in which `*` stands for one of them."""
    return len(name) == len(wanted) and all(map(fnmatchcase, name, wanted))


def _repeated(model: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for part in model.children():
        layers = list(part.children()) if isinstance(part, nn.ModuleList | nn.Sequential) else []
        kinds = [type(layer) for layer in layers if any(True for _ in layer.children())]
        alike = [layer for layer in layers if kinds.count(type(layer)) > 1]
        blocks += alike or _repeated(part)
    return blocks

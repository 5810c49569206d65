"""Selection of modules: by patterns of names, or the repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from shoal.util.errors import StepError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_units(model: nn.Module, patterns: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules whose names match `patterns`, innermost first, or the repeated blocks.

    Repeated blocks are the outermost layers of a ModuleList or Sequential that have sublayers and of
    which there are two or more of one class.
    Raises StepError for a ModuleList or ModuleDict, which can't be called.
    """
    if patterns is None:
        return _repeated(model)
    given = f"modules={patterns!r}"
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        name = patterns if isinstance(patterns, str) else "blocks.*"
        raise StepError(
            given=given,
            found="it is not a sequence of names",
            fix=f'use modules=("{name}",)',
        )
    # Not a set, whose order differs between processes.
    names = dict.fromkeys(name for pattern in patterns for name in named_like(model, pattern, given))
    deepest_first = sorted(names, key=lambda name: -name.count("."))
    units = {name: model.get_submodule(name) for name in deepest_first}
    for name, unit in units.items():
        if isinstance(unit, _CONTAINERS):
            raise StepError(
                given=given,
                found=f"{name} is a {type(unit).__name__}, which can't be called",
                fix=f'use "{name}.*" for the modules in it',
            )
    return list(units.values())


def named_like(model: nn.Module, pattern: str, given: str) -> list[str]:
    """Return the names of modules that match `pattern`, in which `*` stands for one part of a name.

    Raises StepError, with `given` as the situation, if there is none.
    """
    wanted = pattern.split(".")
    names = [name for name, _ in model.named_modules() if alike(name.split("."), wanted)]
    if not names:
        raise StepError(
            given=given,
            found=f"no module of {type(model).__name__} matches {pattern!r}; its children are "
            + ", ".join(name for name, _ in model.named_children()),
            fix='use "blocks.*" for the blocks, with names as in model.named_modules()',
        )
    return names


def alike(name: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether a name matches a pattern, both split at dots; `*` matches one part."""
    return len(name) == len(wanted) and all(map(fnmatchcase, name, wanted))


def _repeated(model: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for part in model.children():
        layers = list(part.children()) if isinstance(part, nn.ModuleList | nn.Sequential) else []
        kinds = [
            type(layer)
            for layer in layers
            if any(True for _ in layer.children()) and not isinstance(layer, _CONTAINERS)
        ]
        repeated = [layer for layer in layers if kinds.count(type(layer)) > 1]
        blocks += repeated or _repeated(part)
    return blocks

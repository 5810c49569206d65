"""The state of a model by the user's names, and checks that a saved one fits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.util.errors import CheckpointError

_PARTS = {"model", "optimizer", "number", "engine"}
_EXTRA = "_extra_state"
"""The suffix of torch's names for results of `get_extra_state`, which may be any object."""


def check_parts(saved: Any, given: str) -> None:
    """Raise CheckpointError unless `saved` has the parts of a state that a Run saves."""
    parts = saved if isinstance(saved, dict) else {}
    steps = parts.get("steps")
    if not (
        isinstance(steps, dict)
        and all(isinstance(step, dict) and step.keys() >= _PARTS for step in steps.values())
        and all(isinstance(parts.get(part), dict) for part in ("state", "loader"))
    ):
        raise CheckpointError(
            given=given,
            found="a checkpoint that no Run has saved",
            fix="choose another directory: shoal.Run('runs/b', …)",
        )


def check_model(
    model: nn.Module, saved: Mapping[str, Any], here: Mapping[str, tuple[int, ...] | None]
) -> None:
    """Raise CheckpointError if a saved model state does not fit `model`.

    `here` has the shapes of the model's state as `shapes` returns them, over all ranks.
    """
    found = model_differences(here, shapes(saved))
    if found:
        raise CheckpointError(
            given=f"a {type(model).__name__} with {len(here)} tensors",
            found=f"a checkpoint of another model; {found}",
            fix="build the model that the checkpoint was saved from, or start a new run: "
            "shoal.Run('runs/b', …)",
        )
    restored(model.state_dict(), saved)


def model_differences(
    here: Mapping[str, tuple[int, ...] | None], there: Mapping[str, tuple[int, ...] | None]
) -> str:
    """Return the differences between the entries of a saved model and this one as text, or ""."""
    missing = [name for name in here if name not in there]
    unexpected = [name for name in there if name not in here]
    reshaped = [
        f"{name}: {there[name]} instead of {here[name]}"
        for name in here
        if name in there and here[name] != there[name]
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("other shapes", reshaped))
    return "; ".join(f"{what}: {first_names(names)}" for what, names in kinds if names)


def owner_of(model: nn.Module, entry: str) -> str:
    """Return the module that put `entry` into the model's state_dict: its class and path, as text."""
    at, owner = "", model
    for name, module in model.named_modules():
        if len(name) > len(at) and entry.startswith(f"{name}."):
            at, owner = name, module
    return f"a {type(owner).__name__}" + (f" at {at}" if at else "")


def storable(value: Any) -> Any:
    """Return `value` with its constants (classes, functions, dtypes, devices) as text.

    See `restored`.
    """
    text = _constant(value)
    if text is not None:
        return text
    if isinstance(value, OrderedDict):
        return OrderedDict((key, storable(item)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: storable(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(storable, value))
    return value


def restored(own: Any, saved: Any, *path: str) -> Any:
    """Return `saved`, which `storable` made, with the constants that `own` has at the same places.

    Names in a file therefore never decide what is imported. Raises CheckpointError if the constants
    differ from the saved ones.
    """
    text = _constant(own)
    if text is not None:
        if text != saved:
            raise CheckpointError(
                given=f"a model whose state_dict has {text} at {'.'.join(path)}",
                found=f"a checkpoint with {saved!r:.80}",
                fix="build the model that the checkpoint was saved from, or start a new run: "
                "shoal.Run('runs/b', …)",
            )
        return own
    if isinstance(own, Mapping) and isinstance(saved, dict):
        items = {k: restored(own[k], v, *path, str(k)) if k in own else v for k, v in saved.items()}
        return items if type(saved) is dict else type(saved)(items)
    if type(saved) in (list, tuple) and isinstance(own, list | tuple) and len(own) == len(saved):
        pairs = enumerate(zip(own, saved, strict=True))
        return type(saved)(restored(a, b, *path, str(number)) for number, (a, b) in pairs)
    return saved


def _constant(value: object) -> str | None:
    """Return the text of a constant of a model, which training never changes; None for other values."""
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        kind = "class" if isinstance(value, type) else "function"
        return f"{kind} {value.__module__}.{value.__qualname__}"
    return str(value) if isinstance(value, torch.dtype | torch.device) else None


def shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each tensor of a model's state; None for a module's extra state."""
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) and not name.endswith(_EXTRA) else None
        for name, value in state.items()
    }


def first_names(names: list[str], shown: int = 3) -> str:
    """Return the first few of `names` and the number of the others, or "none"."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) or "none") + more

"""The states of a model and an optimizer by the user's names, and checks that a saved one fits."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.util.errors import CheckpointError, StepError

_PARTS = {"model", "optimizer", "number", "engine"}
_EXTRA = "_extra_state"
"""The suffix of torch's names for results of `get_extra_state`, which may be any object."""


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the user's names of the optimizer's parameters, in the order of the numbers in its state.

    Raises StepError if a step can't drive the optimizer, or if it has parameters of another model.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise StepError(
            given=f"an optimizer of type {kind}",
            found="it is not a torch.optim.Optimizer",
            fix="optimizer = torch.optim.AdamW(model.parameters()), then "
            "shoal.Step(model, optimizer, task)",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise StepError(
            given=f"an optimizer of type {kind}",
            found="it takes a closure that computes the loss several times; a step computes it once",
            fix="use torch.optim.AdamW(model.parameters()), or another that needs no closure",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise StepError(
            given="an optimizer of type SparseAdam",
            found="it takes sparse gradients only, and Shoal sums dense ones",
            fix="use torch.optim.Adam(model.parameters())",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in parameters if id(p) not in names]
    if strange:
        raise StepError(
            given=f"{type(optimizer).__name__} over {len(parameters)} parameters",
            found=f"{len(strange)} of them are not the model's (the first: shape "
            f"{tuple(strange[0].shape)}): parallelize has replaced them, or they are not part of the "
            "model, and their gradients are not reduced over ranks",
            fix="build the optimizer after parallelize: torch.optim.AdamW(model.parameters()); make "
            "further parameters, such as loss weights, part of the model",
        )
    return [names[id(p)] for p in parameters]


def named(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, so that the parts of several ranks can be merged.

    `members` has the group of each parameter; the groups have no names.
    """
    state = optimizer.state_dict()
    groups = state["param_groups"]
    return {
        "type": type(optimizer).__name__,
        "state": {names[n] if isinstance(n, int) else n: s for n, s in state["state"].items()},
        "groups": [{key: group[key] for key in group if key != "params"} for group in groups],
        "members": members(optimizer, names),
    }


def members(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, int]:
    """Return the number of each parameter's group."""
    groups = enumerate(optimizer.param_groups)
    numbers = [number for number, group in groups for _ in group["params"]]
    return dict(zip(names, numbers, strict=True))


def check_optimizer(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], here: Mapping[str, int]
) -> None:
    """Raise CheckpointError if a saved optimizer state does not fit `optimizer`.

    `here` and `state["members"]` have the group of each parameter, over all ranks.
    """
    kind = type(optimizer).__name__
    if state["type"] != kind:
        raise CheckpointError(
            given=f"a Step with {kind}",
            found=f"the checkpoint has the state of {state['type']}",
            fix=f"torch.optim.{state['type']}, or start a new run: shoal.Run('runs/b', …)",
        )
    saved: Mapping[str, int] = state["members"]
    groups = len(state["groups"])
    if groups != len(optimizer.param_groups):
        raise CheckpointError(
            given=f"{kind} with {len(optimizer.param_groups)} parameter group(s)",
            found=f"the checkpoint has {groups} parameter group(s)",
            fix="use the same parameter groups, or start a new run: shoal.Run('runs/b', …)",
        )
    if saved != here:
        missing = [name for name in here if name not in saved]
        unexpected = [name for name in saved if name not in here]
        moved = [name for name in here if name in saved and saved[name] != here[name]]
        raise CheckpointError(
            given=f"{kind} over {len(here)} parameters",
            found=f"the checkpoint has {len(saved)} parameters; missing in it: {_first(missing)}; "
            f"unexpected: {_first(unexpected)}; in another group: {_first(moved)}",
            fix="use the same parameters in the same groups, or start a new run: "
            "shoal.Run('runs/b', …)",
        )


def numbered(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], names: list[str]
) -> dict[str, Any]:
    """Return the part of a `state` from `named` that belongs to this rank's optimizer."""
    groups = optimizer.state_dict()["param_groups"]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        # An entry without a parameter keeps its key; an unknown name belongs to another rank.
        "state": {
            numbers.get(name, name): item
            for name, item in state["state"].items()
            if name in numbers or name not in state["members"]
        },
        "param_groups": [
            {**saved, "params": group["params"]}
            for saved, group in zip(state["groups"], groups, strict=True)
        ],
    }


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
    return "; ".join(f"{what}: {_first(names)}" for what, names in kinds if names)


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


def _first(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) or "none") + more

"""State by the user's names: of a model and an optimizer, and whether a checkpoint's fits them."""

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
"""How torch's names of what `get_extra_state` returns end; it may be anything."""


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The user's names of the optimizer's parameters, in the order of its state's numbers.

    Raises StepError for what is no optimizer that a step can drive, or of other parameters.
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
            found="it takes a closure that computes the loss again and again; a step computes it once",
            fix="torch.optim.AdamW(model.parameters()), or another that needs no closure",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in parameters if id(p) not in names]
    if strange:
        raise StepError(
            given=f"{type(optimizer).__name__} over {len(parameters)} parameters",
            found=f"{len(strange)} of them are not the model's (the first: shape "
            f"{tuple(strange[0].shape)}): they are those from before parallelize, which has replaced "
            "them, or others, whose gradients are not reduced over ranks",
            fix="build the optimizer after parallelize: torch.optim.AdamW(model.parameters()); make "
            "further parameters, such as loss weights, part of the model",
        )
    return [names[id(p)] for p in parameters]


def named(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """The optimizer's state by parameter name, so that ranks holding parts of a model can be merged.

    `members` says which group a parameter is in; the groups themselves name none.
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
    """The number of the group that each parameter is in."""
    groups = enumerate(optimizer.param_groups)
    numbers = [number for number, group in groups for _ in group["params"]]
    return dict(zip(names, numbers, strict=True))


def check_optimizer(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], here: Mapping[str, int]
) -> None:
    """`here` and `state["members"]` say which group each parameter is in, over all ranks."""
    kind = type(optimizer).__name__
    if state["type"] != kind:
        raise CheckpointError(
            given=f"a Step with {kind}",
            found=f"a checkpoint of one with {state['type']}",
            fix=f"torch.optim.{state['type']}, or start afresh: shoal.Run('runs/b', …)",
        )
    saved: Mapping[str, int] = state["members"]
    groups = len(state["groups"])
    if groups != len(optimizer.param_groups):
        raise CheckpointError(
            given=f"{kind} with {len(optimizer.param_groups)} parameter group(s)",
            found=f"a checkpoint of one with {groups}",
            fix="give the optimizer the same groups, or start afresh: shoal.Run('runs/b', …)",
        )
    if saved != here:
        missing = [name for name in here if name not in saved]
        unexpected = [name for name in saved if name not in here]
        moved = [name for name in here if name in saved and saved[name] != here[name]]
        raise CheckpointError(
            given=f"{kind} over {len(here)} parameters",
            found=f"a checkpoint of one over {len(saved)}; missing in it: {_first(missing)}; "
            f"unexpected: {_first(unexpected)}; in another group: {_first(moved)}",
            fix="give the optimizer the same parameters in the same groups, or start afresh: "
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
    """`here` holds the shapes of the model's state as `shapes` gives them, over all ranks."""
    found = model_differences(here, shapes(saved))
    if found:
        raise CheckpointError(
            given=f"a {type(model).__name__} with {len(here)} tensors",
            found=f"a checkpoint of another model; {found}",
            fix="build the same model as in that run, or start afresh: shoal.Run('runs/b', …)",
        )
    restored(model.state_dict(), saved)


def model_differences(
    here: Mapping[str, tuple[int, ...] | None], there: Mapping[str, tuple[int, ...] | None]
) -> str:
    """How the entries of a saved model differ from those of the model here; empty if they don't."""
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
    """Which module put `entry` into the model's state_dict: its class, and its path in the model."""
    at, owner = "", model
    for name, module in model.named_modules():
        if len(name) > len(at) and entry.startswith(f"{name}."):
            at, owner = name, module
    return f"a {type(owner).__name__}" + (f" at {at}" if at else "")


def storable(value: Any) -> Any:
    """`value` with its constants (classes, functions, dtypes, devices) as text; see `restored`."""
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
    """`saved`, as `storable` made it, with the constants that `own` has in its places.

    Names in a file so never decide what is imported. Raises CheckpointError where the constants are
    others than the saved ones.
    """
    text = _constant(own)
    if text is not None:
        if text != saved:
            raise CheckpointError(
                given=f"a model whose state_dict has {text} at {'.'.join(path)}",
                found=f"a checkpoint with {saved!r:.80}",
                fix="build the same model as in that run, or start afresh: shoal.Run('runs/b', …)",
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
    """A text for what a model is built with and training never changes; None for all else."""
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        kind = "class" if isinstance(value, type) else "function"
        return f"{kind} {value.__module__}.{value.__qualname__}"
    return str(value) if isinstance(value, torch.dtype | torch.device) else None


def shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """The shape of each tensor of a model's state; None for a module's extra state, which has none."""
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) and not name.endswith(_EXTRA) else None
        for name, value in state.items()
    }


def _first(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) or "none") + more

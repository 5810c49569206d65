"""State by the user's names: of a model and an optimizer, and whether a checkpoint's fits them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError, StepError

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
    """What this rank's optimizer takes of the `state` that `_named` made."""
    groups = optimizer.state_dict()["param_groups"]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        # What belongs to no parameter keeps its key; a name that is not here is another rank's.
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
    there = shapes(saved)
    missing = [name for name in here if name not in there]
    unexpected = [name for name in there if name not in here]
    reshaped = [
        f"{name}: {there[name]} instead of {here[name]}"
        for name in here
        if name in there and here[name] != there[name]
    ]
    if missing or unexpected or reshaped:
        raise CheckpointError(
            given=f"a {type(model).__name__} with {len(here)} tensors",
            found="a checkpoint of another model; "
            + "; ".join(
                f"{what}: {_first(names)}"
                for what, names in (
                    ("missing", missing),
                    ("unexpected", unexpected),
                    ("other shapes", reshaped),
                )
                if names
            ),
            fix="build the same model as in that run, or start afresh: shoal.Run('runs/b', …)",
        )


def shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """The shape of each tensor of a model's state; None for a module's extra state, which has none."""
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) and not name.endswith(_EXTRA) else None
        for name, value in state.items()
    }


def _first(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) or "none") + more

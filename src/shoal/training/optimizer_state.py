"""The state of a model's optimizers by parameter name, with their groups, and checks that it fits."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.training.several import kind_of, parts_of
from shoal.training.state_names import first_names
from shoal.util.errors import CheckpointError, StepError


class Grouping(NamedTuple):
    """The number of each parameter's group, by name, and of each group's optimizer."""

    members: dict[str, int]
    optimizers: list[int]


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the user's names of the optimizer's parameters, group by group.

    Raises StepError if a step can't drive the optimizer, or if it has parameters of another model.
    """
    for part in parts_of(optimizer):
        _check_kind(part, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in parameters if id(p) not in names]
    if strange:
        raise StepError(
            given=f"{kind_of(optimizer)} over {len(parameters)} parameters",
            found=f"{len(strange)} of them are not the model's (the first: shape "
            f"{tuple(strange[0].shape)}): parallelize has replaced them, or they are not part of the "
            "model, and their gradients are not reduced over ranks",
            fix="build the optimizer after parallelize: torch.optim.AdamW(model.parameters()); make "
            "further parameters, such as loss weights, part of the model",
        )
    found = [names[id(p)] for p in parameters]
    if len({*found}) < len(found):
        twice = [name for name, count in Counter(found).items() if count > 1]
        raise StepError(
            given=f"{kind_of(optimizer)} for one model",
            found=f"more than one optimizer or group has {first_names(twice)}",
            fix="give each parameter to one of them",
        )
    return found


def _check_kind(optimizer: object, model: nn.Module) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        found = "it is not a torch.optim.Optimizer"
        fix = "optimizer = torch.optim.AdamW(model.parameters()), then "
        fix += "shoal.Step(model, optimizer, task)"
    elif _needs_closure(optimizer):
        found = "it takes a closure that computes the loss several times; a step computes it once"
        fix = "use torch.optim.AdamW(model.parameters()), or a custom training loop without a Run"
    elif isinstance(optimizer, torch.optim.SparseAdam) and not _are_sparse(optimizer, model):
        found = "it takes sparse gradients only, and some of its parameters have dense ones"
        fix = "use torch.optim.Adam(model.parameters())"
    else:
        return
    raise StepError(given=f"an optimizer of type {kind}", found=found, fix=fix)


def _are_sparse(optimizer: Optimizer, model: nn.Module) -> bool:
    """Return whether all parameters of an optimizer are of layers with sparse gradients."""
    layers = [each for each in model.modules() if getattr(each, "sparse", False) is True]
    sparse = {id(parameter) for each in layers for parameter in each.parameters()}
    return all(id(p) in sparse for group in optimizer.param_groups for p in group["params"])


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def grouping(optimizer: Optimizer, names: list[str]) -> Grouping:
    """Return the groups of the parameters on this rank."""
    groups = enumerate(optimizer.param_groups)
    numbers = [number for number, group in groups for _ in group["params"]]
    places = enumerate(parts_of(optimizer))
    optimizers = [place for place, part in places for _ in part.param_groups]
    return Grouping(dict(zip(names, numbers, strict=True)), optimizers)


def named(optimizer: Optimizer, model: nn.Module, begun: Grouping) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, so that the parts of several ranks can be merged.

    It includes the state of parameters whose groups were removed: they may come back. `begun` are the
    groups with which the script began.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {"type": kind_of(optimizer), "state": {}, "groups": [], "others": []}
    removed: dict[str, int] = {}
    for place, part in enumerate(parts_of(optimizer)):
        gone = _removed(part, names)
        groups = len(part.param_groups)
        with _one_more_group(part, gone):
            packed = part.state_dict()
            order = [names[id(p)] for group in part.param_groups for p in group["params"]]
        items = packed["state"].items()
        found["state"] |= {order[key]: item for key, item in items if isinstance(key, int)}
        found["others"].append({key: item for key, item in items if not isinstance(key, int)})
        found["groups"] += [
            {key: value for key, value in group.items() if key != "params"}
            for group in packed["param_groups"][:groups]
        ]
        removed |= dict.fromkeys((names[id(p)] for p in gone), place)
    own = grouping(optimizer, parameter_names(model, optimizer))
    return found | own._asdict() | {"removed": removed, "begun": begun._asdict()}


def _removed(optimizer: Optimizer, names: Mapping[int, str]) -> list[Tensor]:
    """Return the model's parameters that have a state and no group; forget others that have neither."""
    grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    gone = [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in grouped]
    for parameter in gone:
        if id(parameter) not in names:
            del optimizer.state[parameter]
    return [p for p in gone if id(p) in names]


def check_optimizer(
    optimizer: Optimizer, state: Mapping[str, Any], here: Grouping, begun: Grouping
) -> None:
    """Raise CheckpointError if a saved optimizer state does not fit `optimizer`.

    Groups may have changed since the beginning, here or before the save, so the groups of now and of
    the beginning are compared. `here` and `begun` have those of all ranks.
    """
    kind, state = kind_of(optimizer), _of_this_format(state)
    if state["type"] != kind:
        raise CheckpointError(
            given=f"a Step with {kind}",
            found=f"the checkpoint has the state of {state['type']}",
            fix=f"use {state['type']}, or start a new run: shoal.Run('runs/b', …)",
        )
    saved = Grouping(state["members"], state["optimizers"])
    former = Grouping(**state["begun"])
    if any(mine == theirs for mine in (here, begun) for theirs in (saved, former)):
        return
    fix = "build the groups with which the run began or those of the checkpoint, or start a new run: "
    fix += "shoal.Run('runs/b', …)"
    if saved.optimizers != here.optimizers:
        raise CheckpointError(
            given=f"{kind} with {len(here.optimizers)} parameter group(s)",
            found=f"the checkpoint has {len(saved.optimizers)} parameter group(s), and its run began "
            f"with {len(former.optimizers)}",
            fix=fix,
        )
    missing = [name for name in here.members if name not in saved.members]
    unexpected = [name for name in saved.members if name not in here.members]
    both = [name for name in here.members if name in saved.members]
    moved = [name for name in both if saved.members[name] != here.members[name]]
    raise CheckpointError(
        given=f"{kind} over {len(here.members)} parameters",
        found=f"the checkpoint has {len(saved.members)} parameters; missing in it: "
        f"{first_names(missing)}; unexpected: {first_names(unexpected)}; in another group: "
        f"{first_names(moved)}",
        fix=fix,
    )


def _of_this_format(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state, also of 0.1.0: a model had one optimizer, whose groups never changed."""
    if "begun" in saved:
        return saved
    groups = Grouping(saved["members"], [0] * len(saved["groups"]))._asdict()
    others = {key: item for key, item in saved["state"].items() if key not in saved["members"]}
    return {**saved, **groups, "others": [others], "removed": {}, "begun": groups}


def load_optimizer(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give the optimizer the groups and the state from `named`, as far as they are of this rank."""
    saved = _of_this_format(saved)
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups: list[list[nn.Parameter]] = [[] for _ in saved["groups"]]
    for name, number in saved["members"].items():
        if name in parameters:
            groups[number].append(parameters[name])
    for place, part in enumerate(parts_of(optimizer)):
        own = [g for g, owner in zip(groups, saved["optimizers"], strict=True) if owner == place]
        now = [group["params"] for group in part.param_groups]
        if [{*map(id, group)} for group in own] != [{*map(id, group)} for group in now]:
            part.param_groups[:] = [{"params": group} for group in own]
        removed = [n for n, owner in saved["removed"].items() if owner == place and n in parameters]
        with _one_more_group(part, [parameters[name] for name in removed]):
            part.load_state_dict(_packed(part, names, saved, place))


def _packed(
    optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any], place: int
) -> dict[str, Any]:
    """Return the saved state of the optimizer `place` as torch numbers it."""
    options = [
        o for o, owner in zip(saved["groups"], saved["optimizers"], strict=True) if owner == place
    ]
    options += options[-1:]  # of parameters in no group, if there are any
    state: dict[Any, Any] = dict(saved["others"][place])
    groups: list[dict[str, Any]] = []
    number = 0
    for group, own in zip(optimizer.param_groups, options, strict=False):
        numbers = range(number, number + len(group["params"]))
        number = numbers.stop
        groups.append({**own, "params": [*numbers]})
        of_names = zip(numbers, (names[id(p)] for p in group["params"]), strict=True)
        state |= {n: saved["state"][name] for n, name in of_names if name in saved["state"]}
    return {"state": state, "param_groups": groups}


@contextmanager
def _one_more_group(optimizer: Optimizer, parameters: list[Any]) -> Iterator[None]:
    """Let an optimizer have a group of these parameters, if there are any."""
    if not parameters:
        yield
        return
    optimizer.param_groups.append({**optimizer.param_groups[-1], "params": parameters})
    try:
        yield
    finally:
        optimizer.param_groups.pop()

"""The stages of a model that this rank keeps: their memory and their inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from shoal._torch.modules import buffers, copy_with_children, parameters
from shoal.strategies.deferred_init import give_memory
from shoal.strategies.partition.stages import Stage
from shoal.util.errors import StepError

Inputs: TypeAlias = dict[str, Any]
"""The inputs of the model, by the names of its arguments."""


def hold(model: nn.Module, kept: Sequence[Stage], device: torch.device) -> None:
    """Allocate the rest of `model` on `device`. Its stages use the same tensors."""
    if any(p.is_meta for p in model.parameters()):
        give_memory(model, device)
        for stage in kept:
            _share(model, stage.body, stage.names)
    bring(model, kept, device)


def bring(model: nn.Module, kept: Sequence[Stage], device: torch.device) -> None:
    """Move allocated stages to `device`. `model` uses the same tensors."""
    for stage in kept:
        stage.body.to(device)
        _share(stage.body, model, stage.names)
    model.to(device)


def evaluating(module: nn.Module) -> nn.Module:
    """Return a copy of the module in eval mode with the same tensors. The module keeps its mode."""
    if isinstance(module, torch.jit.ScriptModule):  # cannot be copied in another mode
        return module
    return copy_with_children(module, evaluating, training=False)


def by_name(
    signature: inspect.Signature, positional: Sequence[Any], named: Mapping[str, Any], kind: str
) -> Inputs:
    """Return inputs of a model of class `kind` by name. Raise StepError if they do not fit."""
    try:
        return dict(signature.bind(*positional, **named).arguments)
    except TypeError as error:
        raise StepError(
            given=f"the inputs of a {kind} in stages: {len(positional)} positional, "
            f"{sorted(named)} by keyword",
            found=f"{error}; arguments with defaults keep their defaults",
            fix=f"use shoal.Task(loss, inputs=…) with {', '.join(signature.parameters)}",
        ) from None


def _share(source: nn.Module, target: nn.Module, names: frozenset[str]) -> None:
    """Let `target` use the tensors of `source` with these names."""
    for name in names:
        owner, _, attribute = name.rpartition(".")
        ours, theirs = source.get_submodule(owner), target.get_submodule(owner)
        for mine, other in ((parameters(ours), parameters(theirs)), (buffers(ours), buffers(theirs))):
            if attribute in mine and attribute in other:
                other[attribute] = mine[attribute]  # type: ignore[assignment]  # of the same kind

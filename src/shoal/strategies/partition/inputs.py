"""The stages of a model that this rank keeps: their memory, and what they are called with."""

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
"""What the model is called with, by the names of its arguments."""


def hold(model: nn.Module, kept: Sequence[Stage], device: torch.device) -> None:
    """Give what is left of `model` memory on `device`; the stages have the very same tensors."""
    if any(p.is_meta for p in model.parameters()):
        give_memory(model, device)
        for stage in kept:
            _share(model, stage.body, stage.names)
    bring(model, kept, device)


def bring(model: nn.Module, kept: Sequence[Stage], device: torch.device) -> None:
    """Move stages that have their memory to `device`; `model` gets the very same tensors."""
    for stage in kept:
        stage.body.to(device)
        _share(stage.body, model, stage.names)
    model.to(device)


def evaluating(module: nn.Module) -> nn.Module:
    """The module in evaluation, with the very same tensors; its own mode stays as it is."""
    if isinstance(module, torch.jit.ScriptModule):  # which has no other mode beside its own
        return module
    return copy_with_children(module, evaluating, training=False)


def by_name(
    signature: inspect.Signature, positional: Sequence[Any], named: Mapping[str, Any], kind: str
) -> Inputs:
    """Inputs of a model, a `kind`, by name; StepError for what does not fit its signature."""
    try:
        return dict(signature.bind(*positional, **named).arguments)
    except TypeError as error:
        raise StepError(
            given=f"the inputs of a {kind} in stages: {len(positional)} by place, "
            f"{sorted(named)} by name",
            found=f"{error}; arguments with defaults keep them",
            fix=f"shoal.Task(loss, inputs=…) with {', '.join(signature.parameters)}",
        ) from None


def _share(source: nn.Module, target: nn.Module, names: frozenset[str]) -> None:
    """Let `target` have the very tensors that `source` has under these names."""
    for name in names:
        owner, _, attribute = name.rpartition(".")
        ours, theirs = source.get_submodule(owner), target.get_submodule(owner)
        for mine, other in ((parameters(ours), parameters(theirs)), (buffers(ours), buffers(theirs))):
            if attribute in mine and attribute in other:
                other[attribute] = mine[attribute]  # type: ignore[assignment]  # of the same kind

"""Compiled models: their module, the options of torch.compile, and which modules it compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

from shoal._torch.modules import call_uncompiled, set_compiled_call
from shoal.strategies.activation_checkpoint import runs_again
from shoal.strategies.module_patterns import find_units
from shoal.strategies.random_draws.graphs import keyed_backend
from shoal.util.errors import StepError

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""torch.compile with a backend and options."""


def compile_parts(parts: Iterable[nn.Module]) -> None:
    """Compile the forward of each module; torch compiles those of one class once.

    Hooks of a module stay outside, as torch breaks the graph at those of FSDP and of checkpointing.
    """
    for part in parts:
        forward = torch.compile(_in_own_frame(part.forward), backend=keyed_backend())
        set_compiled_call(part, _with_hooks(part, forward))


def _in_own_frame(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `forward`: torch compiles none that is in a layer of torch itself."""

    def call(*arguments: Any, **named: Any) -> Any:
        return forward(*arguments, **named)

    return call


def _with_hooks(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of `module` with its hooks that runs `forward`.

    The attribute is set during calls only: a copy of the module would run the forward of this one.
    """
    attributes = vars(module)
    own = {"forward": attributes["forward"]} if "forward" in attributes else {}

    def call(*arguments: Any, **named: Any) -> Any:
        attributes["forward"] = forward
        try:
            return call_uncompiled(module, *arguments, **named)
        finally:
            attributes.pop("forward", None)  # another thread may have removed it
            attributes.update(own)

    return call


class RepeatedBlocks:
    """The repeated blocks of a model, which torch can compile one by one (regional compilation)."""

    def __init__(self, model: nn.Module) -> None:
        self._blocks = find_units(model, None)
        self._error: StepError | None = None
        if not self._blocks:
            self._error = StepError(
                given=f"compile='blocks' with a {type(model).__name__}",
                found="the model has no repeated blocks",
                fix="compile='inductor', which compiles the model as one unit",
            )
        elif any(runs_again(child) for block in self._blocks for child in block.children()):
            self._error = StepError(
                given="compile='blocks' with shoal.ActivationCheckpointing(modules=…)",
                found="torch cannot compile a block if only parts of it are recomputed in backward",
                fix="shoal.ActivationCheckpointing(), which recomputes whole blocks",
            )

    def keep_in(self, parts: Iterable[nn.Module]) -> None:
        """Forget the blocks of other ranks, which are outside `parts`."""
        inside = {id(module) for part in parts for module in part.modules()}
        self._blocks = [block for block in self._blocks if id(block) in inside]

    def compile(self) -> None:
        """Compile each block. Raises StepError if there are none, or if torch cannot compile them."""
        if self._error is not None:
            raise self._error
        compile_parts(self._blocks)


def recomputed_refused(given: str) -> StepError:
    """Return the error of a model that is to be compiled as one unit and recomputes activations."""
    return StepError(
        given=f"{given} with shoal.ActivationCheckpointing()",
        found="torch cannot compile a model as one unit if parts of it are recomputed in backward",
        fix="shoal.Step(model, …, compile='blocks'), which compiles each block that is recomputed",
    )

"""Modules of experts that are distributed over ranks, and the way of their tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from shoal._torch.modules import parameters as table_of
from shoal.distributed.objects import gather_numbers
from shoal.distributed.tensors import broadcast
from shoal.distributed.world import World
from shoal.strategies.dtensor import whole
from shoal.strategies.eval_mode import each_in_eval_mode
from shoal.strategies.expert_parallel.exchange import Exchange, Linked
from shoal.strategies.module_patterns import find_units
from shoal.strategies.random_draws.draws import constant_draws
from shoal.strategies.sharded_parameter import ShardedParameter
from shoal.strategies.tolerance import TOLERANCES, distance
from shoal.util.errors import StepError

ATTRIBUTE = "_shoal_experts"
COUNT = "num_experts"
"""The attribute in which modules of transformers have the number of their experts."""
_SIGNATURE = "forward(hidden, index, weights)"


def find_experts(model: nn.Module, patterns: Sequence[str] | None, degree: int) -> dict[str, nn.Module]:
    """Return the modules of experts by name. Raise StepError if `degree` ranks can't share them."""
    chosen = None if patterns is None else {id(unit) for unit in find_units(model, patterns)}
    found = {
        name: module
        for name, module in model.named_modules()
        if (_number(module) if chosen is None else id(module) in chosen)
    }
    for name, module in found.items():
        number = _number(module)
        given = f"shoal.ExpertParallel() on {degree} ranks and {name}, a {type(module).__name__}"
        if not number:
            raise StepError(
                given=given,
                found=f"it has no parameters of shape (experts, …) and a {_SIGNATURE}",
                fix="name the module of the experts, not the layer with its router",
            )
        buffers = [key for key, each in module.named_buffers() if each.shape[:1] == (number,)]
        if degree > 1 and (buffers or "forward" in vars(module)):
            raise StepError(
                given=given,
                found=f"each rank would have all of {buffers[0]}, a buffer with a row for each expert"
                if buffers
                else "its forward was replaced after it was created",
                fix="keep the buffer outside this module, or as a parameter without a gradient"
                if buffers
                else "define forward in the class of the module",
            )
        if number % degree:
            raise StepError(
                given=given,
                found=f"it has {number} experts, and ranks have equal numbers of them",
                fix=f"use a degree of the expert axis that divides {number}",
            )
    if not found:
        raise StepError(
            given=f"shoal.ExpertParallel() around {type(model).__name__}",
            found=f"no module has parameters of shape (experts, …) and a {_SIGNATURE}",
            fix="put the weights of the experts into one module, which gets the tokens, the experts "
            "that the router has chosen for each, and their weights",
        )
    return found


def _number(module: nn.Module) -> int:
    """Return the number of experts of a module, 0 for other modules."""
    held = list(module.parameters(recurse=False))
    sizes = {p.shape[0] if p.dim() > 1 else 0 for p in held}
    others = any(True for child in module.children() for _ in child.parameters())
    stacked = any(p.dim() == 3 for p in held) and len(sizes) == 1 and not others
    names = [*inspect.signature(module.forward).parameters]
    if not stacked or len(names) != 3 or "ind" not in names[1] or "weight" not in names[2]:
        return 0  # the names tell experts from an attention with one weight for all heads
    number = sizes.pop()
    return number if getattr(module, COUNT, number) == number else 0


def divided_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules of experts that are distributed over ranks."""
    return [module for module in model.modules() if hasattr(module, ATTRIBUTE)]


def divide(name: str, module: nn.Module, world: World) -> None:
    """Keep this rank's experts of `module`, and send tokens to their experts in its forward."""
    mesh = world.mesh["expert"]
    broadcast([p.data for p in module.parameters()], world.data_group)
    for key, parameter in table_of(module).items():
        if parameter is not None:
            part: Any = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            part = nn.Parameter(part, requires_grad=parameter.requires_grad)
            part.__class__ = ShardedParameter
            table_of(module)[key] = part
    object.__setattr__(module, ATTRIBUTE, DividedExperts(name, module, world))
    module.forward = MethodType(_uncompiled, module)


def _forward(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    found: DividedExperts = getattr(module, ATTRIBUTE)
    return found(module, hidden, index, weights)


_uncompiled = torch.compiler.disable(_forward)
"""Not compiled with its block, since sizes depend on the values of the router."""


class DividedExperts:
    """The dispatch of one module of experts, of which this rank has a part."""

    def __init__(self, name: str, module: nn.Module, world: World) -> None:
        self.name = name
        self.number = next(module.parameters()).shape[0]
        mesh = world.mesh["expert"]
        self._ranks = mesh.size()
        self._exchange = Exchange(mesh.get_group(), world)
        self._compute = type(module).forward
        self._checked = False

    def __deepcopy__(self, memo: object) -> DividedExperts:
        return self  # a copied module is on the same ranks

    def __call__(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, of all ranks."""
        if not self._checked:
            self._check(module, hidden.detach(), index, weights.detach())
            self._checked = True
        return self._dispatched(module, hidden, index, weights)

    def _dispatched(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if index.dim() != 2 or index.is_floating_point() or len(index) != len(hidden):
            raise StepError(
                given=f"the experts {self.name}, for {len(hidden)} tokens",
                found=f"index is of shape {tuple(index.shape)} and {index.dtype}".replace("torch.", ""),
                fix="pass hidden of shape (tokens, features), and the chosen experts as integers of "
                "shape (tokens, choices)",
            )
        tokens, choices = index.shape
        chosen = index.reshape(-1).long()
        chosen = chosen.masked_fill(chosen < 0, self.number).clamp(max=self.number)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.number + 1)[: self.number]  # without dropped choices
        arriving = self._exchange.numbers(counts).view(self._ranks, -1)
        sizes = torch.stack((counts.view_as(arriving).sum(1), arriving.sum(1)))
        sent, received = sizes.tolist()  # the only values that the host reads
        order = order[: sum(sent)]
        rows = self._exchange(hidden[order // choices], sent, received)
        experts = torch.arange(arriving.shape[1], device=index.device).repeat(self._ranks)
        experts = experts.repeat_interleave(arriving.flatten(), output_size=sum(received))
        outputs = self._exchange(self._computed(module, rows, experts), received, sent)
        placed = outputs.new_zeros(tokens * choices, outputs.shape[1]).index_copy(0, order, outputs)
        summed = (placed.view(tokens, choices, outputs.shape[1]) * weights.unsqueeze(-1)).sum(1)
        return summed.to(hidden.dtype)

    def _computed(self, module: nn.Module, rows: Tensor, experts: Tensor) -> Tensor:
        """Return the output of one of this rank's experts for each row."""
        with _only(module, lambda parameter: parameter.to_local()):
            ones = rows.new_ones(len(rows), 1)
            outputs: Tensor = self._compute(module, rows, experts.unsqueeze(1), ones)
            if len(rows):
                return outputs
            parameters = [p for p in table_of(module).values() if p is not None]
            linked: Tensor = Linked.apply(outputs.detach(), rows, *parameters)
            return linked

    @torch.no_grad()
    def _check(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Compare with all experts on this rank. Raise StepError on all ranks if they differ."""
        with each_in_eval_mode(module.modules()), constant_draws():
            found = self._dispatched(module, hidden, index, weights)
            with _only(module, whole):
                expected = self._compute(module, hidden, index, weights)
        apart = distance(found, expected)
        wrong = apart > TOLERANCES[found.dtype]
        if any(gather_numbers(int(wrong), self._exchange.group)):
            raise StepError(
                given=f"shoal.ExpertParallel() with {self.name}, a {type(module).__name__}",
                found="its output for a token depends on the order or the number of the tokens",
                fix="leave it out of modules=…; each row of its output must be the sum of its experts' "
                "outputs for this row, times their weights",
            )


@contextmanager
def _only(module: nn.Module, part: Any) -> Iterator[None]:
    """Let a module compute with `part` of each of its parameters."""
    table: dict[str, Any] = table_of(module)
    kept, number = dict(table), vars(module).get(COUNT)
    table.update({key: None if p is None else part(p) for key, p in kept.items()})
    if number is not None:
        vars(module)[COUNT] = next(p.shape[0] for p in table.values() if p is not None)
    try:
        yield
    finally:
        table.update(kept)
        if number is not None:
            vars(module)[COUNT] = number

"""Modules of experts that are distributed over ranks, and the way of their tokens."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from shoal._torch.graphs import has_no_values
from shoal._torch.modules import parameters as table_of
from shoal.distributed.objects import gather_numbers
from shoal.distributed.tensors import broadcast
from shoal.distributed.world import World
from shoal.strategies.eval_mode import each_in_eval_mode
from shoal.strategies.expert_parallel.exchange import Exchange, Linked
from shoal.strategies.expert_parallel.keyed_draws import KeyedDraws, Keys
from shoal.strategies.expert_parallel.parts import experts_in, number_of_experts, some_experts
from shoal.strategies.expert_parallel.routed_tokens import RoutedTokens
from shoal.strategies.expert_parallel.shared_expert import SharedForward, shared_experts
from shoal.strategies.idle_experts import ATTRIBUTE, COUNT
from shoal.strategies.module_patterns import find_units
from shoal.strategies.random_draws.draws import constant_draws
from shoal.strategies.sharded_parameter import ShardedParameter
from shoal.strategies.tolerance import TOLERANCES, distance
from shoal.util.errors import StepError

_SIGNATURE = "forward(hidden, index, weights)"


def find_experts(model: nn.Module, patterns: Sequence[str] | None, degree: int) -> dict[str, nn.Module]:
    """Return the modules of experts by name. Raise StepError if `degree` ranks can't share them."""
    chosen = None if patterns is None else {id(unit) for unit in find_units(model, patterns)}
    found = {
        name: module
        for name, module in model.named_modules()
        if (number_of_experts(module) if chosen is None else id(module) in chosen)
    }
    for name, module in found.items():
        number = number_of_experts(module)
        given = f"shoal.ExpertParallel() on {degree} ranks and {name} ({type(module).__name__})"
        if not number:
            raise StepError(
                given=given,
                found="it has neither parameters of shape (experts, …) nor a ModuleList of experts "
                f"with the same parameters, or no {_SIGNATURE}",
                fix="name the module of the experts, not the layer with its router",
            )
        buffers = [key for key, each in module.named_buffers() if each.shape[:1] == (number,)]
        own = vars(module).get("forward", module.forward)
        replaced = getattr(own, "__func__", None) is not type(module).forward
        if degree > 1 and (buffers or replaced):
            raise StepError(
                given=given,
                found=f"each rank would have all of {buffers[0]}, a buffer with a row for each expert"
                if buffers
                else "its forward was replaced after it was created",
                fix="keep the buffer outside this module, or as a parameter without a gradient"
                if buffers
                else "define forward in the class of the module",
            )
        common = math.gcd(number, degree)
        if common < degree:
            raise StepError(
                given=given,
                found=f"it has {number} experts, and ranks have equal numbers of them",
                fix=f"use expert={common} in the layout, or another number of experts"
                if common > 1
                else "use layout='replicate=-1', or another number of experts",
            )
    if degree > 1:
        _check_separate(found)
    if not found and (patterns is None or len(patterns)):
        raise StepError(
            given=f"shoal.ExpertParallel() around {type(model).__name__}",
            found="no module has parameters of shape (experts, …), or a ModuleList of experts with the "
            f"same parameters, and a {_SIGNATURE}",
            fix="leave the expert axis out of the layout, or put the experts into a module of their "
            "own, which gets the tokens, the experts that the router has chosen for each, and their "
            "weights",
        )
    return found


def _check_separate(found: dict[str, nn.Module]) -> None:
    """Raise StepError if modules of experts share parameters."""
    owners: dict[int, str] = {}
    for name, module in found.items():
        for parameter in module.parameters():
            other = owners.setdefault(id(parameter), name)
            if other != name:
                raise StepError(
                    given=f"shoal.ExpertParallel() with {other} and {name}",
                    found="they are different modules with the same parameters, which would be "
                    "divided twice",
                    fix="use one module of experts in both places, which may run several times",
                )


def _check_rows(name: str, module: nn.Module, degree: int) -> None:
    """Raise StepError if a rank would have no row of a parameter, which FSDP can't shard."""
    for key, parameter in module.named_parameters():
        rows = len(parameter)
        if -(-rows // degree) * (degree - 1) >= rows:
            raise StepError(
                given=f"shoal.ExpertParallel() on {degree} ranks and FSDP, with {name}.{key}",
                found=f"its {rows} row(s) leave a rank without any, which FSDP can't shard",
                fix="leave the shard axis out of the layout, or stack the parameters of the experts in "
                "tensors of shape (experts, …)",
            )


def divide(name: str, module: nn.Module, parent: nn.Module, world: World) -> None:
    """Keep this rank's experts of `module`, and send tokens to their experts in its forward."""
    divided = DividedExperts(name, module, world)
    divided.routed.attach(module)
    shared: tuple[SharedForward, ...] = ()
    if world.layout.degree("expert") > 1:
        if world.layout.degree("shard") > 1:
            _check_rows(name, module, world.layout.degree("expert"))
        object.__setattr__(module, ATTRIBUTE, divided)
        _distribute(module, world)
        shared = shared_experts(parent, world)
    else:
        module.register_forward_pre_hook(divided.routed.before_forward)
    module.forward = _ExpertsForward(module, divided, shared)


def _check_arguments(name: str, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
    shapes = [tuple(each.shape) for each in (hidden, index, weights)]
    alike = len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][0] == shapes[1][0]
    if index.is_floating_point() or not alike or shapes[2] != shapes[1]:
        raise StepError(
            given=f"the experts {name}, for hidden of shape {shapes[0]}",
            found=f"index is of shape {shapes[1]} and {str(index.dtype).removeprefix('torch.')}, "
            f"weights of shape {shapes[2]}",
            fix="pass hidden of shape (tokens, features), and the chosen experts, as integers, and "
            "their weights of shape (tokens, choices)",
        )


def _distribute(module: nn.Module, world: World) -> None:
    mesh = world.mesh["expert"]
    if not world.simulated:
        broadcast([p.data for p in module.parameters()], world.data_group)
    for part in module.modules():
        for key, parameter in part.named_parameters(recurse=False):
            divided: Any = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            divided = nn.Parameter(divided, requires_grad=parameter.requires_grad)
            divided.__class__ = ShardedParameter
            table_of(part)[key] = divided


class _ExpertsForward:
    """The forward of experts, which replaces that of their class.

    If all are on this rank, only until it is known that they draw no random numbers. Pickled, it is the
    forward of their class.
    """

    def __init__(
        self, module: nn.Module, divided: DividedExperts, shared: tuple[SharedForward, ...] = ()
    ) -> None:
        self._module = module
        self._divided = divided
        self._shared = shared

    def __call__(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Return the output of the experts."""
        shared = () if torch.compiler.is_compiling() else self._shared
        result: Tensor = _uncompiled(self._divided, self._module, shared, *given, **named)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> _ExpertsForward:
        return _ExpertsForward(copy.deepcopy(self._module, memo), self._divided)

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self._module, "forward")


def _call(
    divided: DividedExperts,
    module: nn.Module,
    shared: tuple[SharedForward, ...],
    *given: Tensor,
    **named: Tensor,
) -> Tensor:
    bound = inspect.signature(type(module).forward).bind(module, *given, **named)
    return divided(shared, *bound.args)


_uncompiled = torch.compiler.disable(_call)
"""Not compiled with its block, since sizes depend on the values of the router."""


class DividedExperts:
    """The dispatch of one module of experts, of which this rank has a part, or all."""

    def __init__(self, name: str, module: nn.Module, world: World) -> None:
        self.name = name
        self.number = number_of_experts(module)
        self.routed = RoutedTokens(name, self.number, world)
        self._exchange = Exchange(world)
        self._keyed = KeyedDraws(name, world)
        self._compute = type(module).forward
        self._counts = torch.zeros(self.number, dtype=torch.int64, device=world.device)
        self._listed = list(experts_in(module) or ())
        self._drops_idle = False
        for expert in self._listed:
            vars(expert)[COUNT] = None
        self._checked = False

    def __deepcopy__(self, memo: object) -> DividedExperts:
        return self  # a copied module is on the same ranks

    def __call__(
        self,
        shared: tuple[SharedForward, ...],
        module: nn.Module,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, of all ranks."""
        values = hidden.detach(), index, weights.detach()
        traced = has_no_values(hidden)
        if not traced:
            self._keyed.find(module, len(hidden), partial(self._dispatched, module, *values))
        if self._exchange.group is None and not self._keyed.used:
            if self._keyed.used is False:
                del module.forward
            result: Tensor = self._compute(module, hidden, index, weights)
            return result
        if not self._checked and not traced:
            self._check(module, *values)
            self._checked = True
        if self._exchange.group is not None:
            self.routed.add(module, index)
        keys = self._keyed.keys(module, len(hidden))
        possible = [each.before_experts(hidden) for each in shared]
        meanwhile = [each for each in possible if each is not None]
        return self._dispatched(module, hidden, index, weights, keys, meanwhile)

    def _dispatched(
        self,
        module: nn.Module,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        keys: Keys | None = None,
        meanwhile: Sequence[Callable[[], None]] = (),
    ) -> Tensor:
        _check_arguments(self.name, hidden, index, weights)
        tokens, choices = index.shape
        chosen = index.reshape(-1).long()
        chosen = chosen.masked_fill(chosen < 0, self.number).clamp(max=self.number)
        order = chosen.argsort(stable=True)
        counts = chosen.new_zeros(self.number + 1)  # bincount would read its largest value
        counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))[: self.number]
        arriving = self._exchange.numbers(counts).view(len(self._exchange.ranks), -1)
        sizes = torch.stack((counts.view_as(arriving).sum(1), arriving.sum(1)))
        sent, received = sizes.tolist()  # the only values that the host reads
        order = order[: sum(sent)]
        rows = self._exchange(hidden[order // choices], sent, received, meanwhile)
        if keys is not None:
            positions = self._exchange.moved(keys.positions[order // choices], sent, received)
            keys = keys._replace(positions=positions)
        experts = torch.arange(arriving.shape[1], device=index.device).repeat(len(self._exchange.ranks))
        experts = experts.repeat_interleave(arriving.flatten(), output_size=sum(received))
        outputs = self._exchange(self._computed(module, rows, experts, keys), received, sent)
        if outputs.requires_grad and self._drops_idle:
            outputs.register_hook(lambda _: self._count(counts))
        placed = outputs.new_zeros(tokens * choices, outputs.shape[1]).index_copy(0, order, outputs)
        summed = (placed.view(tokens, choices, outputs.shape[1]) * weights.unsqueeze(-1)).sum(1)
        return summed.to(hidden.dtype)

    def _count(self, counts: Tensor) -> None:
        """Count the experts through which gradients flow."""
        self._counts += counts
        for expert, count in zip(self._listed, self._counts, strict=True):
            vars(expert)[COUNT] = count

    def _computed(self, module: nn.Module, rows: Tensor, experts: Tensor, keys: Keys | None) -> Tensor:
        """Return the output of one of this rank's experts for each row."""

        def compute(rows: Tensor, experts: Tensor) -> Tensor:
            ones = rows.new_ones(len(rows), 1)
            result: Tensor = self._compute(module, rows, experts.unsqueeze(1), ones)
            return result

        own = self._exchange.own(self.number)
        with some_experts(module, self._exchange) as parameters:
            try:
                if keys is None:
                    outputs = compute(rows, experts)
                else:
                    outputs = self._keyed.one_by_one(compute, rows, experts, keys, own)
            except IndexError as error:
                raise StepError(
                    given=f"the forward of {self.name} ({type(module).__name__}) on {len(own)} of its "
                    f"{self.number} experts",
                    found=f"it asks for others: {error}",
                    fix="loop over the experts that the module has: range(len(self.weight)), for a "
                    "stacked parameter, or self.num_experts, which Shoal sets",
                ) from error
        if len(rows):
            return outputs
        linked: Tensor = Linked.apply(outputs.detach(), rows, *parameters)
        return linked

    @torch.no_grad()
    def _check(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Compare with all experts on this rank. Raise StepError on all ranks if they differ."""
        with each_in_eval_mode(module.modules()), constant_draws():
            found = self._dispatched(module, hidden, index, weights)
            with some_experts(module, self._exchange, every=True):
                expected = self._compute(module, hidden, index, weights)
                self._find_idle(module, hidden[:0], index[:0], weights[:0])
        apart = distance(found, expected)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else found.dtype
        wrong = apart > max(TOLERANCES[dtype], TOLERANCES[found.dtype])
        group = self._exchange.group
        if wrong if group is None else any(gather_numbers(int(wrong), group)):
            raise StepError(
                given=f"shoal.ExpertParallel() with {self.name}, a {type(module).__name__}",
                found="its output for a token depends on the order or the number of the tokens",
                fix="leave it out of modules=…; each row of its output must be the sum of its experts' "
                "outputs for this row, times their weights",
            )

    def _find_idle(self, module: nn.Module, *nothing: Tensor) -> None:
        """Find whether experts in a list compute without tokens, and so get gradients of zero."""
        called: list[nn.Module] = []
        with ExitStack() as stack:
            for expert in self._listed:
                hook = expert.register_forward_pre_hook(lambda each, _: called.append(each))
                stack.callback(hook.remove)
            self._compute(module, *nothing)
        divided = self._exchange.group is not None  # otherwise, autograd decides
        self._drops_idle = divided and bool(self._listed) and not called

"""Context parallelism of a model: sequences are sliced before its units and gathered after them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoal._torch.autograd import in_backward, made_by
from shoal._torch.dispatch import tree_leaves, tree_map
from shoal._torch.modules import has_compiled_call
from shoal.data.micro import CURRENT_DRAWS
from shoal.distributed.world import World
from shoal.strategies.comm_timing import waiting
from shoal.strategies.context_parallel.ulysses import HeadParallelAttention, SlicePeers
from shoal.strategies.coupling.batch_norm import coupled_layers
from shoal.strategies.coupling.notice import say_draws
from shoal.strategies.eval_mode import each_in_eval_mode, evaluation, untouched
from shoal.strategies.random_draws.draws import constant_draws, draws_of_another_pass, slices_of
from shoal.strategies.random_draws.slices import Slices
from shoal.strategies.tolerance import TOLERANCES, distance
from shoal.util.errors import StepError


def slice_units(model: nn.Module, units: Mapping[str, nn.Module], world: World, *, check: bool) -> None:
    """Make `units`, by name in the order of the model, compute slices of sequences.

    The forwards are replaced in the instances, below all hooks on calls of modules (FSDP's gathering,
    activation checkpointing), so that a recomputation in backward slices again.
    """
    mesh = world.mesh["context"]
    peers = SlicePeers(mesh.get_group(), mesh.size(), mesh.get_local_rank(), world.timeline)
    view = _View(world)
    stacks: dict[str, _Stack] = {}
    for name, unit in units.items():
        stack = stacks.setdefault(name.rpartition(".")[0], _Stack())
        stack.names.append(name)
        _replace(unit, _SlicedForward(unit, name, stack, peers, view))
    forward = _ModelForward(model, list(stacks.values()), view, check=check)
    _replace(model, forward)
    slices = slices_of(model)
    if slices is not None:
        slices.allowed = check
        slices.split_over("context", peers.size, peers.index, forward)


def _replace(module: nn.Module, forward: _Forward) -> None:
    object.__setattr__(module, "forward", forward)


@dataclass
class _Stack:
    """Units in one list: between the first and the last of them a rank has one slice."""

    names: list[str] = field(default_factory=list)
    length: int | None = None
    """Length of the full sequence, while a forward pass is between the first and the last unit."""


@dataclass
class _View:
    """Mode of the units: slices or, for the comparison, full sequences."""

    world: World
    comparing: bool = False
    """Whether the units now compute full sequences."""
    running: int = 0
    """Forward passes of the model that run now. Units called outside compute full sequences."""
    seen: list[tuple[str, Tensor]] | None = None
    """Norms at each position of this rank's slice of each unit's output, during a comparison."""
    dtypes: set[torch.dtype] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether sequences are not sliced: in a comparison, and after the world is closed."""
        return self.comparing or self.world.group is None

    @property
    def direct(self) -> bool:
        """Whether a unit is called outside the forward pass of the model."""
        return not (self.running or torch.compiler.is_compiling() or in_backward())


_Noted: TypeAlias = tuple[Any, list[tuple[str, Tensor]]]
"""The output of the model, and the norms of the outputs of its units."""


class _Forward:
    """Replacement of the forward of a module. Copied or pickled modules have the original forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward: Callable[..., Any] = module.forward

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self._module, "forward")


class _SlicedForward(_Forward):
    """Forward of a unit on this rank's slice."""

    def __init__(
        self, unit: nn.Module, name: str, stack: _Stack, peers: SlicePeers, view: _View
    ) -> None:
        super().__init__(unit)
        self._name = name
        self._stack = stack
        self._peers = peers
        self._view = view
        self._heads = HeadParallelAttention(name, peers)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._view.whole or self._view.direct:
            output = self._forward(*args, **named)
            self._note(output, cut=False)
            return output
        hidden = _hidden(self._name, (args, named))
        length = self._enter(hidden)
        args, named = tree_map(lambda value: self._cut(value, len(hidden), length), (args, named))
        with self._heads:
            output = self._forward(*args, **named)
        self._note(output, cut=True)
        if self._name != self._stack.names[-1]:
            return output
        if not in_backward():
            self._stack.length = None
        slice_length = length // self._peers.size
        return tree_map(lambda value: self._gather(value, slice_length), output)

    def _enter(self, hidden: Tensor) -> int:
        """Return the length of the full sequence. Raise StepError if units run in a different order."""
        size, length = self._peers.size, hidden.size(1)
        if self._name != self._stack.names[0]:
            if not in_backward() and self._stack.length != length * size:
                raise self._misplaced(hidden)
            return length * size
        if length % size:
            raise StepError(
                given=f"sequences of length {length} for {self._name or 'the model'}",
                found=f"the length is not divisible by context={size}",
                fix=f"pad them to {math.ceil(length / size) * size} in the collate function, and "
                "exclude the padding from the loss",
            )
        if not in_backward():
            self._stack.length = length
            _sum_behind(hidden)
        return length

    def _misplaced(self, hidden: Tensor) -> StepError:
        whole, first = self._stack.length, self._stack.names[0]
        return StepError(
            given=f"shoal.ContextParallel() and {self._name}, run with a tensor of "
            f"{tuple(hidden.shape)}",
            found=f"{first}, where sequences are sliced, did not run before it"
            if whole is None
            else f"slices have length {whole // self._peers.size} since {first}",
            fix="pass modules=(…) that run one after the other, in the order of their names, each time",
        )

    def _cut(self, value: Any, batch: int, length: int) -> Any:
        """Return this rank's slice of a tensor with a sequence dimension, or any other value as is."""
        part = length // self._peers.size
        if not isinstance(value, Tensor) or (value.dim() > 2 and value.shape[:2] == (batch, part)):
            return value  # the first unit has sliced it
        dim = _sequence_dim(value, batch, length, self._name)
        return value if dim is None else value.narrow(dim, self._peers.index * part, part)

    def _gather(self, value: Any, length: int) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or value.size(1) != length:
            return value
        return _GatherSlices.apply(value, self._peers)

    def _note(self, output: Any, *, cut: bool) -> None:
        if self._view.seen is None:
            return
        hidden = _hidden(self._name, output)
        if not cut:
            part = hidden.size(1) // self._peers.size
            hidden = hidden.narrow(1, self._peers.index * part, part)
        self._view.dtypes.add(hidden.dtype)
        norms = torch.linalg.vector_norm(hidden.flatten(2), dim=2, dtype=torch.float64)
        self._view.seen.append((self._name, norms))


class _ModelForward(_Forward):
    """Forward of the model. The first one is compared; each one must reach the last unit."""

    def __init__(self, model: nn.Module, stacks: Sequence[_Stack], view: _View, *, check: bool) -> None:
        super().__init__(model)
        self._stacks = stacks
        self._view = view
        self._unchecked = check

    def __call__(self, *args: Any, **named: Any) -> Any:
        view = self._view
        slices = None if view.whole or torch.compiler.is_compiling() else slices_of(self._module)
        if slices is not None and slices.finding:
            return self._run(args, named)
        if self._unchecked and not view.whole:
            self._compare(args, named)
            self._unchecked = False
        if slices is None:
            return self._run(args, named)
        if self._module.training and CURRENT_DRAWS.get() is not None and self._finds_slices():
            slices.find(self._module, view.world, partial(self._run, args, named), (args, named))
        output = self._run(args, named)
        say_draws(self._module, view.world)
        return output

    def _finds_slices(self) -> bool:
        """Return False for compiled units, and with a plan, whose engine finds the slices."""
        sharded = self._view.world.layout.degree("tensor") > 1
        return not sharded and not any(map(has_compiled_call, self._module.modules()))

    def _run(self, args: Any, named: Any) -> Any:
        for stack in self._stacks:
            stack.length = None  # of a forward pass that failed
        self._view.running += 1
        try:
            output = self._forward(*args, **named)
        finally:
            self._view.running -= 1
        for stack in self._stacks:
            if stack.length is not None:
                raise StepError(
                    given=f"shoal.ContextParallel() around {type(self._module).__name__}",
                    found=f"its forward ended without {stack.names[-1]}, where sequences are gathered",
                    fix="pass modules=(…) that all run in every forward pass",
                )
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compare(self, args: Any, named: Any) -> None:
        """Raise StepError on all ranks if slicing the sequences changes the output."""
        call, values = partial(self._run, args, named), (args, named)
        with evaluation(self._module), constant_draws():
            cut = self._noted(call, values, whole=False)
            difference = self._difference(cut, self._noted(call, values, whole=True))
        if difference:
            raise self._differing(difference)

    def compare_draws(
        self,
        model: nn.Module,
        slices: Slices,
        call: Callable[[], Any],
        values: Any,
        needed: Callable[[], bool],
    ) -> str:
        """Compare the model on slices and on full sequences in its mode; see `Split`. Collective."""
        with each_in_eval_mode(coupled_layers(model)):
            with draws_of_another_pass():
                cut = self._noted(call, values, whole=False)
            if not needed():
                return ""
            with draws_of_another_pass(), slices.without("context"):
                return self._difference(cut, self._noted(call, values, whole=True))

    def _difference(self, one: _Noted, other: _Noted) -> str:
        """Return how the outputs differ, the same on all ranks; empty if they are equal."""
        (cut, noted), (whole, expected) = one, other
        found, meant = _numbers(cut), _numbers(whole)
        if not found:
            return f"it returns a {type(cut).__name__}, which cannot be compared"
        pairs = list(zip(found, meant, strict=True)) if len(found) == len(meant) else []
        distances = [distance(*pair) for pair in pairs] or [math.inf]
        dtypes = self._view.dtypes | {value.dtype for value in found}
        tolerance = max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)
        worst = self._reduce(max(distances), "max")
        if not worst > tolerance:  # NaN in a trace, where no tensor has values
            return ""
        apart = [
            number
            for number, ((_, one), (_, other)) in enumerate(zip(noted, expected, strict=False))
            if distance(one, other) > tolerance
        ]
        first = self._reduce(min(apart, default=math.inf), "min")
        unit = noted[int(first)][0] or "the model" if math.isfinite(first) else ""
        place = f"first in {unit}" if unit else "outside the units"
        return f"its output differs by {worst:.2g} (relative) when sequences are sliced, {place}"

    def _noted(self, call: Callable[[], Any], values: Any, *, whole: bool) -> _Noted:
        self._view.comparing, self._view.seen = whole, []
        try:
            with self._isolated(values):
                return call(), self._view.seen
        finally:
            self._view.comparing, self._view.seen = False, None

    @contextmanager
    def _isolated(self, values: Any) -> Iterator[None]:
        # Without autocast, except where FSDP gathers parameters in its dtype; and without its cache,
        # which would keep the tensors that are cast here and have no gradient.
        kind = self._view.world.device.type
        enabled = torch.is_autocast_enabled(kind) and isinstance(self._module, FSDPModule)
        autocast = torch.autocast(kind, enabled=enabled, cache_enabled=False)
        with torch.no_grad(), autocast, untouched(self._module, values):
            yield

    def _reduce(self, value: float, how: str) -> float:
        world = self._view.world
        number = torch.tensor(value, dtype=torch.float64, device=world.device)
        return float(world.all_reduce(number, how))

    def _differing(self, found: str) -> StepError:
        return StepError(
            given=f"shoal.ContextParallel() around {type(self._module).__name__}",
            found=found,
            fix="use only scaled_dot_product_attention between positions, compute positions outside "
            "the units and pass them in, and choose modules=(…) without convolutions or pooling",
        )


class _GatherSlices(torch.autograd.Function):
    """Gather the slices of all ranks along dimension 1.

    All ranks compute the same from the result, each with the loss divided by `size`. So the gradient
    of a slice is `size` times the one that this rank computes. If the result is sliced again, each rank
    computes the gradient of its slice only, and the gradients are summed over ranks.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, peers: SlicePeers) -> Tensor:
        ctx.peers, ctx.cut_again = peers, False
        mine = part.contiguous()
        parts = [torch.empty_like(mine) for _ in range(peers.size)]
        with waiting(peers.timeline):
            dist.all_gather(parts, mine, group=peers.group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise StepError(
                given="a gradient that is differentiated again, with shoal.ContextParallel()",
                found="slices of sequences are gathered, and a second derivative through the whole "
                "sequence would be wrong",
                fix="use another layout for this model, such as shard=-1",
            )
        peers: SlicePeers = ctx.peers
        length = gradient.size(1) // peers.size
        if ctx.cut_again:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            with waiting(peers.timeline):
                dist.all_reduce(gradient, group=peers.group)
        mine = gradient.narrow(1, peers.index * length, length)
        return mine if ctx.cut_again else mine * peers.size, None


def _sum_behind(hidden: Tensor) -> None:
    """Mark the gathers before `hidden`, which is sliced again, so that they sum their gradients."""
    waiting, visited = [hidden.grad_fn], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if made_by(node, _GatherSlices):
            node.cut_again = True
        waiting.extend(child for child, _ in node.next_functions)


def _hidden(name: str, values: Any) -> Tensor:
    """Return the hidden state of arguments or results: the first (batch, length, features) tensor."""
    tensors = [v for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point()]
    for tensor in tensors:
        if tensor.dim() == 3:
            return tensor
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
    raise StepError(
        given=f"shoal.ContextParallel() and {name or 'the model'}",
        found=f"it has no input, or no output, of shape (batch, length, features): {shapes}",
        fix="pass modules=(…) that map such a tensor to another, not modules for embeddings or images",
    )


def _numbers(tree: Any) -> list[Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _sequence_dim(value: Tensor, batch: int, length: int, name: str) -> int | None:
    """Return the sequence dimension of an argument, or None.

    It is the second dimension, after that of the batch; otherwise, for tables, the first one of this
    length. The last one of three or more dimensions holds features.
    """
    shape = value.shape
    if value.dim() >= 2 and shape[1] == length and shape[0] in {1, batch} - {length}:
        return 1
    if value.dim() >= 3 and shape[:2] == (length, length):
        return 1
    places = [dim for dim in range(min(value.dim(), max(2, value.dim() - 1))) if shape[dim] == length]
    if places and places[0] == 0 and batch == length:
        raise StepError(
            given=f"an argument of shape {tuple(shape)} for {name or 'the model'}",
            found=f"batch and sequence both have length {length}, so its rows may belong to samples "
            "or to positions",
            fix="use another batch_size or micro_batches, or tables with a first dimension of 1",
        )
    return places[0] if places else None

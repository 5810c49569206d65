"""What context parallelism does to a model: sequences are cut before its units and gathered after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal._torch.autograd import in_backward, made_by
from shoal._torch.dispatch import tree_leaves, tree_map
from shoal.distributed.world import World
from shoal.strategies.comm_timing import waiting
from shoal.strategies.context_parallel.ulysses import Heads, Peers
from shoal.strategies.eval_mode import evaluation, untouched
from shoal.strategies.tolerance import TOLERANCES, distance
from shoal.util.errors import StepError


def slice_units(model: nn.Module, units: Mapping[str, nn.Module], world: World, *, check: bool) -> None:
    """Let `units`, by name in the order of the model, work on slices of sequences.

    The forwards are replaced in the instances, below everything that hooks into calls of modules
    (FSDP's gathering, activation checkpointing): so what is computed again in backward is cut again.
    """
    mesh = world.mesh["context"]
    peers = Peers(mesh.get_group(), mesh.size(), mesh.get_local_rank(), world.timeline)
    view = _View(world)
    stacks: dict[str, _Stack] = {}
    for name, unit in units.items():
        stack = stacks.setdefault(name.rpartition(".")[0], _Stack())
        stack.names.append(name)
        _replace(unit, _SlicedForward(unit, name, stack, peers, view))
    _replace(model, _ModelForward(model, list(stacks.values()), view, check=check))


def _replace(module: nn.Module, forward: _Forward) -> None:
    object.__setattr__(module, "forward", forward)


@dataclass
class _Stack:
    """Units in one list: between the first and the last of them a rank has one slice."""

    names: list[str] = field(default_factory=list)
    length: int | None = None
    """Of the whole sequence, while a forward is between first and last."""


@dataclass
class _View:
    """How units run at present: on slices, or, to compare, on whole sequences."""

    world: World
    comparing: bool = False
    """With whole sequences, at present."""
    seen: list[tuple[str, Tensor]] | None = None
    """Of this rank's slice in each unit's output the norm at each position, while comparing."""
    dtypes: set[torch.dtype] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether sequences stay whole: also once the world, and with it the other ranks, has gone."""
        return self.comparing or self.world.group is None


class _Forward:
    """Stands for the forward of a module. A copied or pickled module has its own again."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward: Callable[..., Any] = module.forward

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self._module, "forward")


class _SlicedForward(_Forward):
    """The forward of a unit, of this rank's slice."""

    def __init__(self, unit: nn.Module, name: str, stack: _Stack, peers: Peers, view: _View) -> None:
        super().__init__(unit)
        self._name = name
        self._stack = stack
        self._peers = peers
        self._view = view
        self._heads = Heads(name, peers)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._view.whole:
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
        """The length of the whole sequence, with units in the order in which they are cut."""
        size, length = self._peers.size, hidden.size(1)
        if self._name != self._stack.names[0]:
            if not in_backward() and self._stack.length != length * size:
                raise self._misplaced(hidden)
            return length * size
        if length % size:
            raise StepError(
                given=f"sequences of length {length} for {self._name or 'the model'}",
                found=f"context={size} does not divide them",
                fix=f"pad them to {math.ceil(length / size) * size}, in the collate function, and "
                "leave what is added out of the loss",
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
            found=f"{first}, where sequences are cut, did not run before it"
            if whole is None
            else f"slices have length {whole // self._peers.size} since {first}",
            fix="modules=(…) that run one after the other, in the order of their names, each time",
        )

    def _cut(self, value: Any, batch: int, length: int) -> Any:
        """This rank's slice of a tensor that runs along the sequence; anything else as it is."""
        part = length // self._peers.size
        if not isinstance(value, Tensor) or (value.dim() > 2 and value.shape[:2] == (batch, part)):
            return value  # cut before, where the first unit begins
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
    """The forward of the whole model: the first is compared, each has to come to its end."""

    def __init__(self, model: nn.Module, stacks: Sequence[_Stack], view: _View, *, check: bool) -> None:
        super().__init__(model)
        self._stacks = stacks
        self._view = view
        self._unchecked = check

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._unchecked and not self._view.whole:
            self._compare(args, named)
            self._unchecked = False
        return self._run(args, named)

    def _run(self, args: Any, named: Any) -> Any:
        for stack in self._stacks:
            stack.length = None  # of a forward that failed
        output = self._forward(*args, **named)
        for stack in self._stacks:
            if stack.length is not None:
                raise StepError(
                    given=f"shoal.ContextParallel() around {type(self._module).__name__}",
                    found=f"its forward ended without {stack.names[-1]}, where sequences are gathered",
                    fix="modules=(…) that all run, each time",
                )
        return output

    def _compare(self, args: Any, named: Any) -> None:
        """Raise StepError, on all ranks, if it makes a difference that sequences are cut."""
        cut, noted = self._noted(args, named, whole=False)
        whole, expected = self._noted(args, named, whole=True)
        found, meant = _numbers(cut), _numbers(whole)
        if not found:
            raise self._differing(f"it returns a {type(cut).__name__}, which can't be compared")
        pairs = list(zip(found, meant, strict=True)) if len(found) == len(meant) else []
        distances = [distance(*pair) for pair in pairs] or [math.inf]
        dtypes = self._view.dtypes | {value.dtype for value in found}
        tolerance = max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)
        worst = self._reduce(max(distances), "max")
        if worst <= tolerance:
            return
        apart = [
            number
            for number, ((_, one), (_, other)) in enumerate(zip(noted, expected, strict=False))
            if distance(one, other) > tolerance
        ]
        first = self._reduce(min(apart, default=math.inf), "min")
        place = f"first in {noted[int(first)][0]}" if math.isfinite(first) else "outside of the units"
        raise self._differing(
            f"its output differs by {worst:.2g} (relative) when sequences are cut, {place}"
        )

    def _noted(self, args: Any, named: Any, *, whole: bool) -> tuple[Any, list[tuple[str, Tensor]]]:
        self._view.comparing, self._view.seen = whole, []
        try:
            with self._aside((args, named)):
                return self._run(args, named), self._view.seen
        finally:
            self._view.comparing, self._view.seen = False, None

    @contextmanager
    def _aside(self, values: Any) -> Iterator[None]:
        # Autocast off: it keeps what it has cast, and what is cast here has no gradient.
        exact = torch.autocast(self._view.world.device.type, enabled=False)
        with torch.no_grad(), exact, untouched(self._module, values), evaluation(self._module):
            yield

    def _reduce(self, value: float, how: str) -> float:
        world = self._view.world
        number = torch.tensor(value, dtype=torch.float64, device=world.device)
        return float(world.all_reduce(number, how))

    def _differing(self, found: str) -> StepError:
        return StepError(
            given=f"shoal.ContextParallel() around {type(self._module).__name__}",
            found=found,
            fix="nothing but scaled_dot_product_attention between positions; positions computed "
            "outside of the units and given to them; modules=(…) without convolutions or pooling",
        )


class _GatherSlices(torch.autograd.Function):
    """The whole of what each rank has a slice of, along dimension 1.

    All ranks compute the same from it, each a share of the loss, one part in `size`. So the gradient
    of a slice is `size` times that which this rank has found for it. Where it is cut again, each rank
    finds the gradient of its slice alone, and they are summed.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, peers: Peers) -> Tensor:
        ctx.peers, ctx.cut_again = peers, False
        mine = part.contiguous()
        parts = [torch.empty_like(mine) for _ in range(peers.size)]
        with waiting(peers.timeline):
            dist.all_gather(parts, mine, group=peers.group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        peers: Peers = ctx.peers
        length = gradient.size(1) // peers.size
        if ctx.cut_again:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            with waiting(peers.timeline):
                dist.all_reduce(gradient, group=peers.group)
        mine = gradient.narrow(1, peers.index * length, length)
        return mine if ctx.cut_again else mine * peers.size, None


def _sum_behind(hidden: Tensor) -> None:
    """Let gathers, from which sequences come that are cut now, sum their gradients."""
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
    """The hidden state among arguments or results: the first of (batch, length, features)."""
    tensors = [v for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point()]
    for tensor in tensors:
        if tensor.dim() == 3:
            return tensor
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
    raise StepError(
        given=f"shoal.ContextParallel() and {name or 'the model'}",
        found=f"no tensor of shape (batch, length, features) goes in, or none comes out: {shapes}",
        fix="modules=(…) that map such a tensor to another; embeddings and images stay outside",
    )


def _numbers(tree: Any) -> list[Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _sequence_dim(value: Tensor, batch: int, length: int, name: str) -> int | None:
    """Which dimension of an argument runs along the sequence; None if none does.

    The second one, after that of the batch; else, as for tables, the first of this length. The last
    one of three or more holds features.
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
            found=f"batch and sequence both have length {length}, so it may hold a row for each sample "
            "or for each position",
            fix="another batch_size or micro_batches; or tables with a first dimension of 1",
        )
    return places[0] if places else None

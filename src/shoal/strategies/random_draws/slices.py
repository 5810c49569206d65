"""The slices that a rank draws, if activations are split over ranks: found by comparing shapes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch import nn

from shoal._torch.dispatch import TorchDispatchMode, tree_leaves
from shoal._torch.mesh import local_slices
from shoal.distributed.world import World
from shoal.strategies.dtensor import is_divided
from shoal.strategies.random_draws.layouts import Fit
from shoal.strategies.random_draws.operations import CONSTANT
from shoal.strategies.random_draws.philox import Slice, complete

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_OUTER_FIRST = ("tensor", "context")
"""The axes that split activations: each tensor-parallel rank splits its own heads over `context`."""


class Split(Protocol):
    """The part of a strategy that splits the activations of a model over an axis of the layout."""

    def compare_draws(
        self,
        model: nn.Module,
        slices: Slices,
        call: Callable[[], Any],
        values: Any,
        needed: Callable[[], bool],
    ) -> str:
        """Run the model with split and with unsplit activations in its mode. Collective.

        `call` runs it on `values`. It runs with unsplit activations inside `slices.without`, and only
        if `needed`, called after the first run, returns True. Return how the results differ; empty if
        they are equal.
        """
        ...


@dataclass
class _Axis:
    """An axis of the layout over which activations are split."""

    size: int
    index: int
    split: ref[Split]


@dataclass
class _Shapes:
    """The shapes of draws by their site, with the modules of the model in certain modes."""

    split: dict[str, tuple[tuple[int, ...], Fit | None]] = field(default_factory=dict)
    """If activations are split, with the fit."""
    full: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=lambda: defaultdict(dict))
    """If activations are not split over an axis, by its name."""
    known: bool = False
    """Whether the draws of split activations are slices of the others."""


class Slices:
    """The slices of the tensors that this rank draws for one model, by the site of the draw.

    Before the first step, the model runs with activations that are split over ranks and, for each axis
    of the layout that splits them, with activations that are not split over it. A dimension that is as
    many times smaller as the axis has ranks is split over it, in equal contiguous parts in the order of
    the ranks. The slice of a DTensor is known from the DTensor itself.
    """

    def __init__(self) -> None:
        self.finding = False
        """Whether the model runs only to find its slices."""
        self.allowed = True
        """Whether the model may run with unsplit activations."""
        self.by_rank: set[str] = set()
        """Modules that have drawn by rank, until they are printed."""
        self._printed: set[str] = set()
        self._unknown: set[str] = set()
        """Modules with draws whose slice could not be found."""
        self._axes: dict[str, _Axis] = {}
        self._whole: str | None = None
        self._shapes = _Shapes()
        self._found_in: dict[tuple[bool, ...], _Shapes] = {}
        """By the modes of the modules."""

    @property
    def known(self) -> bool:
        """Whether the slices are known, with the modules of the model in their modes."""
        return self._shapes.known

    def split_over(self, axis: str, size: int, index: int, split: Split) -> None:
        """Add an axis that splits activations: its number of ranks, and the place of this rank."""
        self._axes[axis] = _Axis(size, index, ref(split))

    def find(
        self,
        model: nn.Module,
        world: World,
        call: Callable[[], Any],
        values: Any,
        modes: tuple[bool, ...] | None = None,
    ) -> None:
        """Find the slices, if modules have changed to modes that are new. Collective.

        `modes` are the modes that count, the same on all ranks. None means those of all modules.

        The first comparison over each axis records shapes; if no rank draws, that is all. The second
        shows that slices draw the numbers of unsplit activations; if they do not, rank 0 prints the
        reason, and each rank draws its own in these modes.
        """
        if self.finding or not self.allowed or CONSTANT.get():
            return
        modes = modes or tuple(module.training for module in model.modules())
        if modes in self._found_in:
            self._shapes = self._found_in[modes]
            return
        shapes = self._shapes = _Shapes()
        self.finding = True
        try:
            found = self._differences(model, world, call, values)
        finally:
            shapes.known, self.finding = False, False
        if not found:
            self._merge(world.gather((shapes.split, dict(shapes.full))))
        shapes.known = bool(shapes.split) and not found
        self._found_in[modes] = shapes
        self.by_rank.clear()
        if found:
            world.print(f"shoal: each rank draws its own random numbers: {found}")

    def _differences(self, model: nn.Module, world: World, call: Callable[[], Any], values: Any) -> str:
        """Return how slices differ from unsplit activations, the same on all ranks; empty if equal."""

        def drawn() -> bool:
            return any(world.gather(bool(self._shapes.split)))

        found = [""]
        for known in (False, True):
            self._shapes.known, found = known, []
            self._unknown.clear()
            for split in filter(None, [axis.split() for axis in self._axes.values()]):
                found.append(split.compare_draws(model, self, call, values, drawn))
                if not drawn():
                    return ""
        if self._unknown:
            found.insert(0, f"the slices of {', '.join(sorted(self._unknown))} are not known")
        return next(filter(None, itertools.chain(*world.gather(found))), "")

    def _merge(self, others: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Add the draws of other stages of a pipeline: each rank draws outside their modules too."""
        shapes = self._shapes
        for split, full in others:
            for site in split.keys() - shapes.split.keys():
                shapes.split[site] = split[site]
                for name, sizes in full.items():
                    if site in sizes:
                        shapes.full[name][site] = sizes[site]

    def take_by_rank(self) -> str:
        """Return the names of the modules in `by_rank` that were not returned before, and clear it."""
        new = self.by_rank - self._printed
        self._printed |= new
        self.by_rank.clear()
        return ", ".join(sorted(new))

    @contextmanager
    def without(self, axis: str) -> Iterator[None]:
        """Record draws of activations that are not split over an axis."""
        self._whole = axis
        try:
            yield
        finally:
            self._whole = None

    @property
    def is_whole(self) -> bool:
        """Whether activations are not split over one of the axes now."""
        return self._whole is not None

    def record(self, site: str, shape: Sequence[int], fit: Fit | None) -> Fit | None:
        """Record the shape of a draw, and return its fit: that of split activations."""
        split = self._shapes.split
        if self._whole is not None:
            self._shapes.full[self._whole][site] = tuple(shape)
            return split[site][1] if site in split else fit
        if not self.known:
            split[site] = tuple(shape), fit
        return fit

    def part(self, site: str, shape: Sequence[int]) -> Slice | None:
        """Return the slice that a tensor of this shape is. None if it is not known."""
        if self.finding and not self.known:  # the same numbers in all runs, for decisions
            return complete(shape)
        found = self._found(site, shape) if self.known else None
        if self.known and found is None:
            self._unknown.add(site.partition("#")[0] or "the model")
        return found

    def _found(self, site: str, shape: Sequence[int]) -> Slice | None:
        axes = [name for name in _OUTER_FIRST if name in self._axes and name != self._whole]
        if not axes:
            return complete(shape)
        divided = _DIVIDED.get()
        if divided is not None:
            return divided if divided.sizes == tuple(shape) else None
        split, _ = self._shapes.split.get(site, ((), None))
        first = [0] * len(shape)
        for name in axes:
            axis, full = self._axes[name], self._shapes.full[name].get(site, ())
            if not len(full) == len(split) == len(shape):
                return None
            for dim, (one, other) in enumerate(zip(split, full, strict=True)):
                if one == other:
                    continue
                if one * axis.size != other:
                    return None
                first[dim] = first[dim] * axis.size + axis.index
        return Slice(
            tuple(shape), tuple(size * place for size, place in zip(shape, first, strict=True))
        )


def row_slice(part: Slice, fit: Fit | None, samples: int) -> Slice:
    """Return the slice of the row of each of the samples; a tensor without samples is one row."""
    if fit is None:
        return part
    sizes, first = ([*each] for each in part)
    elements = [each.pop(fit[0]) // samples for each in (sizes, first)]
    if fit[1] == 0:  # each row of an index
        return Slice(tuple(sizes), tuple(first))
    return Slice((elements[0], *sizes), (elements[1], *first))


class DTensorDraws(TorchDispatchMode):
    """Mode in which the slices of DTensors are known to the draws for their local tensors."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **named)
        tensor = next(filter(is_divided, tree_leaves((args, named))), None)
        token = _DIVIDED.set(None if tensor is None else _part_of(tensor))
        try:
            return function(*args, **named)
        finally:
            _DIVIDED.reset(token)


_DIVIDED: ContextVar[Slice | None] = ContextVar("slice of the DTensor that is drawn", default=None)


def _part_of(tensor: DTensor) -> Slice:
    held = local_slices(tensor)
    sizes = tuple(each.stop - each.start for each in held)
    return Slice(sizes, tuple(each.start for each in held))

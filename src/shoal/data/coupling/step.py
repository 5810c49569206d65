"""The groups of samples of the running step, and the sums over them that ranks exchange."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.data.coupling.groups import HeldGroup, MicroGroups, groups_of
from shoal.data.micro import MicroBatch
from shoal.distributed.layout import DATA_AXES
from shoal.distributed.reductions import all_reduce
from shoal.util.errors import StepError

if TYPE_CHECKING:
    from shoal.distributed.world import World

ATTRIBUTE = "_shoal_coupling"


class Recorded(Protocol):
    """The sums that the calls of a layer in one batch leave for its state, such as running statistics.

    `sums` returns this rank's part. `apply` gets the total over ranks, and changes the state.
    """

    coupling: Coupling

    def sums(self) -> Tensor:
        """Return one float64 vector, of the same length on all ranks."""
        ...

    def apply(self, total: Tensor) -> None:
        """Update the state of the layer."""
        ...


class CoupledStep:
    """The micro-batch that the ranks of a World process now, and the state that the step will update.

    Attributes:
        micro: The current micro-batch; None outside a step, where layers use the samples at hand.
        rows: Samples in the tensors of `micro`, with those that a pipeline adds as padding.
        calls: The number of calls of each layer in this micro-batch.
        recorded: The sums that each layer has recorded since the batch began.
        applied: The number of batches whose sums were applied.
        expected: The calls that layers expect next in the batch, by the function that is called.
    """

    def __init__(self, world: World) -> None:
        self.micro: MicroBatch | None = None
        self.rows = 0
        self.calls: dict[nn.Module, int] = {}
        self.recorded: dict[nn.Module, Recorded] = {}
        self.applied = 0
        self.expected: dict[object, Any] = {}
        self.group: dist.ProcessGroup | None = None
        self._couplings: weakref.WeakSet[Coupling] = weakref.WeakSet()
        self._world = world

    def close(self) -> None:
        """Forget the process group."""
        self.group = None

    def add(self, coupling: Coupling) -> None:
        """Cut batches at the groups of `coupling` too. The first call is collective."""
        self._couplings.add(coupling)
        world = self._world
        if self.group is None and world.data_size > 1:
            # Its own: DDP's buckets are reduced while backward runs, in an order of their own.
            groups = [list(ranks) for ranks in world.layout.groups(*DATA_AXES)]
            self.group, _ = dist.new_subgroups_by_enumeration(groups)
            world.watchdog.extend_torch_timeouts()

    def unit(self) -> int | None:
        """Return the number of samples at whose multiples micro-batches are cut; None if at any."""
        if any(coupling.size for coupling in self._couplings):
            gc.collect()  # deleted models that are still in reference cycles, on some ranks
        sizes = [coupling.size for coupling in self._couplings if coupling.size is not None]
        return math.lcm(*sizes) if sizes else None

    def processing(self, micro: MicroBatch | None, rows: int = 0) -> Processing:
        """Return a context that uses `micro`, for its forward or its backward."""
        return Processing(self, micro, rows)

    def begin(self, micro: MicroBatch | None, rows: int = 0) -> None:
        """Use `micro` from now on."""
        self.micro, self.rows = micro, rows or (micro.samples if micro else 0)
        self.calls.clear()

    def number(self, module: nn.Module) -> int:
        """Return the number of this call of `module` in the micro-batch."""
        number = self.calls[module] = self.calls.get(module, -1) + 1
        return number

    @contextmanager
    def recording_nothing(self) -> Iterator[None]:
        """Forget the sums that layers record inside the block."""
        recorded, self.recorded = self.recorded, {}
        try:
            yield
        finally:
            self.recorded = recorded

    def drop(self) -> None:
        """Forget what a batch has recorded that was skipped or failed."""
        self.recorded.clear()
        self.expected.clear()

    def apply(self) -> None:
        """Update the state of the layers with the sums of the batch, the same on all ranks. Collective.

        Only now: no layer sees a state that depends on where the batch was cut.
        """
        self.applied += 1
        self.expected.clear()
        if self.recorded:  # on all ranks or on none
            with torch.no_grad():
                self._apply_recorded()

    def _apply_recorded(self) -> None:
        recorded, self.recorded = list(self.recorded.values()), {}
        parts = [each.sums() for each in recorded]
        split = [number for number, each in enumerate(recorded) if each.coupling.split]
        if split:
            total = torch.cat([parts[number] for number in split])
            dist.all_reduce(total, group=self.group)
            totals = total.split([len(parts[number]) for number in split])
            for number, each in zip(split, totals, strict=True):
                parts[number] = each
        for each, total in zip(recorded, parts, strict=True):
            each.apply(total)


class Processing:
    """The context of `CoupledStep.processing`. A class is entered faster than a generator."""

    __slots__ = ("_before", "_given", "_step")

    def __init__(self, step: CoupledStep, micro: MicroBatch | None, rows: int) -> None:
        self._step = step
        self._given = micro, rows
        self._before = step.micro, step.rows

    def __enter__(self) -> None:
        self._step.begin(*self._given)

    def __exit__(self, *_: object) -> None:
        self._step.micro, self._step.rows = self._before


class Coupling:
    """The groups of one parallelized model: of `size` samples each, or the complete batch for None."""

    def __init__(self, world: World, size: int | None, names: dict[nn.Module, str]) -> None:
        self.world = world
        self.size = size
        self.names = weakref.WeakKeyDictionary(names)
        self.step = world.service(CoupledStep)
        self.step.add(self)

    @property
    def alone(self) -> bool:
        """Whether this rank has all samples, in one group."""
        return self.world.data_size == 1 and self.size is None

    @property
    def split(self) -> bool:
        """Whether ranks have different groups, so that no rank knows the sums of all."""
        return self.world.data_size > 1 and self.size is not None

    def part(self, module: nn.Module, rows: int) -> Part | None:
        """Return the groups of the `rows` of the input of a layer; None outside a step."""
        micro = self.step.micro
        if micro is None or micro.place is None:
            return None
        given = f"{type(module).__name__} {self.names.get(module, '')}".strip()
        place, size = micro.place, self.size
        if size is None and place.micro_batches > 1:
            raise several(given, place.micro_batches)
        if size is not None and (place.unit is None or place.unit % size):
            raise StepError(
                given=f"{given} with statistics={size}",
                found="the loop over the batches began before parallelize, so the batches are not "
                "cut at the boundaries of the groups",
                fix="call shoal.parallelize(…) first, then for batch in loader.epochs(10)",
            )
        ranks, rank = (1, 0) if place.whole else (self.world.data_size, self.world.data_rank)
        groups = groups_of(place, ranks=ranks, size=size)
        held = groups.held[rank]
        real = micro.samples if micro.weight else 0
        if not real:
            segments = [(0, 0) for _ in held]
        elif len(held) == 1 and self.step.rows == real:
            segments = [(0, rows)]  # any number of rows for each sample
        elif rows == self.step.rows:
            segments = [(each.start, each.stop) for each in held]
        else:
            raise StepError(
                given=f"{given}: an input of {rows} rows for {self.step.rows} samples",
                found=f"this rank has samples of {len(held)} groups, and it is unknown which rows "
                "belong to which sample",
                fix="pass an input with one row for each sample; or use statistics='batch' with one "
                "micro-batch",
            )
        return Part(self, groups, held, segments, place.number if place.whole else 0)


class Part(NamedTuple):
    """The rows of a layer's input on this rank: `segments` [start, stop), one for each group `held`.

    Rows outside the segments are padding. There is no segment if the micro-batch has no samples on any
    rank. `row` is the number of the virtual rank, or 0.
    """

    coupling: Coupling
    groups: MicroGroups
    held: tuple[HeldGroup, ...]
    segments: list[tuple[int, int]]
    row: int = 0

    def add_up(self, sums: Tensor) -> Tensor:
        """Return the sums of this rank's groups over all ranks, given its part; shape (groups, …)."""
        if not self.groups.shared:
            return sums
        first, last = self.groups.first, self.groups.last
        total = sums.new_zeros((last - first, *sums.shape[1:]))
        numbers = [each.group - first for each in self.held]
        total[numbers] = sums
        all_reduce(total, "sum", self.coupling.step.group)
        return total[numbers]


def several(given: str, count: int) -> StepError:
    """Return the error of statistics over a batch that no micro-batch holds."""
    return StepError(
        given=f"{given} with micro_batches={count}",
        found="its statistics are taken over the whole batch, and each micro-batch is only a part of "
        "it",
        fix="use shoal.parallelize(model, world, statistics=64) for the statistics of groups of 64 "
        "samples, which are the same with any number of ranks and micro-batches; or micro_batches=1; "
        "or statistics='rank' for the statistics of each micro-batch on each rank, as in DDP; or "
        "GroupNorm instead of BatchNorm",
    )


class CouplingHolder:
    """Holder of the coupling of a layer. Copied or pickled layers have none."""

    def __init__(self, coupling: Coupling | None = None) -> None:
        self.coupling = coupling

    def __deepcopy__(self, memo: object) -> CouplingHolder:
        return CouplingHolder()

    def __reduce__(self) -> tuple[object, ...]:
        return CouplingHolder, ()


def coupling_of(module: nn.Module) -> Coupling | None:
    """Return the coupling that `parallelize` attached to a layer, or None."""
    attachment = vars(module).get(ATTRIBUTE)
    return attachment.coupling if isinstance(attachment, CouplingHolder) else None


def attach(module: nn.Module, coupling: Coupling | None) -> None:
    """Attach a coupling to a layer."""
    vars(module)[ATTRIBUTE] = CouplingHolder(coupling)

"""The times of collectives, by size and backend, on the ranks of a world.

All ranks do the same in the same order. Before each sample they agree to continue, in one small
all-reduce, which also makes them start together.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal._torch.c10d import all_gather_tensor
from shoal.distributed.watchdog.world_watchdog import CHECKED_STEPS
from shoal.distributed.world import World
from shoal.tools.bench.collectives.machine_file import CollectiveSeries, Point, fit_line
from shoal.tools.bench.measurement import LEAST, calls_for, in_turns, quartiles, time_calls
from shoal.util.clock import CLOCK

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send_recv",
    "barrier",
)
SAMPLE_SECONDS = 0.002
"""Duration of a sample, in several calls."""
_MOST_CALLS = 50
_ELEMENT = 4


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The results, the sizes of each series that took too long, and whether it ran to its end."""

    series: tuple[CollectiveSeries, ...]
    left_out: tuple[tuple[str, str, int], ...]
    complete: bool


class BackendGroup:
    """The ranks as one backend connects them, and the memory that it sends."""

    def __init__(self, world: World, backend: str, *, own: bool, largest: int) -> None:
        self.backend = backend
        self.ranks, self.rank = world.size, world.rank
        self.group = world.group if own else dist.new_group(backend=backend)
        # Gloo and MPI are measured with CPU memory, the only kind that they send.
        self.device = world.device if backend == "nccl" else torch.device("cpu")
        elements = self.elements(largest)
        self._mine = torch.empty(elements, device=self.device).fill_(0)
        self._others = torch.empty(elements, device=self.device).fill_(0)

    def elements(self, bytes: int) -> int:
        """Return the number of elements that fill these bytes and can be split over the ranks."""
        return self.ranks * max(1, round(bytes / _ELEMENT / self.ranks))

    def call(self, operation: str, bytes: int) -> Callable[[], object]:
        """Return a function that runs the operation once, and returns when it is done on the CPU."""
        group, count = self.group, self.elements(bytes)
        whole, other = self._mine[:count], self._others[:count]
        part = other[: count // self.ranks]
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: all_gather_tensor(whole, part, group=group),
            "reduce_scatter": lambda: scatter(part, whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, 0, group=group),
            "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
            "send_recv": lambda: self._pass_on(whole, other),
            "barrier": lambda: dist.barrier(group=group),
        }
        return calls[operation]

    def _pass_on(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Send to the next rank and receive from the one before, both at once."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        both = [
            dist.P2POp(dist.isend, sent, after, group=self.group),
            dist.P2POp(dist.irecv, received, before, group=self.group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()


class Probe:
    """One operation of a backend with messages of one size."""

    def __init__(self, place: BackendGroup, operation: str, bytes: int) -> None:
        self.place, self.operation = place, operation
        self.bytes = place.elements(bytes) * _ELEMENT if bytes else 0
        self._call = place.call(operation, bytes)
        self.times = 1
        self.expected = 0.0
        self.samples: list[float] = []

    def warm_up(self, world: World) -> None:
        """Connect, and determine the number of calls of a sample."""
        self._call()
        self.expected = _largest(world, time_calls(self._call, device=self.place.device))
        self.times = calls_for(SAMPLE_SECONDS, self.expected, _MOST_CALLS)

    def sample(self) -> None:
        """Measure once."""
        self.samples.append(time_calls(self._call, self.times, self.place.device))


def measure_collectives(
    world: World,
    *,
    backends: Sequence[str],
    operations: Sequence[str],
    sizes: Sequence[int],
    repeats: int,
    seconds: float,
    asked_to_stop: Callable[[], bool],
    tell: Callable[[str], object],
) -> Measurement:
    """Measure all operations of all backends over sizes in bytes; collective.

    The first of the backends is the world's own. A call takes as long as its slowest rank. Each
    sample is a few calls. The samples of all points take turns, so that other load on the machine
    affects all of them. The largest sizes are left out if LEAST samples would not fit into the time.
    `asked_to_stop` may become true on any rank; then all stop, with the results so far. `tell` gets a
    line with the expected duration.
    """
    for _ in range(CHECKED_STEPS + 1):
        # In its first steps a world compares each collective, in another collective.
        world.watchdog.begin_step()
    places = [
        BackendGroup(world, backend, own=number == 0, largest=max(sizes))
        for number, backend in enumerate(backends)
    ]
    clock = _Clock(world, seconds, asked_to_stop)
    probes, left_out = _warm(world, places, operations, sizes, clock)
    pause = statistics.median(time_calls(clock.goes_on) for _ in range(LEAST))  # added to each sample
    round_seconds = sum(probe.times * probe.expected + pause for probe in probes) or 1.0
    # Rank-independent, since the clock decides.
    repeats = world.broadcast(max(LEAST, min(repeats, int(clock.left / round_seconds))))
    tell(
        f"{len(probes)} points, {repeats} samples of each: about {repeats * round_seconds:.0f} s more; "
        "Ctrl-C ends it and keeps the results so far"
    )
    complete = _sample(probes, repeats, clock)
    return Measurement(
        series=tuple(_series(world, probes)), left_out=tuple(left_out), complete=complete
    )


class _Clock:
    """The time limit; the ranks decide together."""

    def __init__(self, world: World, seconds: float, asked_to_stop: Callable[[], bool]) -> None:
        self._world, self._asked = world, asked_to_stop
        self._ends = CLOCK.now() + seconds

    @property
    def left(self) -> float:
        """The seconds left on this rank."""
        return self._ends - CLOCK.now()

    def left_everywhere(self) -> float:
        """Return the seconds left on all ranks: the minimum."""
        return -_largest(self._world, -self.left)

    def goes_on(self) -> bool:
        """Return whether no rank was asked to stop; all ranks agree, and start together after it."""
        return not _largest(self._world, float(self._asked()))


def _warm(
    world: World,
    places: Sequence[BackendGroup],
    operations: Sequence[str],
    sizes: Sequence[int],
    clock: _Clock,
) -> tuple[list[Probe], list[tuple[str, str, int]]]:
    """Return two lists: the probes that fit into the time, warmed up and sorted by size; the others."""
    probes: list[Probe] = []
    left_out: list[tuple[str, str, int]] = []
    largest: dict[tuple[BackendGroup, str], Probe] = {}
    for size in (0, *sizes):
        for place in places:
            for operation in operations:
                if (operation == "barrier") != (size == 0) or not clock.goes_on():
                    continue
                before = largest.get((place, operation))
                taken = sum(LEAST * probe.times * probe.expected for probe in probes)
                if before is not None:
                    expected = before.expected * size / max(1, before.bytes)
                    if (LEAST + 2) * expected + taken > clock.left_everywhere():
                        left_out.append((place.backend, operation, size))
                        continue
                probe = Probe(place, operation, size)
                probe.warm_up(world)
                largest[place, operation] = probe
                probes.append(probe)
    return probes, left_out


def _sample(probes: Sequence[Probe], repeats: int, clock: _Clock) -> bool:
    """Take the samples while there is time; return whether no rank was asked to stop."""
    for probe in in_turns(probes, repeats, clock.left_everywhere):
        if not clock.goes_on():
            return False
        probe.sample()
    return True


def _series(world: World, probes: Sequence[Probe]) -> Iterable[CollectiveSeries]:
    """Yield the medians over samples of the slowest rank's times."""
    # A probe that was ended before its first sample has the call of its warm-up.
    everyones = world.gather([probe.samples or [probe.expected] for probe in probes])
    points: dict[tuple[str, str, str], list[Point]] = {}
    for number, probe in enumerate(probes):
        slowest = [
            max(ranks) for ranks in zip(*(samples[number] for samples in everyones), strict=True)
        ]
        key = probe.place.backend, probe.operation, probe.place.device.type
        points.setdefault(key, []).append(summarize_samples(probe.bytes, slowest))
    backends = list(dict.fromkeys(probe.place.backend for probe in probes))
    order = sorted(points, key=lambda key: (backends.index(key[0]), OPERATIONS.index(key[1])))
    for backend, operation, memory in order:
        found = points[backend, operation, memory]
        yield CollectiveSeries(
            backend=backend,
            operation=operation,
            memory=memory,
            ranks=world.size,
            points=tuple(found),
            fit=fit_line(found),
        )


def summarize_samples(bytes: int, samples: Sequence[float]) -> Point:
    """Return the median and the quartiles of samples."""
    low, median, high = quartiles(samples)
    return Point(bytes=bytes, seconds=median, low=low, high=high, samples=len(samples))


def _largest(world: World, value: float) -> float:
    """Return the largest value of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64, device=world.device)
    return float(world.all_reduce(tensor, "max").item())

"""The machine file: measured collectives of a machine by size, and pairs of ranks.

`shoal bench comm` writes these files. They are JSON with a version. Reading validates them, so that
users of the numbers need not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from shoal.telemetry.collective_stats import bus_factor
from shoal.util.errors import ShoalError
from shoal.util.plain import from_plain
from shoal.util.regular_file import replace

FORMAT, VERSION = "shoal machine", 1
LEAST_POINTS = 3
"""A line through two points always fits, so more are needed."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Messages of one size: seconds of a call, the median and both quartiles of `samples`."""

    bytes: int
    seconds: float
    low: float
    high: float
    samples: int

    @property
    def spread(self) -> float:
        """The distance between the quartiles as a fraction of the median."""
        return (self.high - self.low) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Fit:
    """time = latency + bytes / bandwidth (Hockney 1994), in seconds and bytes/s.

    `bandwidth` is None if larger messages took no longer. `error` is the root of the mean squared
    relative error.
    """

    latency: float
    bandwidth: float | None
    error: float

    def seconds(self, bytes: int) -> float:
        """Return the expected time of a message of this size."""
        return self.latency + (bytes / self.bandwidth if self.bandwidth else 0.0)


@dataclass(frozen=True, kw_only=True)
class CollectiveSeries:
    """One operation over one backend and several sizes, in the memory of the CPU or of GPUs ("cuda").

    Bytes are counted as in NCCL's tests: of the full tensor that is reduced, gathered or scattered; in
    all_to_all, of the tensor that one rank sends; in send_recv, of one message. A barrier has no bytes.
    """

    backend: str
    operation: str
    memory: str
    ranks: int
    points: tuple[Point, ...]
    fit: Fit | None = None

    def algorithm_bandwidth(self, point: Point) -> float:
        """Return bytes per second of a call."""
        return point.bytes / point.seconds

    def bus_bandwidth(self, point: Point) -> float:
        """Return bytes per second over the busiest link of a ring, which the hardware limits.

        The factors come from NCCL's tests (their doc/PERFORMANCE.md).
        """
        return bus_factor(self.operation, self.ranks) * self.algorithm_bandwidth(point)


@dataclass(frozen=True, kw_only=True)
class LinkTable:
    """Bytes/s and latencies in seconds from each rank (row) to each other (column)."""

    backend: str
    bytes: int
    bandwidth: tuple[tuple[float | None, ...], ...]
    latency: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class MachineFile:
    """The results of a measurement, with place, time and versions. `hosts` has the host of each rank.

    `device` is the kind on which ranks compute, `cores` and `threads` are those of rank 0, `interface`
    is the network's, empty within one machine. `measured` is the start (ISO 8601, UTC), `seconds` the
    duration; `complete` is False if it was interrupted.
    """

    measured: str
    seconds: float
    complete: bool
    shoal: str
    torch: str
    launcher: str
    hosts: tuple[str, ...]
    device: str
    device_name: str
    cores: int
    threads: int
    interface: str
    series: tuple[CollectiveSeries, ...]
    links: LinkTable | None = None


def fit_line(points: Sequence[Point]) -> Fit | None:
    """Return the line with the least relative errors; None for fewer than LEAST_POINTS points.

    Sizes and times span orders of magnitude: absolute errors would neglect the small ones. Neither
    latency nor time per byte is negative.
    """
    if len({point.bytes for point in points}) < LEAST_POINTS:
        return None
    sizes = np.array([point.bytes for point in points], float)
    seconds = np.array([point.seconds for point in points])
    inverse, rates = 1 / seconds, sizes / seconds
    # Divided by the measured time, each prediction should be 1.
    [latency, slope], *_ = np.linalg.lstsq(np.stack([inverse, rates], 1), np.ones_like(seconds))
    if latency < 0:
        latency, slope = 0.0, rates.sum() / (rates**2).sum()
    if slope <= 0:
        latency, slope = inverse.sum() / (inverse**2).sum(), 0.0
    error = np.sqrt(np.mean((latency * inverse + slope * rates - 1) ** 2))
    return Fit(
        latency=float(latency), bandwidth=float(1 / slope) if slope else None, error=float(error)
    )


def machine_values(machine: MachineFile) -> dict[str, object]:
    """Return the values of a machine file."""
    return {"format": FORMAT, "version": VERSION, **asdict(machine)}


def write_machine_file(machine: MachineFile, path: Path) -> None:
    """Write a machine file atomically."""
    try:
        replace(path, json.dumps(machine_values(machine), indent=1) + "\n")
    except OSError as error:
        raise ShoalError(
            given=str(path),
            found=f"it can't be written: {error.strerror}",
            fix="pass -o FILE in a directory with write permission and free space",
        ) from None


def read_machine_file(path: Path) -> MachineFile:
    """Return the machine that a file describes.

    Raises ShoalError if the file can't be read, is not a machine file or has a newer version, or if a
    value is invalid.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise _wrong(path, f"it can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _wrong(path, "it is not JSON") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise _wrong(path, "it is not a machine file")
    if found.get("version") != VERSION:
        raise _wrong(
            path, f"its version is {found.get('version')!r}; the supported version is {VERSION}"
        )
    try:
        machine: MachineFile = from_plain(MachineFile, found, least=0)
        _check(machine)
    except ValueError as mistake:
        raise _wrong(path, str(mistake)) from None
    return machine


def _wrong(path: Path, found: str) -> ShoalError:
    return ShoalError(given=str(path), found=found, fix="measure again: shoal bench comm")


def _check(machine: MachineFile) -> None:
    """Raise ValueError for values that are valid separately but not together."""
    ranks = len(machine.hosts)
    for number, series in enumerate(machine.series):
        where = f"series[{number}]"
        if series.ranks < 2 or not series.points:
            raise ValueError(f"{where} has {series.ranks} rank(s) and {len(series.points)} point(s)")
        if any(
            point.seconds == 0 or not point.low <= point.seconds <= point.high
            for point in series.points
        ):
            raise ValueError(f"{where} has a point that took no time, or not between its quartiles")
        if series.fit is not None and series.fit.bandwidth == 0:
            raise ValueError(f"{where}.fit.bandwidth is 0")
    if machine.links is not None:
        for name in ("bandwidth", "latency"):
            matrix = getattr(machine.links, name)
            if len(matrix) != ranks or any(len(row) != ranks for row in matrix):
                raise ValueError(f"links.{name} is not of {ranks} x {ranks}, for {ranks} hosts")

"""The output of `shoal bench comm`: a sentence, then tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console

from shoal.distributed.link_speed import LinkMeasurements, slow
from shoal.tools.bench.collectives.machine_file import CollectiveSeries, MachineFile, Point
from shoal.util.tables import print_line, print_rows
from shoal.util.units import bandwidth, binary_size, duration, percent, two_digits

MOST_RANKS = 8
"""Maximum number of ranks for which a matrix is printed."""


def print_measurements(
    console: Console, machine: MachineFile, left_out: Sequence[tuple[str, str, int]]
) -> None:
    """Print the measurements."""
    print_line(console, describe_backends(machine))
    print_line(console, *_remarks(machine, left_out), "")
    _show_fits(console, machine)
    for backend in dict.fromkeys(series.backend for series in machine.series):
        own = [
            each for each in machine.series if each.backend == backend and each.operation != "barrier"
        ]
        if own:
            _show_matrix(
                console,
                f"Time of a call over {backend}",
                own,
                lambda _, it: duration(it.seconds, fixed=True),
            )
            _show_matrix(
                console,
                f"Bus bandwidth over {backend}",
                own,
                lambda series, it: bandwidth(series.bus_bandwidth(it)),
            )


def describe_backends(machine: MachineFile) -> str:
    """Return the first sentence: the bandwidth of each backend, and how they compare."""
    backends = list(dict.fromkeys(series.backend for series in machine.series))
    sentences = [_sentence(_main(machine, backend)) for backend in backends]
    hosts = len(set(machine.hosts))
    where = f"{len(machine.hosts)} ranks on {hosts} machine{'s' if hosts > 1 else ''}"
    text = f"{where}: {'; '.join(sentences)}."
    mains = [_main(machine, backend) for backend in backends]
    if len({main.operation for main in mains}) == 1 and len(mains) > 1:
        text += " " + " ".join(compare_backends(mains[0], other) for other in mains[1:])
    return text


def _main(machine: MachineFile, backend: str) -> CollectiveSeries:
    """Return the series by which a backend is judged: all_reduce, or another if it is missing."""
    own = [series for series in machine.series if series.backend == backend]
    return min(own, key=lambda each: (each.operation != "all_reduce", each.operation == "barrier"))


def _sentence(series: CollectiveSeries) -> str:
    first, last = series.points[0], series.points[-1]
    if series.operation == "barrier":
        return f"{series.backend} takes {duration(first.seconds)} for a barrier"
    article = "an" if series.operation.startswith("all") else "a"
    text = (
        f"{series.backend} moves {bandwidth(series.bus_bandwidth(last))} (bus) "
        f"in {article} {series.operation} of {binary_size(last.bytes)}"
    )
    if len(series.points) > 1:
        text += f", and takes {duration(first.seconds)} for {binary_size(first.bytes)}"
    return text


def compare_backends(one: CollectiveSeries, other: CollectiveSeries) -> str:
    """Return how another backend compares with one at the smallest and the largest size of both."""
    known = {point.bytes: point.seconds for point in one.points}
    common = [point for point in other.points if point.bytes in known]
    ratios = [
        (point.seconds / known[point.bytes], point.bytes) for point in (*common[:1], *common[1:][-1:])
    ]
    if not ratios:
        return ""
    (first, size), *rest = ratios
    text = f"{other.backend} takes {two_digits(first)} times as long as {one.backend}"
    return (
        f"{text} at {binary_size(size)}"
        + "".join(f", {two_digits(more)} times as long at {binary_size(at)}" for more, at in rest)
        + "."
    )


def _remarks(machine: MachineFile, left_out: Sequence[tuple[str, str, int]]) -> Iterator[str]:
    if not machine.complete:
        yield "The measurement was ended early: these are the samples until then."
    for backend, operation in dict.fromkeys((backend, name) for backend, name, _ in left_out):
        sizes = [size for other, name, size in left_out if (other, name) == (backend, operation)]
        yield (
            f"{operation} over {backend}: {binary_size(min(sizes))} and more would have taken too "
            "long (--seconds)."
        )


def _show_fits(console: Console, machine: MachineFile) -> None:
    headers = ("backend", "operation", "latency", "bandwidth", "error", "points", "spread")
    title = "Fit of time = latency + bytes / bandwidth, and its error"
    print_rows(console, title, headers, map(_fit_cells, machine.series), right=headers[2:])


def _fit_cells(series: CollectiveSeries) -> tuple[str, ...]:
    fit = series.fit
    latency = speed = error = ""
    if fit is not None:
        latency, error = duration(fit.latency, fixed=True), percent(fit.error, tenths=True)
        speed = "no limit measured" if fit.bandwidth is None else bandwidth(fit.bandwidth)
    elif series.operation == "barrier":
        latency = duration(series.points[0].seconds, fixed=True)
    spread = percent(statistics.median(point.spread for point in series.points), tenths=True)
    count = str(len(series.points))
    return series.backend, series.operation, latency, speed, error, count, spread


def _show_matrix(
    console: Console,
    title: str,
    own: Sequence[CollectiveSeries],
    cell: Callable[[CollectiveSeries, Point], str],
) -> None:
    """Print sizes in rows and operations in columns."""
    headers = ["size", *(series.operation.replace("_", " ") for series in own)]
    cells = {
        (series.operation, point.bytes): cell(series, point)
        for series in own
        for point in reversed(series.points)  # of several with one size the first counts
    }
    rows = (
        (binary_size(size), *(cells.get((series.operation, size), "") for series in own))
        for size in sorted({size for _, size in cells})
    )
    print_rows(console, title, headers, rows, right=headers)


def print_links(console: Console, measured: LinkMeasurements) -> None:
    """Print the slow pairs of ranks, and all pairs if they are few."""
    odd = slow(measured)
    if not odd and len(measured.hosts) > 2:
        print_line(console, "No link between two ranks is more than 3 times slower than the others.")
    for each in odd:
        print_line(
            console,
            f"Slow: {each.what} ({', '.join(each.hosts)}), {bandwidth(each.bandwidth)}, "
            f"{each.ratio:.1f} times slower than others.",
        )
    print_line(console, "")
    if len(measured.hosts) > MOST_RANKS:
        return
    headers = ["from", *(f"to {rank}" for rank in range(len(measured.hosts)))]
    rows = (
        (str(sender), *("" if it is None else bandwidth(it) for it in row))
        for sender, row in enumerate(measured.bandwidth)
    )
    title = f"From rank to rank, {binary_size(measured.bytes)} and a reply"
    print_rows(console, title, headers, rows, right=headers)


def point_csv_rows(machine: MachineFile) -> list[dict[str, object]]:
    """Return all points as rows of a CSV file."""
    return [
        {
            "backend": series.backend,
            "operation": series.operation,
            "memory": series.memory,
            "ranks": series.ranks,
            **asdict(point),
            "algorithm_bandwidth": series.algorithm_bandwidth(point),
            "bus_bandwidth": series.bus_bandwidth(point),
        }
        for series in machine.series
        for point in series.points
    ]

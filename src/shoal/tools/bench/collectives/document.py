"""Measured collectives as a document: a sentence, fitted lines, times, pairs of ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.distributed.link_speed import LinkMeasurements, slow
from shoal.tools.bench.collectives.machine_file import (
    CollectiveSeries,
    MachineFile,
    Point,
    machine_values,
)
from shoal.util.document import Document, DocumentBlock, Section, Table, Text
from shoal.util.grouping import group_by
from shoal.util.units import bandwidth, binary_size, duration, percent, two_digits

MOST_RANKS = 8
"""Maximum number of ranks for which a matrix is printed."""


def machine_document(
    machine: MachineFile,
    left_out: Sequence[tuple[str, str, int]],
    pairs: LinkMeasurements | None,
    path: Path,
) -> Document:
    """Return the measurements, which are in the file `path`."""
    remarks = [Text(text=remark) for remark in _remarks(machine, left_out)]
    matrices = [
        matrix
        for backend, own in group_by(machine.series, lambda series: series.backend).items()
        for matrix in _matrices(backend, [each for each in own if each.operation != "barrier"])
    ]
    return Document(
        title="Collectives",
        verdict="",
        sections=[
            Section(heading="Backends", blocks=[Text(text=describe_backends(machine)), *remarks]),
            Section(heading="Times", blocks=[_fits(machine), *matrices]),
            Section(heading="Pairs of ranks", blocks=[] if pairs is None else _links(pairs)),
            Section(heading="File", blocks=[Text(text=f"machine file: {path}", whole=True)]),
        ],
        values=machine_values(machine),
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


def _fits(machine: MachineFile) -> Table:
    head = ("backend", "operation", "latency", "bandwidth", "error", "points", "spread")
    caption = "Fit of time = latency + bytes / bandwidth, and its error"
    rows = [_fit_cells(series) for series in machine.series]
    return Table(caption=caption, head=head, rows=rows, right=head[2:])


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


def _matrices(backend: str, own: Sequence[CollectiveSeries]) -> list[Table]:
    """Return tables with sizes in rows and operations in columns."""
    cells: dict[str, Callable[[CollectiveSeries, Point], str]] = {
        "Time of a call": lambda _, point: duration(point.seconds, fixed=True),
        "Bus bandwidth": lambda series, point: bandwidth(series.bus_bandwidth(point)),
    }
    head = ["size", *(series.operation.replace("_", " ") for series in own)]
    # Of several points with one size the first counts.
    known = [{point.bytes: point for point in reversed(series.points)} for series in own]
    sizes = sorted({size for points in known for size in points})
    return [
        Table(
            caption=f"{what} over {backend}",
            head=head,
            rows=[
                (
                    binary_size(size),
                    *(
                        cell(series, points[size]) if size in points else ""
                        for series, points in zip(own, known, strict=True)
                    ),
                )
                for size in sizes
            ],
            right=head,
        )
        for what, cell in cells.items()
    ]


def _links(measured: LinkMeasurements) -> list[DocumentBlock]:
    """Return the slow pairs of ranks, and all pairs if they are few."""
    blocks: list[DocumentBlock] = [
        Text(
            text=f"Slow: {each.what} ({', '.join(each.hosts)}), {bandwidth(each.bandwidth)}, "
            f"{each.ratio:.1f} times slower than others."
        )
        for each in slow(measured)
    ]
    ranks = len(measured.hosts)
    if not blocks and ranks > 2:
        text = "No link between two ranks is more than 3 times slower than the others."
        blocks.append(Text(text=text))
    if ranks <= MOST_RANKS:
        head = ["from", *(f"to {rank}" for rank in range(ranks))]
        rows = [
            (str(sender), *("" if speed is None else bandwidth(speed) for speed in row))
            for sender, row in enumerate(measured.bandwidth)
        ]
        caption = f"From rank to rank, {binary_size(measured.bytes)} and a reply"
        blocks.append(Table(caption=caption, head=head, rows=rows, right=head))
    return blocks


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

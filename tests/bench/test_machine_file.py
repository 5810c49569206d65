"""Machine files: what is written is read, what can't be is refused, and lines are fitted."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

import shoal
from shoal.tools.bench.collectives.machine_file import (
    CollectiveSeries,
    Fit,
    LinkTable,
    MachineFile,
    Point,
    fit_line,
    machine_values,
    read_machine_file,
    write_machine_file,
)


def point(bytes: int, seconds: float) -> Point:
    return Point(bytes=bytes, seconds=seconds, low=0.9 * seconds, high=1.2 * seconds, samples=5)


SIZES = [4**power << 10 for power in range(9)]
POINTS = tuple(point(size, 1e-4 + size / 2e9) for size in SIZES)
MACHINE = MachineFile(
    measured="2026-01-02T03:04:05+00:00",
    seconds=12.5,
    complete=True,
    shoal="0.1.0",
    torch="2.13.0",
    launcher="srun",
    hosts=("n1", "n2"),
    device="cpu",
    device_name="a processor",
    cores=4,
    threads=4,
    interface="ib0",
    series=(
        CollectiveSeries(
            backend="gloo",
            operation="all_reduce",
            memory="cpu",
            ranks=2,
            points=POINTS,
            fit=Fit(latency=1e-4, bandwidth=2e9, error=0.01),
        ),
        CollectiveSeries(
            backend="gloo", operation="barrier", memory="cpu", ranks=2, points=(point(0, 1e-5),)
        ),
    ),
    links=LinkTable(
        backend="gloo", bytes=1 << 20, bandwidth=((None, 1e9), (2e9, None)), latency=((None, 1e-5),) * 2
    ),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    write_machine_file(MACHINE, path)
    assert read_machine_file(path) == MACHINE
    assert json.loads(json.dumps(machine_values(MACHINE))) == json.loads(path.read_text())
    assert [each.name for each in tmp_path.iterdir()] == ["machine.json"]
    # Unknown fields are passed over.
    path.write_text(json.dumps({**json.loads(json.dumps(machine_values(MACHINE))), "altitude": 8848}))
    assert read_machine_file(path) == MACHINE


def test_what_can_not_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for change, found in (
        (lambda it: it.update(format="other"), "not a machine file"),
        (lambda it: it.update(version=2), "version is 2"),
        (lambda it: it.pop("hosts"), "hosts is missing"),
        (lambda it: it.update(cores="4"), "cores is '4', not int"),
        (lambda it: it.update(cores=True), "cores is True"),
        (lambda it: it.update(series={}), "series is not a list"),
        (lambda it: it["series"][0].update(points=[]), "0 point"),
        (lambda it: it["series"][0].update(ranks=1), r"series\[0\] has 1 rank"),
        (lambda it: it["series"][0]["points"][2].update(seconds=0.0), "took no time"),
        (lambda it: it["series"][0]["points"][2].update(low=9.0), "between its quartiles"),
        (lambda it: it["series"][1]["points"][0].update(bytes=-1), r"points\[0\]\.bytes is -1"),
        (lambda it: it["series"][0]["fit"].update(bandwidth=0.0), "fit.bandwidth is 0"),
        (lambda it: it["series"][0]["fit"].update(error=math.nan), "fit.error is nan"),
        (lambda it: it["links"].update(latency=[[None]]), "links.latency is not of 2 x 2"),
    ):
        plain = json.loads(json.dumps(machine_values(MACHINE)))
        change(plain)
        path.write_text(json.dumps(plain))
        with pytest.raises(shoal.ShoalError, match=found):
            read_machine_file(path)
    for text in ("", "{", "[" * 100_000, "[]", "\x00"):
        path.write_text(text)
        with pytest.raises(shoal.ShoalError, match=r"it is not (JSON|a machine file)"):
            read_machine_file(path)
    path.unlink()
    with pytest.raises(shoal.ShoalError, match="No such file"):
        read_machine_file(path)
    (tmp_path / "file").touch()
    with pytest.raises(shoal.ShoalError, match="Not a directory"):
        write_machine_file(MACHINE, tmp_path / "file" / "machine.json")


def test_a_line_is_found_again() -> None:
    found = fit_line(POINTS)
    assert found is not None
    assert found.latency == pytest.approx(1e-4)
    assert found.bandwidth == pytest.approx(2e9)
    assert found.error < 1e-6
    assert found.seconds(1 << 20) == pytest.approx(1e-4 + (1 << 20) / 2e9)
    # Small messages count as much as large ones: all are 10 % off to one side or the other.
    odd = [
        dataclasses.replace(each, seconds=each.seconds * (1.1 if index % 2 else 0.9))
        for index, each in enumerate(POINTS)
    ]
    found = fit_line(odd)
    assert found is not None
    assert found.latency == pytest.approx(1e-4, rel=0.12)
    assert found.bandwidth == pytest.approx(2e9, rel=0.12)
    assert 0.05 < found.error < 0.15


def test_neither_latency_nor_time_per_byte_is_below_zero() -> None:
    flat = fit_line([point(size, 1e-3 - 1e-12 * size) for size in SIZES])
    steep = fit_line([point(size, size**1.2 / 1e9) for size in SIZES])
    assert flat is not None
    assert steep is not None
    assert flat.bandwidth is None
    assert flat.seconds(1 << 30) == pytest.approx(1e-3, rel=0.1)
    assert steep.latency == 0
    assert steep.error > 0.1
    # Two sizes make no fit.
    assert fit_line(POINTS[:2]) is None
    assert fit_line([point(1024, 1e-4)] * 5) is None


def test_bus_bandwidth() -> None:
    """By hand: in a ring all_reduce each rank sends 2 (N - 1) parts of N."""
    for operation, ranks, ratio in (
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("send_recv", 4, 1.0),
    ):
        series = CollectiveSeries(
            backend="b", operation=operation, memory="cpu", ranks=ranks, points=POINTS
        )
        found = series.bus_bandwidth(POINTS[3]) / series.algorithm_bandwidth(POINTS[3])
        assert found == pytest.approx(ratio), operation

"""What `shoal bench comm` accepts, how it spells numbers, and what it says of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.tools.bench.collectives import command, display
from shoal.tools.bench.collectives.machine_file import CollectiveSeries
from shoal.tools.bench.collectives.measure import OPERATIONS, summarize_samples
from shoal.tools.bench.collectives.message_sizes import parse_sizes
from shoal.util.units import bandwidth, binary_size, duration, percent


def request(**changed: Any) -> command.CollectivesOptions:
    usual: dict[str, Any] = {
        "backends": "",
        "operations": "",
        "sizes": "1KiB:64MiB",
        "repeats": 20,
        "seconds": 30.0,
        "pairs": False,
        "out": None,
        "csv": None,
        "json": False,
    }
    return command.parse_options(**{**usual, **changed})


def test_without_options_all_is_measured() -> None:
    asked = request()
    assert asked.backends == ()
    assert asked.operations == OPERATIONS
    assert asked.sizes == tuple(1024 * 4**power for power in range(9))
    # MPI is the world, and gloo stands beside it.
    assert request(backends="gloo, mpi").backends == ("mpi", "gloo")


def test_what_can_not_be_asked() -> None:
    for changed, found in (
        ({"backends": "ucx"}, "--backend is one of mpi, nccl, gloo"),
        ({"operations": "all_reduce,scan"}, "--operations is one of all_reduce"),
        ({"sizes": "0"}, "not between 1 byte"),
        ({"sizes": "1MiB:0"}, "not between 1 byte"),
        ({"sizes": "2MiB:1MiB"}, "2MiB is more than 1MiB"),
        ({"sizes": "many"}, "'many' is not a size"),
        ({"sizes": ""}, "'' is not a size"),
        ({"sizes": "9999GiB"}, "not between"),
        ({"repeats": 0}, "--repeats is an integer, 1 or more"),
        ({"seconds": math.nan}, "--seconds is a number above 0"),
        ({"seconds": -1.0}, "--seconds is a number above 0"),
        ({"out": Path("no/such/m.json")}, "there is no directory"),
        ({"csv": Path(".")}, "it is a directory"),
    ):
        with pytest.raises(shoal.LaunchError, match=found):
            request(**changed)
    # Or not here.
    for processes, changed, found in (
        (None, {}, "no other to communicate with"),
        (1, {}, "no other to communicate with"),
        (2, {"backends": "mpi"}, "not ranks of MPI"),
        (2, {"sizes": "512GiB"}, "of memory"),
    ):
        with pytest.raises(shoal.LaunchError, match=found):
            command.benchmark_collectives(request(**changed), processes)


def test_ranks_of_a_job_are_not_started_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(shoal.LaunchError, match="has already started all ranks") as caught:
        command.benchmark_collectives(request(), 2)
    assert caught.value.fix == "remove -n"


def test_sizes() -> None:
    assert parse_sizes("1KiB") == (1024,)
    assert parse_sizes("1.5k, 2 MB,7") == (7, 1536, 2 << 20)
    assert parse_sizes("1KiB:10KiB") == (1024, 4096, 10240)
    assert parse_sizes("4KiB:4KiB,4096") == (4096,)


def test_numbers_are_spelled_with_three_digits() -> None:
    assert [duration(s, fixed=True) for s in (4.41e-6, 18.54e-6, 9.996e-3, 0.9999, 75.2, 0.0)] == [
        "4.41 µs",
        "18.5 µs",
        "10.0 ms",
        "1.00 s",
        "75.2 s",
        "0.00 µs",
    ]
    assert [bandwidth(b) for b in (512.0, 4.2e6, 1.234e10)] == ["0.51 kB/s", "4.20 MB/s", "12.3 GB/s"]
    assert [binary_size(b) for b in (8, 1536, 64 << 20)] == ["8 B", "1.5 KiB", "64 MiB"]
    assert [percent(p, tenths=True) for p in (0.012, 0.0999, 6.95)] == ["1.2 %", "10 %", "695 %"]


def test_a_point_is_the_median_and_the_quartiles() -> None:
    point = summarize_samples(8, [5.0, 1.0, 2.0, 4.0, 3.0])
    assert (point.low, point.seconds, point.high, point.samples) == (2.0, 3.0, 4.0, 5)
    assert summarize_samples(8, [2.0]).spread == 0
    # Backends are compared at the ends.
    said = display.compare_backends(series("mpi", 1e-5), series("gloo", 1e-3))
    assert said == ("gloo takes 91 times as long as mpi at 1 KiB, 1.9 times as long at 1 MiB.")


def series(backend: str, seconds: float) -> CollectiveSeries:
    points = [summarize_samples(size, [seconds + size / 1e9]) for size in (1 << 10, 1 << 20)]
    return CollectiveSeries(
        backend=backend, operation="all_reduce", memory="cpu", ranks=2, points=tuple(points)
    )

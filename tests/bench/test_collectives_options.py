"""What `shoal bench comm` accepts, how it spells numbers, and what it says of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.tools.bench.collectives import command, document
from shoal.tools.bench.collectives.machine_file import CollectiveSeries
from shoal.tools.bench.collectives.measure import OPERATIONS, summarize_samples
from shoal.tools.bench.measurement import Output
from shoal.tools.bench.options import parse_choices, parse_numbers, parse_sizes, parse_words
from shoal.util.units import bandwidth, binary_size, duration, percent


def ask(*, processes: int | None = 2, **changed: Any) -> int:
    usual: dict[str, Any] = {
        "backends": (),
        "operations": (),
        "sizes": (1024,),
        "repeats": 20,
        "seconds": 30.0,
        "pairs": False,
        "out": None,
        "output": Output(),
    }
    return command.benchmark_collectives(command.CollectivesRequest(**{**usual, **changed}), processes)


def test_what_can_not_be_asked() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"repeats": 0}, "--repeats is an integer, 1 or more"),
        ({"seconds": math.nan}, "--seconds is a number above 0"),
        ({"seconds": -1.0}, "--seconds is a number above 0"),
        ({"out": Path("no/such/m.json")}, "there is no directory"),
        ({"output": Output(csv=Path("."))}, "it is a directory"),
        ({"processes": None}, "no other to communicate with"),
        ({"processes": 1}, "no other to communicate with"),
        ({"backends": ("mpi",)}, "not ranks of MPI"),
        ({"sizes": (1 << 39,)}, "of memory"),
    )
    for changed, found in refused:
        with pytest.raises(shoal.LaunchError, match=found):
            ask(**changed)


def test_ranks_of_a_job_are_not_started_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(shoal.LaunchError, match="has already started all ranks") as caught:
        ask()
    assert caught.value.fix == "remove -n"


def test_lists_of_options() -> None:
    assert parse_words("gloo, mpi,,gloo") == ("gloo", "mpi")
    assert parse_words("") == ()
    assert parse_numbers("--workers", "", least=0) == ()
    assert parse_numbers("--workers", "4,0, 2,4", least=0) == (0, 2, 4)
    for text, least, found in (
        ("0", 1, "-n 0\nfound: not positive integers"),
        ("1,two", 1, "not positive integers, separated by commas"),
        ("-1", 0, "not integers of 0 or more"),
    ):
        with pytest.raises(shoal.LaunchError, match=found):
            parse_numbers("-n", text, least=least)
    assert parse_choices("", "--backend", "gloo", command.BACKENDS) == ("gloo",)
    with pytest.raises(shoal.LaunchError, match="--backend is one of mpi, nccl, gloo"):
        parse_choices("shoal bench comm", "--backend", "gloo,ucx", command.BACKENDS)
    with pytest.raises(shoal.LaunchError, match="--operations is one of all_reduce"):
        parse_choices("shoal bench comm", "--operations", "all_reduce,scan", OPERATIONS)


def test_sizes() -> None:
    assert parse_sizes("1KiB:64MiB") == tuple(1024 * 4**power for power in range(9))
    for text, found in (
        ("0", "not between 1 byte"),
        ("1MiB:0", "not between 1 byte"),
        ("2MiB:1MiB", "2MiB is more than 1MiB"),
        ("many", "'many' is not a size"),
        ("", "'' is not a size"),
        ("9999GiB", "not between"),
    ):
        with pytest.raises(shoal.LaunchError, match=found):
            parse_sizes(text)
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
    said = document.compare_backends(series("mpi", 1e-5), series("gloo", 1e-3))
    assert said == ("gloo takes 91 times as long as mpi at 1 KiB, 1.9 times as long at 1 MiB.")


def series(backend: str, seconds: float) -> CollectiveSeries:
    points = [summarize_samples(size, [seconds + size / 1e9]) for size in (1 << 10, 1 << 20)]
    return CollectiveSeries(
        backend=backend, operation="all_reduce", memory="cpu", ranks=2, points=tuple(points)
    )

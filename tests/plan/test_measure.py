from __future__ import annotations

from pathlib import Path

import pytest

from helpers.cli import shoal
from shoal.bench.collectives.machine_file import (
    CollectiveSeries,
    Fit,
    MachineFile,
    Point,
    write_machine_file,
)
from shoal.plan.machines import RANGES, find_machine, machine_catalogue
from shoal.plan.measure import machine_toml, read_rates
from shoal.util.errors import ShoalError


def collectives(path: Path, hosts: tuple[str, ...], operation: str = "all_reduce") -> Path:
    points = tuple(
        Point(bytes=size, seconds=seconds, low=seconds, high=seconds, samples=3)
        for size, seconds in ((1_000, 1e-4), (200_001_000, 0.1001))
    )
    fit = Fit(latency=1e-4, bandwidth=2e9, error=0.01)
    series = CollectiveSeries(
        backend="gloo", operation=operation, memory="cpu", ranks=len(hosts), points=points, fit=fit
    )
    machine = MachineFile(
        measured="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        complete=True,
        shoal="0.1.0",
        torch="2.13.0",
        launcher="shoal",
        hosts=hosts,
        device="cpu",
        device_name="",
        cores=2,
        threads=1,
        interface="",
        series=(series,),
    )
    write_machine_file(machine, path)
    return path


@pytest.mark.full
def test_a_measured_machine_is_one_that_plan_takes(tmp_path: Path) -> None:
    one = collectives(tmp_path / "one.json", ("a", "a"))
    out = tmp_path / "mine.toml"
    done = shoal(
        *("bench", "machine", "--comm", str(one), "--network", "0.125"),
        *("--name", "here", "-o", str(out)),
    )
    assert done.exit_code == 0, done.output
    found = find_machine(str(out))
    assert (found.name, found.devices, found.network) == ("here", 2, 0.125e9)
    assert found.link == pytest.approx(2e9)  # the bus bandwidth of two ranks is that of the algorithm
    assert found.fp32 > 1e9
    assert found.memory_bandwidth > 1e8
    assert "shoal bench machine" in found.source
    for name, (low, high) in RANGES.items():
        assert low <= getattr(found.efficiency, name) <= high
    planned = shoal("plan", "--model", "gpt2", "--machine", str(out), "-n", "2", "--precision", "fp32")
    assert "here" in planned.stdout


def test_a_machine_and_its_file_are_the_same(tmp_path: Path) -> None:
    for name, machine in machine_catalogue().items():
        path = tmp_path / f"{name}.toml"
        path.write_text(machine_toml(machine))
        again = find_machine(str(path))
        assert again.efficiency == machine.efficiency
        for key in ("half", "tf32", "units", "cores", "threads"):
            assert getattr(again, key) == getattr(machine, key)


def test_rates_between_hosts_are_those_of_one_rank(tmp_path: Path) -> None:
    inside = collectives(tmp_path / "inside.json", ("a",) * 4)
    across = collectives(tmp_path / "across.json", ("a", "a", "b", "b"))
    rates = read_rates([inside, across], None, None)
    assert rates.link == pytest.approx(1.5 * 2e9)
    assert rates.network == pytest.approx(1.5 * 2e9 / 2)
    assert read_rates([inside], 7.0, None).link == 7e9
    assert rates.per_node == 4
    assert rates.link_latency == rates.network_latency == pytest.approx((1e-4 - 30e-6) / 6)


def test_what_one_process_can_not_measure(tmp_path: Path) -> None:
    done = shoal("bench", "machine")
    assert isinstance(done.exception, ShoalError)
    assert "shoal bench comm" in done.exception.fix
    gathers = collectives(tmp_path / "gathers.json", ("a", "a"), "all_gather")
    with pytest.raises(ShoalError, match="no all_reduce"):
        read_rates([gathers], None, None)
    done = shoal("bench", "machine", "--name", "a b", "--link", "1", "--network", "1")
    assert isinstance(done.exception, ShoalError)

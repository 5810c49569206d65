from __future__ import annotations

from pathlib import Path

import pytest

from helpers.cli import plan_error, shoal
from shoal.tools.bench.collectives.machine_file import (
    CollectiveSeries,
    Fit,
    MachineFile,
    Point,
    write_machine_file,
)
from shoal.tools.plan.machine.machines import RANGES, find_machine, machine_catalogue
from shoal.tools.plan.machine.measure import machine_toml, measure_machine, read_rates
from shoal.tools.plan.time.rates import collective_seconds
from shoal.tools.plan.work.planned_step import RankGroup
from shoal.util.errors import ShoalError

SMALL, LARGE = 1_000, 200_001_000


def collectives(path: Path, hosts: tuple[str, ...], **largest: float) -> Path:
    """Write the series of operations whose largest message takes these seconds."""
    series = tuple(
        CollectiveSeries(
            backend="gloo",
            operation=operation,
            memory="cpu",
            ranks=len(hosts),
            points=tuple(
                Point(bytes=size, seconds=seconds, low=seconds, high=seconds, samples=3)
                for size, seconds in ((SMALL, 1e-4), (LARGE, last))
            ),
            fit=Fit(latency=1e-4, bandwidth=2e9, error=0.01),
        )
        for operation, last in (largest or {"all_reduce": 0.1001}).items()
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
        series=series,
    )
    write_machine_file(machine, path)
    return path


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tools.plan.machine.measure._SECONDS", 0.0)


@pytest.mark.full
def test_a_measured_machine_is_one_that_plan_takes(few_calls: None, tmp_path: Path) -> None:
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


def test_rates_between_hosts_are_those_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(4)})
    inside = collectives(tmp_path / "inside.json", ("a",) * 4)
    across = collectives(tmp_path / "across.json", ("a", "a", "b", "b"))
    rates = read_rates([inside, across], None, None)
    assert rates.link == pytest.approx(1.5 * 2e9)
    assert rates.network == pytest.approx(1.5 * 2e9 / 2)
    assert read_rates([inside], 7.0, None).link == 7e9
    assert rates.per_node == 4
    assert rates.link_latency == rates.network_latency == pytest.approx((1e-4 - 30e-6) / 6)
    # On two cores, four ranks took turns; the cores do not limit a network.
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    turns = read_rates([inside, across], None, None)
    assert turns.link == pytest.approx(2 * 1.5 * 2e9)
    assert turns.link_latency == pytest.approx((1e-4 - 30e-6) / 6 / 2)
    assert turns.network == rates.network


def test_copies_of_gloo_are_the_rest_of_gathers_and_scatters(tmp_path: Path) -> None:
    measured = {"all_reduce": 0.1001, "all_gather": 0.0701, "reduce_scatter": 0.1401}
    inside = collectives(tmp_path / "inside.json", ("a", "a"), **measured)
    # An all-gather sends half of the bytes of an all-reduce, Gloo's reduce-scatter all of them.
    copies = read_rates([inside], None, None).staging
    assert copies == pytest.approx((0.02 + 0.04) / 2 / 200e6)
    across = collectives(tmp_path / "across.json", ("a", "b"), all_reduce=1.0001, all_gather=0.4001)
    assert read_rates([across], None, None).staging == 0.0
    assert read_rates([across, inside], None, None).staging == copies
    assert read_rates([inside, across], None, None).staging == copies
    reduces = collectives(tmp_path / "reduces.json", ("a", "a"))
    assert read_rates([reduces], None, None).staging is None


@pytest.mark.full
def test_measured_copies_give_back_the_measured_collectives(few_calls: None, tmp_path: Path) -> None:
    # Copies of 4 GB/s, relative to the memory bandwidth of any processor, are inside the range.
    staged = 0.0501 + 200e6 * 2 / 4e9
    measured = {"all_reduce": 0.1001, "all_gather": staged, "reduce_scatter": 0.1 + staged - 0.05}
    machine = measure_machine(
        "here", read_rates([collectives(tmp_path / "a", ("a",) * 2, **measured)], None, 1.0), 2
    )
    for operation, seconds in measured.items():
        predicted = collective_seconds(operation, LARGE, RankGroup(2, 1), machine)
        assert predicted == pytest.approx(seconds, rel=0.01)


def test_what_one_process_can_not_measure(tmp_path: Path) -> None:
    error = plan_error("bench", "machine")
    assert "shoal bench comm" in error.fix
    gathers = collectives(tmp_path / "gathers.json", ("a", "a"), all_gather=0.1001)
    with pytest.raises(ShoalError, match="no all_reduce"):
        read_rates([gathers], None, None)
    plan_error("bench", "machine", "--name", "a b", "--link", "1", "--network", "1")

"""`shoal doctor` on one machine, and what it makes of what ranks have seen."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.rank_facts import SHOAL, call, grave, seen, words
from shoal.distributed.link_speed import LinkMeasurements
from shoal.tools.doctor.checks import compute, filesystem, gpus, host, links, placement
from shoal.tools.doctor.checks.compute import find_slow
from shoal.tools.doctor.checks.software import Software, check_software, describe_sources
from shoal.tools.doctor.findings import (
    CheckResult,
    Examination,
    RankFacts,
    Severity,
    describe_ranks,
    examination_document,
    failure,
    ok,
    warning,
)
from shoal.tools.doctor.runner import DoctorRequest, examine_alone
from shoal.util.differences import differences
from shoal.util.tables import rendered

GIB = 2**30
DOCTOR = [*SHOAL, "doctor"]


def test_a_login_node_is_looked_at_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from shoal.cli.main import main\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    done = call([sys.executable, "-c", code, "doctor", "--run", str(tmp_path / "runs/a"), "--strict"])
    lines = done.stdout.splitlines()
    assert lines[-1] == "False"
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0].startswith("shoal doctor: ")
    assert max(map(len, lines)) <= 80
    for what in ("Python", "torch", "cores", "memory", "open files", "/dev/shm", "run directory"):
        assert any(f" {what} " in line for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_strict_stops_a_job_where_a_check_fails_and_json_says_which() -> None:
    done = call([*DOCTOR, "--json", "--run", "/proc/runs", "--strict"])
    assert done.returncode == 1
    report = json.loads(done.stdout)
    bad = {one["what"] for one in report["findings"] if one["state"] == "failure"}
    assert bad == {"run directory"}
    assert report["verdict"].startswith("1 failure")


def test_what_hangs_or_raises_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(host, "describe_memory", never.wait)
    monkeypatch.setattr(host, "describe_cores", lambda: 1 / 0)
    monkeypatch.setattr(filesystem, "check_directories", lambda ranks: iter([ranks[1]]))
    for limit in (0.5, 5.0, 50.0):  # on a busy machine others may not be done by then
        found = examine_alone(DoctorRequest(limit=limit, run=Path("/proc")))
        bad = {one.what: one.found for one in found.findings if one.state is Severity.FAILURE}
        if sum("not finished within" in why for why in bad.values()) == 1:
            break
    never.set()
    assert bad == {
        "memory": f"could not be checked: not finished within {limit:g} s",
        "cores": "could not be checked: ZeroDivisionError: division by zero",
        "run directory": "could not be checked: IndexError: list index out of range",
    }
    assert "open files" in {one.what for one in found.findings}


@pytest.mark.full
def test_a_launch_that_contradicts_itself_is_a_line() -> None:
    done = call([*DOCTOR, "--quick", "--strict"], RANK="1", WORLD_SIZE="2", SLURM_PROCID="3")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "FAILURE launcher" in words(done.stdout)
    assert "SLURM_STEP_ID" in done.stdout
    assert "ok torch" in words(done.stdout)


def examination(*findings: CheckResult) -> Examination:
    return Examination(
        ranks=4, hosts=("a", "b"), began=0.0, seconds=1.6, versions={}, findings=findings
    )


def test_the_verdict_comes_first_and_the_gravest_line_next() -> None:
    found = examination(ok("x", "1"), warning("y", "2", "do"), failure("z", "3", "stop"), ok("w", "4"))
    assert found.verdict() == "1 failure and 1 warning; 2 checks ok, on 4 ranks of 2 hosts, in 2 s"
    assert [one.what for one in found.findings] == ["z", "y", "x", "w"]
    assert found.failed
    assert not examination(warning("y", "2", "do")).failed
    assert examination(ok("x", "1")).verdict().startswith("1 checks ok")


def test_hostile_names_are_shown_and_not_obeyed() -> None:
    for width in (60, 80, 120):
        text = "node[01-03] [red]x[/] \x1b[31m" + "Z" * 200
        found = examination(failure("host", text, f"ping {text}"))
        shown = rendered(examination_document(found), width)
        assert max(map(len, shown.splitlines()[1:])) <= width
        assert "\x1b" not in shown, width
        assert "\\x1b" in shown, width
        assert shown.count("Z") == 400, width
        assert "[red]x[/]" in shown, width


def software(**more: str) -> Software:
    versions = {"torch": "2.13.0", "numpy": "2.4", "shoal": "1", "rich": "14"}
    return Software(python="3.11.7", packages=versions | more)


def test_the_rank_with_other_packages_is_named() -> None:
    ranks = seen([software(), software(), software(torch="2.11.0", rich="13"), software()])
    found = {what: text for what, _, text in grave(list(check_software(ranks)))}
    assert found == {
        "torch": "2.13.0 on 3 of 4 ranks, 2.11.0 on rank 2 (node2)",
        "packages": "rich 14 on 3 of 4 ranks, 13 on rank 2 (node2)",
    }
    assert grave(list(check_software(seen([software()] * 3)))) == []


def test_of_many_differences_some_are_named_and_the_rest_counted() -> None:
    many = {f"p{number}": "1" for number in range(20)}
    (found,) = grave(list(check_software(seen([software(), software(**many), software()]))))
    assert found[2].endswith("; and 15 more")


def test_differences_name_the_usual_value_of_equals_the_first() -> None:
    (one,) = differences([{"a": "x"}, {"a": "y"}, {}])
    assert (one.usual, one.times, dict(one.others)) == ("x", 1, {"y": (1,), "none": (2,)})


def test_sources_are_those_of_the_user(tmp_path: Path) -> None:
    for name in ("train.py", "lib/net.py", "env/lib/x.py", ".git/y.py", "notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "env/pyvenv.cfg").write_text("")
    assert sorted(describe_sources(tmp_path)["files"]) == ["lib/net.py", "train.py"]


def cores(affinity: Sequence[int], *, quota: float | None = None, threads: str = "") -> host.Cores:
    return host.Cores(affinity=list(affinity), total=4, quota=quota, threads=threads)


def test_cores() -> None:
    for ranks, found in (
        ([cores([0, 1]), cores([2, 3])], []),
        ([cores(range(4))] * 4, []),
        ([cores([0])] * 2, [("cores", Severity.FAILURE, "2 ranks on 1 core (0) while 3 others")]),
        ([cores(range(4))] * 5, [("cores", Severity.WARNING, "5 ranks on 4 cores: they take turns")]),
        (
            [cores([0]), cores([0]), cores([2, 3])],
            [("cores", Severity.FAILURE, "ranks 0-1 share cores while others may be idle")],
        ),
        (
            [cores(range(4), quota=1.5)],
            [
                (
                    "CPU time",
                    Severity.WARNING,
                    "the cgroup allows the time of 1.5 cores, and there are 4",
                )
            ],
        ),
        (
            [cores(range(4), threads="4")] * 2,
            [("threads", Severity.WARNING, "OMP_NUM_THREADS=4 for 2 rank(s) on 4 cores")],
        ),
    ):
        told = grave(list(host.check_cores(seen(ranks, "a" * len(ranks)))))
        assert [(what, state) for what, state, _ in told] == [(what, state) for what, state, _ in found]
        for one, (_, _, text) in zip(told, found, strict=True):
            assert one[2].startswith(text), ranks


def test_hosts_of_which_the_same_is_to_be_said_share_a_line() -> None:
    memory = [
        host.HostMemory(total=64 * GIB, available=free, ceiling=None) for free in (GIB // 2, 40 * GIB)
    ]
    found = list(host.check_memory(seen([memory[1], memory[0], memory[1], memory[0]])))
    assert [one.state for one in found] == [Severity.OK, Severity.WARNING]
    assert found[0].found.startswith("ranks 0,2 (node0, node2): 40 GiB free")
    assert found[1].found.startswith("ranks 1,3 (node1, node3): 0.5 GiB free")


def test_limits() -> None:
    def limits(**more: Any) -> host.ProcessLimits:
        found = host.ProcessLimits(
            files=4096, most_files=4096, locked=-1, shared=8 * GIB, shared_free=8 * GIB,
            infiniband=True, size=64,
        )  # fmt: skip
        return host.ProcessLimits(**{**found, **more})  # type: ignore[typeddict-item]

    def told(**more: Any) -> list[str]:
        return [what for what, _, _ in grave(list(host.check_limits(seen([limits(**more)]))))]

    assert told() == told(files=-1) == told(locked=1 << 16, infiniband=False) == []
    assert told(files=512) == told(size=1024) == ["open files"]
    assert told(locked=1 << 16) == ["locked memory"]
    assert told(shared=64 << 20, shared_free=64 << 20) == told(shared=None) == ["/dev/shm"]


def at(gpu: str = "", **more: Any) -> placement.RankPlacement:
    found = placement.RankPlacement(
        device="cuda:0" if gpu else "cpu", gpu=gpu, unused="", model="H100" if gpu else "",
        backend="gloo", interface="eth0", reason="all reached it", speed=25000, passed_over=[],
    )  # fmt: skip
    return placement.RankPlacement(**{**found, **more})  # type: ignore[typeddict-item]


def test_gpus_that_are_shared_or_missing() -> None:
    shared = grave(list(placement.check_placement(seen([at("A"), at("B"), at("A"), at("A")], "xxxy"))))
    assert shared == [("GPU", Severity.FAILURE, "ranks 0,2 (x) use the same GPU, H100")]
    (lacking,) = grave(list(placement.check_placement(seen([at("A"), at()]))))
    assert lacking[2] == "rank 1 (node1) compute on the CPU, the others on GPUs"
    assert grave(list(placement.check_placement(seen([at("A"), at("A")])))) == []
    (unused,) = grave(list(placement.check_placement(seen([at(unused="built for the CPU only")]))))
    assert unused[2].endswith("compute on the CPU, despite GPUs: built for the CPU only")
    (mixed,) = grave(list(placement.check_placement(seen([at("A"), at("B", model="A100")]))))
    assert mixed[:2] == ("GPU", Severity.WARNING)


def test_links_that_are_slower_than_others_and_faster_ones_that_are_not_used() -> None:
    (slower,) = grave(list(placement.check_placement(seen([at(), at(speed=1000), at(), at(speed=0)]))))
    assert slower == (
        "link",
        Severity.FAILURE,
        "eth0 of rank 1 (node1) has 1,000 Mbit/s, others 25,000",
    )
    passed = at(passed_over=["ib0: node1 did not reach node0 by it"])
    (unused,) = grave(list(placement.check_placement(seen([passed, at()]))))
    assert unused[2] == "eth0, and not the faster ib0: node1 did not reach node0 by it"


class FakeError(Exception):
    pass


def nvml(**more: Any) -> SimpleNamespace:
    """As nvidia-ml-py on one GPU; what is given replaces what its functions return."""
    answers = {
        "SystemGetDriverVersion": "570.1", "DeviceGetCount": 1, "DeviceGetHandleByIndex": 0,
        "DeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, used=GIB), "DeviceGetName": "H100",
        "DeviceGetTemperature": 40, "DeviceGetTemperatureThreshold": 90,
        "DeviceGetCurrentClocksThrottleReasons": 0x1, "DeviceGetTotalEccErrors": 0,
        "DeviceGetRemappedRows": (0, 0, 0, 0), "Init": None, "Shutdown": None,
    }  # fmt: skip

    def answer(value: Any) -> Any:
        def ask(*_: object) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return ask

    functions = {f"nvml{name}": answer(value) for name, value in {**answers, **more}.items()}
    names = ("TEMPERATURE_GPU", "TEMPERATURE_THRESHOLD_SLOWDOWN", "VOLATILE_ECC")
    constants = {f"NVML_{name}": 0 for name in (*names, "MEMORY_ERROR_TYPE_UNCORRECTED")}
    return SimpleNamespace(NVMLError=FakeError, **functions, **constants)


@pytest.mark.parametrize(
    ("answers", "state", "text"),
    [
        ({}, None, ""),
        ({"DeviceGetTotalEccErrors": FakeError("not supported")}, None, ""),
        ({"DeviceGetTotalEccErrors": 3}, Severity.FAILURE, "3 uncorrected ECC errors"),
        ({"DeviceGetRemappedRows": (0, 1, 0, 1)}, Severity.FAILURE, "rows beyond repair"),
        ({"DeviceGetRemappedRows": (0, 1, 1, 0)}, Severity.WARNING, "is pending remapping"),
        (
            {"DeviceGetCurrentClocksThrottleReasons": 0x49},
            Severity.WARNING,
            "hardware thermal slowdown",
        ),
        ({"DeviceGetTemperature": 88}, Severity.WARNING, "88 °C; it slows down at 90 °C"),
        (
            {"DeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, used=30 * GIB)},
            Severity.WARNING,
            "32.2 GB of its 85.9 GB are in use",
        ),
    ],
)
def test_health_of_gpus(
    answers: dict[str, Any], state: Severity | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(**answers))
    found = grave(list(gpus.check_gpus(seen([gpus.describe_gpus(), gpus.describe_gpus()]))))
    assert [one[1] for one in found] == ([] if state is None else [state] * len(found))
    assert bool(found) == (state is not None)
    assert all(text in one[2] for one in found)


def test_unknown_health_is_said_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert grave(list(gpus.check_gpus(seen([gpus.describe_gpus()])))) == []
    monkeypatch.setattr(gpus, "DEVICE", tmp_path)
    (found,) = gpus.check_gpus(seen([gpus.describe_gpus()]))
    assert (found.state, found.fix) == (
        Severity.WARNING,
        "run pip install '.[gpu]' in your Shoal checkout",
    )


def test_the_same_driver_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    for version in ("570.1", "550.2"):
        monkeypatch.setitem(sys.modules, "pynvml", nvml(SystemGetDriverVersion=version))
        ranks.append(gpus.describe_gpus())
    (found,) = grave(list(gpus.check_gpus(seen(ranks))))
    assert found == ("GPU driver", Severity.WARNING, "570.1 on rank 0 (node0); 550.2 on rank 1 (node1)")


def test_clocks_are_apart_only_for_certain() -> None:
    known = [links.ClockError(offset=offset, error=0.2) for offset in (0.0, 0.25, -2.0, 3600.0)]
    assert [
        (state, text.split(" (")[0]) for _, state, text in grave(list(links.check_clocks(seen(known))))
    ] == [
        (Severity.WARNING, "rank 2"),
        (Severity.FAILURE, "rank 3"),
    ]


def test_who_is_slow() -> None:
    for rates, found in (
        ([1.0], {}),
        ([1.0, 1.0], {}),
        ([1.0, 0.4], {1: 0.4}),
        ([1.0, 0.8, 0.9], {}),
        ([1.0, 0.3, 1.0], {1: 0.3}),
        ([1.0] * 63 + [0.7], {63: 0.7}),
        # Many that differ: none is an exception.
        ([0.1 * number for number in range(1, 21)], {}),
    ):
        assert find_slow(dict(enumerate(rates))) == pytest.approx(found)


def computed(rate: float, kind: str = "H100", *, compared: bool = True) -> compute.Compute:
    return compute.Compute(kind=kind, compared=compared, rates={"cuda:0": rate})


def test_the_slow_gpu_among_many_is_named() -> None:
    ranks = seen([computed(6e14)] * 7 + [computed(2e14)], "aaaabbbb")
    (found,) = grave(list(compute.check_compute(ranks)))
    assert found[:2] == ("compute", Severity.FAILURE)
    assert found[2] == "rank 7 (b), cuda:0: 200 TFLOP/s, 33% of the speed of the others"
    others = [computed(6e14), computed(2e14, "A100"), computed(1e14, compared=False)]
    assert grave(list(compute.check_compute(seen(others)))) == []


def measured(bandwidth: list[list[float]]) -> dict[str, Any]:
    size = len(bandwidth)
    rows = tuple(tuple(None if a == b else bandwidth[a][b] for b in range(size)) for a in range(size))
    return {"bytes": 1, "hosts": tuple("abcdefgh"[:size]), "bandwidth": rows, "latency": rows}


def test_the_slow_link_among_many_is_named() -> None:
    facts = measured([[0, 1e8, 1e9], [1e8, 0, 1e9], [1e9, 1e9, 0]])
    found = list(links.check_links([RankFacts(rank=0, host="a", facts=facts)]))
    assert [one.state for one in found] == [Severity.FAILURE] * 2
    assert [one.found.split(",")[0] for one in found] == [
        "from rank 0 to rank 1 (a and b): 0.1 GB/s",
        "from rank 1 to rank 0 (b and a): 0.1 GB/s",
    ]
    again = links.best_links(facts, measured([[0, 1e9, 1e9], [1e9, 0, 1e9], [1e9, 1e9, 0]]))
    assert again is not None
    assert LinkMeasurements(**again).bandwidth[0] == (None, 1e9, 1e9)
    (fine,) = links.check_links([RankFacts(rank=0, host="a", facts=again)])
    assert fine.found.startswith("between hosts 1 to 1 GB/s")


def test_which_ranks_are_measured() -> None:
    assert links.choose_ranks("aabb", "") == [0, 1, 2, 3]
    assert links.choose_ranks("aabb", "b") == [0, 1, 2]
    assert links.choose_ranks("aaa", "a") == [0]
    many = [f"n{rank // 8}" for rank in range(128)]
    assert links.choose_ranks(many, []) == list(range(0, 128, 8))
    assert links.choose_ranks(["n"] * 128, []) == list(range(64))


def test_ranks_are_named_in_short() -> None:
    ranks = seen([None] * 6)
    assert describe_ranks(ranks[2:3]) == "rank 2 (node2)"
    assert describe_ranks(ranks) == "ranks 0-5 (node0, node1, node2 and 3 more)"

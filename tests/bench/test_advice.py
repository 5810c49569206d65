"""What measured input pipelines and ways to compute say, in sentences; what users name; Ctrl-C."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

import shoal
from shoal.tools.bench.compile.measure import Mode
from shoal.tools.bench.compile.measure import mode_advice as advise_modes
from shoal.tools.bench.data_loading.command import LoaderTrials, Need, worker_advice
from shoal.tools.bench.data_loading.measure import Trial
from shoal.tools.bench.measurement import call_target, import_named, keep_on_interrupt


def measured(
    workers: int, rate: float, *, busy: float = 1.0, theirs: float = 0.0, machine: float = 0.1
) -> LoaderTrials:
    trials = [
        Trial(
            first=0.1,
            rate=rate * factor,
            samples=100,
            busy=busy,
            workers_busy=theirs,
            machine=machine,
            memory=None,
        )
        for factor in (0.9, 1.0, 1.3)
    ]
    return LoaderTrials(batch_size=32, workers=workers, trials=tuple(trials))


def test_workers_help_until_the_cores_are_busy() -> None:
    found = [
        measured(0, 1000),
        measured(1, 1100, theirs=0.9),
        measured(2, 1800, busy=0.1, theirs=1.8),
        measured(4, 1850, busy=0.1, theirs=1.9),
    ]
    assert worker_advice(found, 2, None) == [
        "num_workers=2 gives 1,800 samples/s, 1.8 times as many as 0; 4 give no more: "
        "the 2 cores are busy."
    ]
    # Why no worker is best.
    for following, why in (
        (
            measured(1, 400, busy=0.5, theirs=0.3),
            "transferring samples between processes costs more than loading them",
        ),
        (measured(1, 950, busy=0.9, theirs=0.3), "this process can't receive more from them"),
        (
            measured(1, 950, busy=0.2, theirs=0.3, machine=0.97),
            "other processes keep this machine busy",
        ),
    ):
        [said] = worker_advice([measured(0, 1000), following], 4, None)
        assert said.startswith("num_workers=0 gives 1,000 samples/s; 1 give "), following
        assert said.endswith(f": {why}."), following
    # Workers that wait are told from those that compute.
    found = [measured(0, 100), measured(2, 300, busy=0.1, theirs=0.1), measured(4, 310, busy=0.0)]
    [said] = worker_advice(found, 4, None)
    assert "they wait for disk or network" in said
    # The most that was measured is not called the best.
    [said] = worker_advice([measured(0, 100), measured(1, 200)], 4, None)
    assert said.endswith("2 times as many as 0; higher numbers were not measured.")


def test_what_training_needs() -> None:
    found = [measured(0, 100), measured(2, 180), measured(4, 400)]
    assert Need(samples=32, seconds=0.2, source="Training").rate == 160
    [_, enough] = worker_advice(found, 4, Need(samples=32, seconds=0.2, source="Training"))
    assert enough == (
        "Training takes 32 samples in 200 ms, 160 a second: num_workers=2 is enough (1.1 times that)."
    )
    [_, starved] = worker_advice(found, 4, Need(samples=32, seconds=0.02, source="Training"))
    assert starved.endswith(
        "no number is enough. With num_workers=4 training would wait for data 75 % of its time."
    )


def test_ways_to_compute_are_compared_with_torch_s_operations() -> None:
    said = advise_modes(
        [
            Mode(subject="f", way="Python loop", seconds=4e-3, first=4e-3),
            Mode(subject="f", way="torch operations", seconds=2e-3, first=2e-3, difference=0.0),
            Mode(subject="f", way="TorchScript", seconds=2.05e-3, first=0.1, difference=1e-7),
            Mode(subject="f", way="torch.compile", seconds=1e-3, first=10.0, difference=0.5),
            Mode(subject="g", way="eager", reason="it failed"),
        ]
    )
    assert said == [
        "f: torch operations 2.00 ms a call; Python loop takes 2 times as long; TorchScript as fast; "
        "torch.compile is 2 times as fast, which pays off after 10,000 calls.",
        "torch.compile gives other results for f: they differ by 5e-01.",
    ]


def test_what_users_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "my_sets.py"
    script.write_text(
        "def numbers():\n    return [1, 2]\n"
        "def of(world):\n    return world\n"
        "def breaks():\n    return 1 / 0\n"
        "def greedy(a, b):\n    return a\n"
        "if __name__ == '__main__':\n    raise RuntimeError('it ran')\n"
    )
    function = import_named(f"{script}:numbers", "dataset")
    assert call_target(function, "it", "a world") == [1, 2]
    assert call_target(import_named(f"{script}:of", "dataset"), "it", "a world") == "a world"
    with pytest.raises(
        shoal.LaunchError, match=r"ZeroDivisionError: division by zero \(.*my_sets.py:6\)"
    ):
        call_target(import_named(f"{script}:breaks", "dataset"), "it")
    with pytest.raises(shoal.LaunchError, match="it requires a, b"):
        call_target(import_named(f"{script}:greedy", "dataset"), "it", "a world")
    with pytest.raises(shoal.LaunchError, match="it is 3, not a function"):
        call_target(3, "it")
    sys.modules.pop("my_sets")


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    # A file that fails leaves no module.
    (tmp_path / "half_a_module.py").write_text("x = 1\nraise OSError('no data here')\n")
    for text, found in (
        ("train", "no name after a colon"),
        (":name", "no module"),
        ("no_such_package_here:f", "No module named 'no_such_package_here'"),
        ("no_such_file.py:f", "there is no file"),
        ("json:dataset", "json has no dataset; it has "),
        (f"{tmp_path}/half_a_module.py:x", "OSError: no data here"),
    ):
        with pytest.raises(shoal.LaunchError, match=found):
            import_named(text, "dataset")
    assert "half_a_module" not in sys.modules


def test_the_first_ctrl_c_asks_and_the_second_or_one_at_once_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with keep_on_interrupt() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.asked == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with keep_on_interrupt() as interrupts:
        interrupts.at_once = True
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert interrupts.asked == signal.SIGTERM

"""Steps whose results are read one step later: the same numbers, and errors that change nothing."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.killed_training import same
from helpers.small_training import backward, cross_entropy, events_of, sgd
from shoal.data.step_result import LateResult
from shoal.strategies import engine_of
from shoal.training.loss_scale import LossScale
from shoal.training.train_state import could_fuse
from shoal.util.accelerator import HostCopy
from shoal.util.errors import StepError

SAMPLES, BATCH = 40, 8
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.05, amsgrad=True, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05, fused=True),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def samples(dtype: torch.dtype = torch.float32, *, bad: int | None = None) -> tuple[Tensor, Tensor]:
    """Samples in the order of their labels; that of step `bad` is not finite."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=generator).to(dtype)
    if bad is not None:
        inputs[bad * BATCH + 3] = torch.nan
    return inputs, torch.randint(0, 3, (SAMPLES,), generator=generator)


class Training:
    """A model and everything that a step changes."""

    def __init__(
        self,
        world: shoal.World,
        result: str | None = "late",
        *,
        optimizer: str = "AdamW",
        dtype: torch.dtype = torch.float32,
        bad: int | None = None,
        clip: float | None = 0.5,
    ) -> None:
        self.model = shoal.parallelize(network(dtype), world)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        options: dict[str, Any] = {"clip": clip, "schedule": self.schedule, "result": result}
        options["schedule_interval"] = "step"
        self.step = shoal.Step(self.model, self.optimizer, shoal.Task(cross_entropy), **options)
        data = samples(dtype, bad=bad)
        self.loader = shoal.Loader(data, world, batch_size=BATCH, micro_batches=2, shuffle=False)
        self.ema = shoal.EMA(self.model, decay=0.5)

    def run(self, directory: Path) -> shoal.Run:
        return shoal.Run(directory, self.step, self.loader, trackers=())

    def state(self) -> dict[str, Any]:
        """A copy of what a step changes."""
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        state = {name: part.state_dict() for name, part in parts.items()}
        return copy.deepcopy(state | {"number": self.step.number})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.full)])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_late_results_are_those_of_now(
    world: shoal.World, optimizer: str, dtype: torch.dtype, clip: float | None
) -> None:
    results: dict[str, list[shoal.StepResult]] = {}
    states = {}
    for mode in ("now", "late"):
        training = Training(world, mode, optimizer=optimizer, dtype=dtype, clip=clip)
        results[mode] = []
        for batch in training.loader.epochs(2):
            results[mode].append(training.step(batch))
            training.ema.update()
        states[mode] = training.state() | {"ema": training.ema.state_dict()}
    assert same(states["late"], states["now"])
    for late, now in zip(results["late"], results["now"], strict=True):
        assert isinstance(late, LateResult)
        assert late[:4] == now[:4]


def test_the_error_comes_one_step_late_and_nothing_has_changed(world: shoal.World) -> None:
    for bad in (0, 2):  # in the first step, the optimizer has no state yet
        training = Training(world, bad=bad)
        before = training.state()
        batches = training.loader.epochs(1)
        for number, batch in enumerate(batches):
            if number == bad:
                before, last = training.state(), training.step.last
            if number == bad + 1:
                with pytest.raises(StepError, match=r"loss of nan.*not changed.*late") as raised:
                    training.step(batch)
                assert f"samples {bad * BATCH} to {bad * BATCH + BATCH - 1}" in str(raised.value)
                break
            training.step(batch)
        assert same(training.state(), before)
        assert training.step.last is last
        assert training.loader.consumed == bad * BATCH


def test_a_loop_that_catches_the_error_continues(world: shoal.World) -> None:
    training, reference = Training(world, bad=1), Training(world, "now")
    taken = []
    for number, batch in enumerate(training.loader.epochs(1)):
        try:
            training.step(batch)
            taken.append(number)
        except StepError:
            assert number == 2
    assert taken == [0, 1, 3, 4]  # of which 1 failed
    assert training.step.number == 3
    assert training.loader.consumed == SAMPLES
    for number, batch in enumerate(reference.loader.epochs(1)):
        if number not in (1, 2):
            reference.step(batch)
    assert same(training.state(), reference.state())


@pytest.mark.parametrize("what", ["save", "evaluate", "state", "export", "loop", "other"])
def test_a_result_is_looked_at_first(world: shoal.World, tmp_path: Path, what: str) -> None:
    training = Training(world, bad=1)
    with training.run(tmp_path / "run") as run:
        batches = training.loader.epochs(1)
        training.step(next(batches))
        before = training.state()
        batch = next(batches)
        result = training.step(batch)
        assert training.step.number == 2

        def look() -> None:
            if what == "save":
                run.save()
            elif what == "evaluate":
                shoal.evaluate(training.model, samples(), task=shoal.Task(cross_entropy))
            elif what == "state":
                training.step.state_dict()
            elif what == "export":
                shoal.export(training.model, tmp_path / "model.pt")
            elif what == "other":
                other = training.optimizer, shoal.Task(cross_entropy)
                shoal.Step(training.model, *other, result="late")(next(batches))
            else:
                training.step.check_loop = lambda: None  # type: ignore[method-assign]
                backward(batch, training.model, cross_entropy)

        assert not torch.tensor(result.loss).isfinite()  # reading does not raise
        with pytest.raises(StepError, match="late"):
            look()
        assert same(training.state(), before)
        if what != "other":
            assert training.loader.consumed == BATCH
        engine_of(training.model).settle()  # it is raised once
        assert not list((tmp_path / "run/checkpoints").glob("step-*"))


def train(training: Training, directory: Path | None = None, error: Exception | None = None) -> None:
    """Train for an epoch, in a Run or without one; then the script may fail."""
    with nullcontext() if directory is None else training.run(directory) as run:
        for batch in training.loader.epochs(1):
            training.step(batch)
            if run is not None:
                run.tick()
        if error is not None:
            raise error


def test_the_end_of_a_run_looks_at_the_last_result(world: shoal.World, tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"loss of nan.*late"):
        train(Training(world, bad=4), tmp_path)
    assert [event["step"] for event in events_of(tmp_path, "step")] == [1, 2, 3, 4]
    ended = events_of(tmp_path)[-1]
    assert (ended["event"], ended["step"], ended["error"]) == ("end", 4, "StepError")


@pytest.mark.parametrize("error", [None, KeyError("mine")])  # an error of the script is not covered up
def test_the_end_of_the_world_looks_at_the_last_result(error: Exception | None) -> None:
    expected = pytest.raises(StepError, match="late") if error is None else pytest.raises(KeyError)
    with expected, shoal.init(device="cpu") as world:
        train(Training(world, bad=4), error=error)


@pytest.mark.full
@pytest.mark.processes
def test_a_script_without_a_with_block_ends_with_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        dedent("""
        import torch, shoal
        world = shoal.init(device="cpu")
        model = shoal.parallelize(torch.nn.Linear(1, 1), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        task = shoal.Task(lambda output, batch: (output.sum(), len(output)))
        step = shoal.Step(model, optimizer, task, result="late")
        inputs = torch.tensor([[1.0], [1.0], [torch.nan]])
        for batch in shoal.Loader((inputs,), world, batch_size=1, shuffle=False).epochs(1):
            step(batch)
        print("trained")
        """)
    )
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout, ended.returncode) == ("trained\n", 1), ended.stderr
    assert "found: a loss of nan" in ended.stderr


def trained(world: shoal.World, *, bad: int) -> nn.Module:
    training = Training(world, bad=bad)
    train(training)
    return training.model


def test_a_failed_step_is_raised_after_its_step_is_gone(world: shoal.World, tmp_path: Path) -> None:
    model = trained(world, bad=4)
    with pytest.raises(StepError, match="late"):
        shoal.export(model, tmp_path / "model.pt")
    shoal.export(model, tmp_path / "model.pt")  # it is raised once


def test_a_run_ends_even_if_its_last_result_cannot_be_read(
    world: shoal.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(copied: HostCopy) -> list[float]:
        raise RuntimeError("device-side assert")

    def train() -> None:
        training = Training(world)
        batches = training.loader.epochs(1)
        with training.run(tmp_path) as run:
            training.step(next(batches))
            run.tick()
            training.step(next(batches))
            monkeypatch.setattr(HostCopy, "read", fail)

    with pytest.raises(RuntimeError, match="device-side assert"):
        train()
    assert events_of(tmp_path)[-1]["error"] == "RuntimeError"


def test_events_are_those_of_now(world: shoal.World, tmp_path: Path) -> None:
    columns: dict[str, list[tuple[Any, ...]]] = {}
    for mode in ("now", "late"):
        training = Training(world, mode)
        with training.run(tmp_path / mode) as run:
            for batch in training.loader.epochs(2):
                training.step(batch)
                run.tick(every=3)
        names = ("step", "first", "size", "loss", "norm", "counted")
        columns[mode] = [tuple(event[n] for n in names) for event in events_of(tmp_path / mode, "step")]
    assert columns["late"] == columns["now"]
    assert [row[0] for row in columns["late"]] == list(range(1, 11))


def test_the_time_of_a_device_is_taken_when_its_result_is_known(
    world: shoal.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def take() -> tuple[int, ...]:
        taken.append(len(taken))
        return (1000 * taken[-1],) * 10

    monkeypatch.setattr(world.timeline, "hosts", False, raising=False)
    training = Training(world)
    run = training.run(tmp_path)
    batches = training.loader.epochs(1)
    with run:
        training.step(next(batches))
        run.tick()
        monkeypatch.setattr(world.timeline, "take", take)
        training.step(next(batches))
        run.tick()
        assert taken == [0, 1]  # the first for step 1, whose result is known by now
        run.save()
        assert taken == [0, 1, 2]
    assert [event["step"] for event in events_of(tmp_path, "step")] == [1, 2]


def test_a_step_that_was_taken_back_is_not_recorded(world: shoal.World, tmp_path: Path) -> None:
    training = Training(world, bad=1)
    with training.run(tmp_path) as run:
        for batch in training.loader.epochs(1):
            try:
                training.step(batch)
            except StepError:
                continue
            run.tick()
    rows = [(event["step"], event["first"]) for event in events_of(tmp_path, "step")]
    assert rows == [(1, 0), (2, 3 * BATCH), (3, 4 * BATCH)]


def test_an_error_of_the_script_loses_no_event(world: shoal.World, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        train(Training(world), tmp_path, KeyError())
    assert [event["step"] for event in events_of(tmp_path, "step")] == [1, 2, 3, 4, 5]


def test_a_resumed_run_ends_with_the_same_bits(world: shoal.World, tmp_path: Path) -> None:
    whole = Training(world)
    for batch in whole.loader.epochs(2):
        whole.step(batch)
    engine_of(whole.model).settle()
    for epochs in (1, 2):
        part = Training(world)
        with part.run(tmp_path) as run:
            run.restore()
            for batch in part.loader.epochs(epochs):
                part.step(batch)
                run.tick()
            run.save()
    assert same(part.state(), whole.state())


def test_a_state_that_is_loaded_replaces_a_failed_step(world: shoal.World) -> None:
    training = Training(world, bad=1)
    state = copy.deepcopy(training.step.state_dict())
    batches = training.loader.epochs(1)
    for _ in range(2):
        training.step(next(batches))
    training.step.load_state_dict(state)
    next(batches)
    training.step(next(batches))
    engine_of(training.model).settle()
    assert training.step.number == 1


def test_a_count_of_nothing_is_found_late(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    task = shoal.Task(lambda output, batch: (output.sum() * 0.0, 0))
    step = shoal.Step(model, OPTIMIZERS["SGD"](model), task, result="late")
    batches = shoal.Loader(samples(), world, batch_size=BATCH).epochs(1)
    step._prepared = True  # the trial of the loss would find it
    step(next(batches))
    with pytest.raises(StepError, match=r"count of 0 in total.*late"):
        step(next(batches))


def test_a_late_result_is_a_step_result(world: shoal.World) -> None:
    training = Training(world)
    late = training.step(next(training.loader.epochs(1)))
    assert isinstance(late, shoal.StepResult)
    plain = shoal.StepResult(*late)
    assert type(plain) is shoal.StepResult
    assert (late == plain, late != plain, plain == late) == (True, False, True)
    assert (hash(late), repr(late), late._asdict()) == (hash(plain), repr(plain), plain._asdict())
    assert late._replace(loss=1.0) == plain._replace(loss=1.0)
    loaded = pickle.loads(pickle.dumps(late))
    assert type(loaded) is shoal.StepResult
    assert loaded == plain
    first, *_ = late
    assert first == late[0] == late.loss
    assert late.forward > 0
    assert not late.skipped


def test_steps_that_cannot_be_late(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    task = shoal.Task(cross_entropy)
    with pytest.raises(StepError, match="result='later'"):
        shoal.Step(model, sgd(model), task, result="later")
    with pytest.raises(StepError, match=r"SGD can't skip a step.*SGD\(…, fused=True\)"):
        shoal.Step(model, sgd(model), task, result="late")
    with pytest.raises(StepError, match="the loss scale of fp16"):
        shoal.Step(model, sgd(model, fused=True), task, result="late", precision="fp16")
    asynchronous = shoal.parallelize(network(), world, shoal.LocalSGD(sync_every=2))
    with pytest.raises(StepError, match="in a way of its own"):
        shoal.Step(asynchronous, sgd(asynchronous, fused=True), task, result="late")
    step = shoal.Step(model, sgd(model, fused=True), task)
    assert (step.result_mode.value, LossScale().value) == ("now", 65536.0)
    late = shoal.Step(model, sgd(model, fused=True), task, result="late")
    batch = next(shoal.Loader(samples(), world, batch_size=BATCH).epochs(1))
    with pytest.raises(StepError, match=r"in a custom training loop.*result"):
        backward(batch, model, cross_entropy)
    assert late.result_mode.value == "late"


def test_an_accelerator_decides_by_the_optimizer(
    world: shoal.World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("training.pending_step", "training.train_state", "util.accelerator"):
        monkeypatch.setattr(f"shoal.{module}.is_accelerator", lambda device: True)
    said = (
        "torch.optim.SGD(…, fused=True)",
        "the device waits for the host in each step: SGD can't skip a step on the device",
    )
    for fused, mode in ((True, "late"), (False, "now")):
        model = shoal.parallelize(network(), world)
        step = shoal.Step(model, sgd(model, fused=fused), shoal.Task(cross_entropy))
        step(next(shoal.Loader(samples(), world, batch_size=BATCH).epochs(1)))
        assert step.result_mode.value == mode
        out = capsys.readouterr().out
        assert [words in out for words in said] == [mode == "now"] * 2


def test_an_optimizer_that_has_no_fused_form_is_not_told_to_fuse(
    world: shoal.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shoal.parallelize(network(), world)
    monkeypatch.setattr("shoal.training.pending_step.is_accelerator", lambda device: True)
    step = shoal.Step(model, torch.optim.RMSprop(model.parameters()), shoal.Task(cross_entropy))
    assert step.result_mode.reason == (
        "RMSprop can't skip a step on the device, as torch's fused optimizers can"
    )
    assert not could_fuse(step.optimizer)
    assert could_fuse(sgd(model, fused=False))
    assert not could_fuse(sgd(model, fused=True))
    assert not could_fuse(torch.optim.Adam([torch.ones(1, dtype=torch.complex64)]))

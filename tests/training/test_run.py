"""The run directory: what it restores, skips, keeps and records, also in loops left early."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import shoal
from helpers.killed_training import same
from helpers.ranks import Ranks
from helpers.small_training import events_of, saved, sgd, squared_error, squares, step_of, take
from shoal.distributed.seeds import random_state
from shoal.util.errors import CheckpointError, DataError, StepError

pytestmark = pytest.mark.processes

SAMPLES, BATCH = 20, 5


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(22, 4, generator=generator), torch.randn(22, 2, generator=generator)


class Best:
    """What a user keeps beside the model."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.average = torch.zeros(2, 4)
        self.history: list[tuple[int, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "average": self.average, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.average, self.history = state["value"], state["average"], state["history"]


class Fit:
    """A model with all that belongs to its run; `epochs` at a batch of 6 have 4 steps each."""

    def __init__(self, world: shoal.World, directory: Path, **options: Any) -> None:
        world.reseed("weights", by_rank=False)
        self.model = shoal.parallelize(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2)), world)
        optimizer = sgd(self.model, lr=0.05, momentum=0.9)
        if "schedule" in options:
            options["schedule"] = options["schedule"](optimizer)
        self.step = shoal.Step(self.model, optimizer, shoal.Task(squared_error), **options)
        self.best = Best()
        self.data = shoal.Loader(dataset(), world, batch_size=6)
        self.run = shoal.Run(directory, self.step, self.data, state={"best": self.best})

    def train(self, steps: int, *, every: int | None = None) -> None:
        """Go on up to `steps` steps since the start of training."""
        for batch in self.data.epochs(100):
            result = self.step(batch)
            with torch.no_grad():
                self.best.average += 0.1 * self.model.get_parameter("0.weight")
            self.best.history.append((self.step.number, result.loss))
            self.best.value = min(result.loss, self.best.value or result.loss)
            self.run.tick(every=every)
            if self.step.number == steps:
                break
        self.run.files.checkpoints.background.wait()  # for a save under way

    def state(self) -> dict[str, Any]:
        """All that a resumed run must have as an uninterrupted one has it."""
        kept: dict[str, Any] = {"step": self.step, "best": self.best, "data": self.data}
        return {name: each.state_dict() for name, each in kept.items()} | {"random": random_state()}


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, total_iters=3)
    return lr_scheduler.SequentialLR(
        optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 12)], [3]
    )


def lower_scale(step: shoal.Step, value: float = 512.0) -> None:
    """With fp16: to where it soon doubles, and not at its beginning."""
    if step._scale is not None:
        step._scale.value, step._scale.interval, step._scale.good = value, 8, 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": cosine, "schedule_interval": "step", "clip": 0.1},
        {"precision": "bf16"},
        {"precision": "fp16"},
    ],
    ids=["plain", "schedule", "bf16", "fp16"],
)
def test_the_same_command_first_and_after(
    options: dict[str, Any], world: shoal.World, tmp_path: Path
) -> None:
    """FAILURES 10: where there is nothing to resume, `restore` is no error."""
    whole = Fit(world, tmp_path / "whole", **options)
    assert whole.run.restore() is None
    lower_scale(whole.step)
    whole.train(10)

    begun = Fit(world, tmp_path / "parts", **options)
    assert begun.run.restore() is None
    lower_scale(begun.step)
    begun.train(6)
    path = begun.run.save()

    resumed = Fit(world, tmp_path / "parts", **options)
    lower_scale(resumed.step, 1.0)
    restored = resumed.run.restore()
    assert restored == (6, 34, 1, path)  # 22 samples in 4 steps, then 12 in 2
    assert same(resumed.state(), begun.state())
    resumed.train(10)
    assert same(resumed.state(), whole.state())


def own_loop(world: shoal.World, directory: Path, stop: int) -> dict[str, Any]:
    """A loop of one's own with a Run, saving at every third of its steps."""
    world.reseed("weights", by_rank=False)
    step = step_of(world, nn.Linear(4, 2), squared_error)
    data = shoal.Loader(dataset(), world, batch_size=6, micro_batches=2)
    with shoal.Run(directory, step, data) as run:
        run.restore()
        for batch in data.epochs(100):
            take(batch, step.model, step.optimizer, squared_error, clip=1.0)
            run.tick(every=3)
            if run.step == stop:
                break
    return step.state_dict()


@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_of_ones_own_is_counted_saved_and_resumed(
    size: int, world: shoal.World, two: Ranks, tmp_path: Path
) -> None:
    def run(directory: str, stop: int) -> Any:
        arguments = tmp_path / directory, stop
        return own_loop(world, *arguments) if size == 1 else two.call(own_loop, *arguments)[0]

    whole = copy.deepcopy(run("whole", 8))
    cut = run("parts", 4)["number"]
    resumed = run("parts", 8)
    assert (cut, resumed["number"]) == (4, 8)
    assert same(resumed, whole)
    assert saved(tmp_path / "parts") == [3, 6]
    assert [event["step"] for event in events_of(tmp_path / "whole", "step")] == list(range(1, 9))


def test_ticks_without_a_step_are_an_error(world: shoal.World, tmp_path: Path) -> None:
    fit = Fit(world, tmp_path)
    for _ in fit.data.epochs(1):
        with pytest.raises(StepError, match="no Step of this Run has processed a batch"):
            fit.run.tick(every=1)


def test_a_damaged_checkpoint_is_replaced(world: shoal.World, tmp_path: Path) -> None:
    fit = Fit(world, tmp_path)
    fit.train(7, every=3)
    (tmp_path / "checkpoints/step-6/manifest.json").write_bytes(b'{"format": ')
    again = Fit(world, tmp_path)
    restored = again.run.restore()
    assert restored is not None
    assert restored.step == 3
    again.train(7, every=3)
    assert same(again.state(), fit.state())
    third = Fit(world, tmp_path).run.restore()
    assert third is not None
    assert third.step == 6


def test_a_restore_that_finds_only_an_interrupted_save_says_so(
    world: shoal.World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Fit(world, tmp_path).train(2, every=2)
    saved_at = tmp_path / "checkpoints" / "step-2"
    (saved_at / "manifest.json").unlink()
    saved_at.rename(saved_at.with_name("step-2.partial"))
    capsys.readouterr()
    assert Fit(world, tmp_path).run.restore() is None
    assert capsys.readouterr().out == (
        f"no complete checkpoint in {tmp_path / 'checkpoints'}, only interrupted saves "
        "(step-2.partial): training starts from the beginning\n"
    )
    assert Fit(world, tmp_path).run.restore() is None
    assert capsys.readouterr().out == ""


def test_a_second_save_at_one_step(world: shoal.World, tmp_path: Path) -> None:
    fit = Fit(world, tmp_path / "a")
    run = shoal.Run(tmp_path / "b", fit.step, fit.data)
    for batch in fit.data.epochs(1):
        fit.step(batch)
        run.tick(every=2)
    run.files.checkpoints.background.wait()
    manifest = tmp_path / "b" / "checkpoints" / "step-4" / "manifest.json"
    inode = manifest.stat().st_ino
    assert run.save() == manifest.parent
    assert manifest.stat().st_ino == inode

    # What the user keeps may have changed since.
    for value in (1.0, 0.5):
        fit.best.value = value
        fit.run.save()
    again = Fit(world, tmp_path / "a")
    again.run.restore()
    assert again.best.value == 0.5
    with pytest.raises(CheckpointError, match="state"):
        shoal.Run(tmp_path / "a", fit.step, fit.data).restore()


def test_another_number_of_ranks_restores_no_random_state(
    world: shoal.World, two: Ranks, tmp_path: Path
) -> None:
    """But two such resumes are alike, and no two ranks draw the same."""
    two.call(own_loop, tmp_path, 3)
    found = []
    for _ in range(2):
        own_loop(world, tmp_path, 4)
        found.append(random_state())
    world.reseed("noise from step 3")
    assert same(found, [random_state()] * 2)


def test_the_events_of_two_attempts_follow_each_other(world: shoal.World, tmp_path: Path) -> None:
    fit = Fit(world, tmp_path)
    fit.train(3, every=3)
    fit.run.close()
    path = tmp_path / "events" / "rank-0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    again = Fit(world, tmp_path)
    again.run.restore()
    again.train(4)
    again.run.close()
    assert path.read_bytes().startswith(whole[:-10])
    kinds = [event["event"] for event in events_of(tmp_path)]
    assert kinds[-2:] == ["usage", "end"]
    # What the process uses is noted every few seconds, however far it has come.
    kinds = [kind for kind in kinds if kind != "usage"]
    assert kinds == ["start", "step", "step", "step", "save", "restore", "start", "step", "end"]


def parts(world: shoal.World) -> tuple[shoal.Step, shoal.Loader]:
    torch.manual_seed(0)
    values = torch.arange(2.0 * SAMPLES).view(SAMPLES, 2) / SAMPLES
    step = step_of(world, nn.Linear(2, 1), lr=0.01)
    return step, shoal.Loader((values,), world, batch_size=BATCH)


@pytest.mark.parametrize("raw", [False, True])
def test_a_batch_that_no_step_took_is_not_missed(world: shoal.World, tmp_path: Path, raw: bool) -> None:
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        for batch in data.epochs(1):
            if step.number == 2:
                break
            take(batch, step.model, step.optimizer, squares) if raw else step(batch)
            run.tick()
        run.save()
        restored = run.restore()
    assert restored is not None
    assert restored.position == 2 * BATCH
    assert next(data.epochs(1)).first == 2 * BATCH


@pytest.mark.parametrize("workers", [0, 1])
def test_a_restore_within_the_loop_goes_on_from_there(
    world: shoal.World, tmp_path: Path, workers: int
) -> None:
    step, _ = parts(world)
    data = shoal.Loader((torch.ones(SAMPLES, 2),), world, batch_size=BATCH, num_workers=workers)
    seen: list[tuple[int, int]] = []
    with shoal.Run(tmp_path, step, data) as run:
        for batch in data.epochs(2):
            step(batch)
            run.tick(every=2)
            seen.append((step.number, batch.first))
            if len(seen) == 5:  # a loss that has gone wrong, perhaps
                restored = run.restore()
                assert restored is not None
                assert restored[:2] == (4, 20)
    assert seen == [(1, 0), (2, 5), (3, 10), (4, 15), (5, 20), (5, 20), (6, 25), (7, 30), (8, 35)]


def test_batches_finished_between_ticks_are_all_counted(world: shoal.World, tmp_path: Path) -> None:
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        for number, batch in enumerate(data.epochs(1)):
            take(batch, step.model, step.optimizer, squares)
            if number % 2:
                run.tick()
        assert step.number == SAMPLES // BATCH
        step(batch)
        take(batch, step.model, step.optimizer, squares)
        last = step(batch)
        assert step.last == last
        assert step.number == SAMPLES // BATCH + 3


def test_what_was_finished_after_a_save_is_not_counted_after_its_restore(
    world: shoal.World, tmp_path: Path
) -> None:
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        first, second, *_ = data.epochs(1)
        step(first)
        run.save()
        take(second, step.model, step.optimizer, squares)
        run.restore()
        run.tick()
    assert step.number == 1


def test_a_script_may_change_its_working_directory(
    world: shoal.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    step, data = parts(world)
    with shoal.Run("a", step, data) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick(every=1)
            monkeypatch.chdir(tmp_path / "elsewhere")
            world.log({"rate": 0.1})
        assert run.save() == Path("a/checkpoints/step-4")
        assert run.save(to="best") == Path("a/best/step-4")
        restored = run.restore()
    assert restored is not None
    assert restored.path == Path("a/checkpoints/step-4")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "a" / "checkpoints" / "step-4").is_dir()


class Settings(dict[str, Any]):
    """A configuration as a library has it: a class derived from dict."""


def test_a_config_of_a_class_derived_from_dict_is_kept_as_a_dict(
    world: shoal.World, tmp_path: Path
) -> None:
    model = Settings(width=8, layers=[Settings(rate=0.1)], token="a secret token")
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data, config=Settings(model=model, data=tmp_path)) as run:
        step(next(data.epochs(1)))
        run.tick()
        run.save()
    text = (tmp_path / "checkpoints/step-1/manifest.json").read_text().replace(" ", "")
    for entry in ('"width":8', '"rate":0.1', f'"data":"{tmp_path}"'):
        assert entry in text
    assert "a secret token" not in text
    assert "a secret token" not in (tmp_path / "events/rank-0.jsonl").read_text()


def test_a_run_does_not_resume_on_other_data(world: shoal.World, tmp_path: Path) -> None:
    """FAILURES 32: a dataset that has changed; model and optimizer stay as they were."""
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        step(next(iter(data.epochs(1))))
        run.tick()
        run.save()
    again, _ = parts(world)
    before = copy.deepcopy(again.model.state_dict())
    values = torch.arange(2.0 * SAMPLES).view(SAMPLES, 2) / SAMPLES
    values[SAMPLES // 2] += 1.0
    other = shoal.Loader((values,), world, batch_size=BATCH)
    with shoal.Run(tmp_path, again, other) as run, pytest.raises(DataError, match="checksum"):
        run.restore()
    assert (other.position, again.number) == (0, 0)
    assert same(again.model.state_dict(), before)


def test_data_that_changed_since_are_noticed(world: shoal.World) -> None:
    inputs = torch.zeros(SAMPLES, 2, dtype=torch.bfloat16)
    state = shoal.Loader((inputs,), world, batch_size=BATCH).state_dict()
    shoal.Loader((inputs.clone(),), world, batch_size=BATCH).check_state(state)
    inputs[SAMPLES // 2, 1] = 1
    with pytest.raises(DataError, match="samples of checksum"):
        shoal.Loader((inputs,), world, batch_size=BATCH).check_state(state)

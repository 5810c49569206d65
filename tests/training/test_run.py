"""The run directory: what it restores, skips, keeps, refuses and records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import shoal
from helpers.killed_training import EPOCH_STEPS, Training, same, train
from helpers.ranks import Ranks
from shoal.distributed.seeds import random_state, set_random_state
from shoal.telemetry import events
from shoal.util.errors import CheckpointError, StepError

pytestmark = pytest.mark.processes


@pytest.fixture
def world() -> Iterator[shoal.World]:
    kept = random_state()
    with shoal.init() as alone:
        yield alone
    set_random_state(kept)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Ranks by world size; what runs on them begins with the random states of a new world."""
    started: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in started:
            started[size] = Ranks(size)
        return started[size]

    yield of
    for some in started.values():
        some.kill()


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch[1], reduction="sum"), len(batch[1])


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

    def __init__(self, world: shoal.World, directory: Path, *, keep: int = 3, **options: Any) -> None:
        world.reseed("weights", by_rank=False)
        self.model = shoal.parallelize(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2)), world)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        schedule = options.pop("schedule", None)
        self.step = shoal.Step(
            self.model,
            self.optimizer,
            shoal.Task(loss),
            schedule=schedule and schedule(self.optimizer),
            **options,
        )
        self.best = Best()
        self.data = shoal.Loader(dataset(), world, batch_size=6)
        self.run = shoal.Run(directory, self.step, self.data, state={"best": self.best}, keep=keep)

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
        return {
            "step": self.step.state_dict(),
            "best": self.best.state_dict(),
            "data": self.data.state_dict(),
            "random": random_state(),
        }


def saved(directory: Path) -> list[int]:
    paths = (directory / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in paths)


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, total_iters=3)
    return lr_scheduler.SequentialLR(
        optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 12)], [3]
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": cosine, "clip": 0.1}, {"precision": "bf16"}, {"precision": "fp16"}],
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
    lower_scale(resumed.step)
    restored = resumed.run.restore()
    assert restored == (6, 34, 1, path)  # 22 samples in 4 steps, then 12 in 2
    assert same(resumed.state(), begun.state())
    resumed.train(10)
    assert same(resumed.state(), whole.state())


def own_loop(world: shoal.World, directory: Path, stop: int) -> dict[str, Any]:
    """A loop of one's own with a Run, saving at every third of its steps."""
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(nn.Linear(4, 2), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    data = shoal.Loader(dataset(), world, batch_size=6, micro_batches=2)
    with shoal.Run(directory, step, data) as run:
        run.restore()
        for batch in data.epochs(100):
            for micro in batch:
                total, count = loss(model(micro[0]), micro)
                batch.backward(total=total, count=count, model=model)
            batch.finish(model, clip=1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.tick(every=3)
            if run.step == stop:
                break
    return step.state_dict()


@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_of_ones_own_is_counted_saved_and_resumed(
    size: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    def runs(directory: Path, stops: list[int]) -> list[dict[str, Any]]:
        return [ranks(size).call(own_loop, directory, stop)[0] for stop in stops]

    (whole,) = runs(tmp_path / "whole", [8])
    cut, resumed = runs(tmp_path / "parts", [4, 8])
    assert (cut["number"], resumed["number"]) == (4, 8)
    assert same(resumed, whole)
    assert saved(tmp_path / "parts") == [3, 6]
    lines = events.read_events(tmp_path / "whole/events/rank-0.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))


def test_ticks_without_a_step_are_an_error(world: shoal.World, tmp_path: Path) -> None:
    fit = Fit(world, tmp_path)
    for _ in fit.data.epochs(1):
        with pytest.raises(StepError, match="no Step of this Run has processed a batch"):
            fit.run.tick(every=1)


def test_a_run_that_begins_anew_over_checkpoints_is_refused(world: shoal.World, tmp_path: Path) -> None:
    with Fit(world, tmp_path).run as run:
        run.restore()
        run.save()
    again = Fit(world, tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoints of an earlier run"):
        again.train(1)
    assert saved(tmp_path) == [0]
    again.run.restore()
    again.train(3, every=1)
    assert saved(tmp_path) == [1, 2, 3]


def lower_scale(step: shoal.Step) -> None:
    """With fp16: to where it soon doubles, and not at its beginning."""
    if step._scale is not None:
        step._scale.value, step._scale.interval, step._scale.good = 512.0, 8, 0


def test_a_loss_scale_goes_on(world: shoal.World, tmp_path: Path) -> None:
    fit = Fit(world, tmp_path, precision="fp16")
    lower_scale(fit.step)
    fit.train(5)
    fit.run.save()
    resumed = Fit(world, tmp_path, precision="fp16")
    resumed.run.restore()
    assert resumed.step._scale is not None
    assert (resumed.step._scale.value, resumed.step._scale.good) == (512.0, 5)


def truncate(path: Path) -> None:
    (path / "rank-0.safetensors").write_bytes((path / "rank-0.safetensors").read_bytes()[:-1])


def alter(path: Path) -> None:
    content = bytearray((path / "state.json").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "state.json").write_bytes(content)


def remove(path: Path) -> None:
    (path / "rank-0.safetensors").unlink()


def tear_manifest(path: Path) -> None:
    (path / "manifest.json").write_bytes(b'{"format": ')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "rank-0.safetensors has"),
        (alter, "state.json is altered"),
        (remove, "rank-0.safetensors is missing"),
        (tear_manifest, "manifest.json is truncated or altered"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_said(
    damage: Callable[[Path], None],
    reason: str,
    world: shoal.World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit = Fit(world, tmp_path)
    fit.train(7, every=3)
    damage(tmp_path / "checkpoints" / "step-6")
    capsys.readouterr()
    again = Fit(world, tmp_path)
    restored = again.run.restore()
    assert restored is not None
    assert restored.step == 3
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"skipped {tmp_path / 'checkpoints' / 'step-6'}: {reason}")
    assert second.startswith("resumed at sample 18 (step 3, epoch 0)")
    again.train(7, every=3)  # which replaces the damaged one
    assert same(again.state(), fit.state())
    third = Fit(world, tmp_path).run.restore()
    assert third is not None
    assert third.step == 6


def test_nothing_whole_is_an_error_that_names_all(world: shoal.World, tmp_path: Path) -> None:
    Fit(world, tmp_path).train(4, every=2)
    for step in (2, 4):
        remove(tmp_path / "checkpoints" / f"step-{step}")
    with pytest.raises(shoal.CheckpointError, match=r"none is complete: step-4: .*; step-2: "):
        Fit(world, tmp_path).run.restore()


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


def test_the_newest_are_kept(world: shoal.World, tmp_path: Path) -> None:
    fit = Fit(world, tmp_path, keep=2)
    fit.train(5, every=1)
    assert saved(tmp_path) == [4, 5]
    again = Fit(world, tmp_path, keep=2)
    again.run.restore()
    again.train(7, every=1)
    assert saved(tmp_path) == [6, 7]


def test_saved_at_every_so_many_steps(world: shoal.World, tmp_path: Path) -> None:
    fit = Fit(world, tmp_path)
    fit.train(8, every=3)
    assert saved(tmp_path) == [3, 6]
    for every in (0, -1):
        with pytest.raises(shoal.CheckpointError, match="1 or more"):
            fit.run.tick(every=every)


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
    fit.best.value = 1.0
    fit.run.save()
    fit.best.value = 0.5
    fit.run.save()
    again = Fit(world, tmp_path / "a")
    again.run.restore()
    assert again.best.value == 0.5


class Adversaries:
    """A GAN: two Steps in one Run. The generator learns at every second batch only."""

    def __init__(self, world: shoal.World, directory: Path) -> None:
        world.reseed("weights", by_rank=False)
        self.maker = shoal.parallelize(nn.Linear(4, 2), world)
        # The generator's loss runs through this BatchNorm too, on each rank with other samples.
        layers = (nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.judge = shoal.parallelize(nn.Sequential(*layers), world)
        self.steps = {
            "judge": self._step(self.judge, self._judge_loss),
            "maker": self._step(self.maker, self._maker_loss),
        }
        self.data = shoal.Loader(dataset(), world, batch_size=6)
        self.run = shoal.Run(directory, self.steps, self.data)

    def _step(self, model: nn.Module, loss: Callable[..., Any]) -> shoal.Step:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        inputs = self._pairs if model is self.judge else None
        return shoal.Step(model, optimizer, shoal.Task(loss, inputs))

    def _pairs(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            made = self.maker(batch[0])
        return torch.cat((batch[1], made))

    def _judge_loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        right = torch.ones_like(output)
        right[len(batch[0]) :] = 0.0
        return F.binary_cross_entropy_with_logits(output, right, reduction="sum"), len(output)

    def _maker_loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        verdict = self.judge(output)
        right = torch.ones_like(verdict)
        return F.binary_cross_entropy_with_logits(verdict, right, reduction="sum"), len(output)

    def train(self, batches: int, *, every: int | None = None) -> None:
        judge, maker = self.steps["judge"], self.steps["maker"]
        for batch in self.data.epochs(100):
            judge(batch)
            if judge.number % 2 == 0:
                maker(batch)
            self.run.tick(every=every)
            if judge.number == batches:
                break

    def state(self) -> dict[str, Any]:
        return {name: step.state_dict() for name, step in self.steps.items()}


def adversaries(world: shoal.World, directory: Path, stops: list[int]) -> dict[str, Any]:
    """Train up to each of the stops, each time with new objects that restore."""
    for stop in stops:
        gan = Adversaries(world, directory)
        restored = gan.run.restore()
        assert (restored is None) == (stop == stops[0])
        gan.train(stop, every=10)
        gan.run.close()
    return gan.state()


def test_two_steps_in_one_run(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    whole = ranks(2).call(adversaries, tmp_path / "whole", [14])
    parts = ranks(2).call(adversaries, tmp_path / "parts", [11, 14])
    assert same(parts, whole)
    for rank in range(2):
        path = tmp_path / "whole" / "events" / f"rank-{rank}.jsonl"
        steps = [event for event in events.read_events(path) if event["event"] == "step"]
        made = [(event["step"], event["first"]) for event in steps if event["name"] == "maker"]
        judged = [(event["step"], event["first"]) for event in steps if event["name"] == "judge"]
        assert [step for step, _ in judged] == list(range(1, 15))
        # Each step once, with the batch that it was taken on.
        assert made == [(step // 2, first) for step, first in judged if step % 2 == 0]


def test_the_first_of_several_steps_counts(world: shoal.World, tmp_path: Path) -> None:
    """One that waits at a step, while another goes on, is not saved at each batch of the other."""
    gan = Adversaries(world, tmp_path)
    run = shoal.Run(tmp_path, dict(reversed(gan.steps.items())), gan.data, keep=9)
    for batch in gan.data.epochs(2):
        gan.steps["judge"](batch)
        if gan.steps["judge"].number % 2 == 0:
            gan.steps["maker"](batch)
        run.tick(every=2)
    run.close()
    assert saved(tmp_path) == [2, 4]
    saves = [
        e for e in events.read_events(tmp_path / "events" / "rank-0.jsonl") if e["event"] == "save"
    ]
    assert len(saves) == 2


def test_other_names_are_refused(world: shoal.World, tmp_path: Path) -> None:
    fit = Fit(world, tmp_path)
    fit.train(1, every=1)
    with pytest.raises(shoal.CheckpointError, match="steps"):
        shoal.Run(tmp_path, {"other": fit.step}, fit.data, state={"best": fit.best}).restore()
    with pytest.raises(shoal.CheckpointError, match="state"):
        shoal.Run(tmp_path, fit.step, fit.data).restore()


@pytest.mark.full
def test_another_number_of_ranks_restores_no_random_state(tmp_path: Path) -> None:
    """But two such resumes are alike, and no two ranks draw the same."""

    def attempt(directory: Path, size: int, epochs: int) -> list[Any]:
        with Ranks(size) as started:
            return started.call(train, Training(directory=directory, epochs=epochs, keep=3))

    attempt(tmp_path / "first", 2, 1)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    first, second = (attempt(tmp_path / name, 3, 2) for name in ("first", "second"))
    for one, other in zip(first, second, strict=True):
        assert one.restored == EPOCH_STEPS
        assert same(one.model, other.model)
        assert same(one.random, other.random)
    assert len({tuple(rank.random["torch"].tolist()) for rank in first}) == 3


def test_a_line_cut_in_two_is_passed_over(world: shoal.World, tmp_path: Path) -> None:
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
    lines = path.read_bytes().splitlines()
    assert lines[: whole.count(b"\n")] == whole[:-10].splitlines()
    kinds = [event["event"] for event in events.read_events(path)]
    assert kinds[-2:] == ["usage", "end"]
    # What the process uses is noted every few seconds, however far it has come.
    kinds = [kind for kind in kinds if kind != "usage"]
    assert kinds == ["start", "step", "step", "step", "save", "restore", "start", "step", "end"]
    assert sum(not parses(line) for line in lines) == 1


def parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True

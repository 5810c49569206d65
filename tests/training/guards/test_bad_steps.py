"""Losses that are not finite, and spikes: skipped steps, rollbacks, and the samples left out."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.killed_training import same
from helpers.ranks import Ranks
from helpers.small_training import events_of, squared_error
from shoal.data.skipped_batches import LeftOutBatch, is_left_out
from shoal.training.bad_steps import spike_limit

BATCH, BATCHES = 8, 20


def samples(bad: dict[int, float]) -> tuple[Tensor, Tensor]:
    """Data in order; the targets of the batches in `bad` are multiplied by a value."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * BATCHES, 4, generator=random)
    y = torch.randn(BATCH * BATCHES, 2, generator=random)
    for batch, value in bad.items():
        y[batch * BATCH + 3] *= value  # one sample, so of one rank
    return x, y


def train(
    world: shoal.World,
    directory: str,
    bad: dict[int, float],
    options: shoal.BadSteps | None,
    *,
    steps: int = BATCHES,
    every: int = 4,
    epochs: int = 1,
    strategy: Any = None,
    micro_batches: int = 1,
    precision: str = "fp32",
    skip: tuple[int, ...] | None = None,
    die: str | None = None,
    last: bool = False,
    dataset: Any = None,
) -> tuple[dict[str, Tensor], list[int], int]:
    """Return the parameters, the first samples of the batches in order, and the steps taken."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))
    model = shoal.parallelize(model, world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    given: dict[str, Any] = {"clip": 1.0, "precision": precision}
    given["schedule"] = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    given["schedule_interval"] = "step"
    step = shoal.Step(model, optimizer, shoal.Task(squared_error), **given)
    data = samples(bad) if dataset is None else dataset
    loader = shoal.Loader(data, world, batch_size=BATCH, shuffle=False, micro_batches=micro_batches)
    guards = None
    if options is not None:
        guards = shoal.Guards(continuity=False, replicas=False, gradients=False, bad_steps=options)
    taken = []
    with shoal.Run(directory, step, loader, trackers=(), guards=guards) as run:
        run.restore()
        if die is not None:
            _die(run, die)
        for batch in loader.epochs(epochs):
            if skip is not None and batch.first // BATCH in skip:
                continue
            taken.append(batch.first // BATCH)
            step(batch)
            run.tick(every=every)
            if step.number >= steps:
                break
        if last:
            run.save()
    state = {name: value.clone() for name, value in full(model.state_dict()).items()}
    return state, taken, step.number


def full(state: dict[str, Any]) -> dict[str, Tensor]:
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}


def _die(run: shoal.Run, at: str) -> None:
    """Let SIGKILL end this process at a point of the next rollback."""

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if at == "restored":
        run.loader.leave_out = kill  # type: ignore[method-assign,assignment]
    elif at == "saved":
        run.files.checkpoints.remove_after = kill  # type: ignore[method-assign,assignment]
    else:
        run.files.checkpoints.remove_after = lambda step: setattr(run.loader, "_next", kill)  # type: ignore


def test_a_spike_is_above_the_median_by_robust_deviations() -> None:
    recent = [1.0, 1.1, 0.9, 1.2, 0.8]
    assert spike_limit(recent, 10.0) == pytest.approx(1.0 + 10 * 1.4826 * 0.1)
    assert spike_limit([*recent[:4], 1e9], 10.0) < 3.0  # one outlier changes little
    assert spike_limit([2.0] * 9, 10.0) == math.inf


def test_a_step_that_is_not_finite_is_skipped(world: shoal.World, tmp_path: Path) -> None:
    _, taken, steps = train(world, str(tmp_path), {6: math.nan}, shoal.BadSteps())
    assert taken == list(range(20))
    assert steps == 20
    (event,) = events_of(tmp_path, "bad_step")
    assert (event["step"], event["left_out"], event["reason"]) == (7, [[48, 56]], "a loss of nan")
    assert shoal.coverage(tmp_path) == (160, [], [], [(48, 56)])
    assert shoal.coverage(tmp_path).exact


def test_a_spike_is_skipped(world: shoal.World, tmp_path: Path) -> None:
    train(world, str(tmp_path), {15: 50.0}, shoal.BadSteps(window=10))
    (event,) = events_of(tmp_path, "bad_step")
    assert event["step"] == 16
    assert "the limit for the last 10" in event["reason"]


THREE = dict.fromkeys((9, 10, 11), math.nan)
ALL = [*range(12), 8, *range(12, 20)]
"""The batches of a run whose batches THREE are bad, and that saves after each 4th."""


def test_bad_steps_in_a_row_roll_back(world: shoal.World, tmp_path: Path) -> None:
    """The run ends as one that never had these batches."""
    model, taken, steps = train(world, str(tmp_path / "a"), THREE, shoal.BadSteps())
    assert taken == ALL
    assert steps == 17
    (event,) = events_of(tmp_path / "a", "rollback")
    assert (event["step"], event["restored"]) == (12, 8)
    assert shoal.coverage(tmp_path / "a") == (160, [], [], [(72, 96)])
    without, _, _ = train(world, str(tmp_path / "b"), {}, None, skip=(9, 10, 11))
    assert same(model, without)


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("at", ["restored", "saved", "continued"])
def test_a_kill_in_a_rollback(tmp_path: Path, at: str) -> None:
    """The next attempt on one process never trains the samples that were left out."""
    with Ranks(2) as ranks:
        killed = ranks.call_until_killed(
            partial(train, die=at), str(tmp_path / "a"), THREE, shoal.BadSteps()
        )
        assert killed is None
    with Ranks(2) as ranks:
        (model, taken, steps), _ = ranks.call(train, str(tmp_path / "a"), THREE, shoal.BadSteps())
        without, _ = ranks.call(partial(train, skip=(9, 10, 11)), str(tmp_path / "b"), {}, None)
    assert steps == 17
    again = [8, 9, 10, 11] if at == "restored" else []
    assert taken == [*again, 8, *range(12, 20)]
    assert shoal.coverage(tmp_path / "a") == (160, [], [], [(72, 96)])
    assert same(model, without[0])


def test_a_checkpoint_keeps_the_bad_steps_in_a_row(world: shoal.World, tmp_path: Path) -> None:
    """A run that is stopped among bad steps rolls back as one that was not."""
    whole, _, _ = train(world, str(tmp_path / "a"), THREE, shoal.BadSteps())
    train(world, str(tmp_path / "b"), THREE, shoal.BadSteps(), steps=11, last=True)
    assert (tmp_path / "b/checkpoints/step-11").is_dir()
    model, taken, _ = train(world, str(tmp_path / "b"), THREE, shoal.BadSteps(), steps=17)
    assert taken == [11, 8, *range(12, 20)]
    assert same(model, whole)
    assert shoal.coverage(tmp_path / "b") == (160, [], [], [(72, 96)])


@pytest.mark.full
def test_a_checkpoint_among_bad_steps_is_removed(world: shoal.World, tmp_path: Path) -> None:
    train(world, str(tmp_path), THREE, shoal.BadSteps(), steps=11, last=True)
    train(world, str(tmp_path), THREE, shoal.BadSteps(), steps=9)
    there = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert there == {"step-4", "step-8"}


def test_rollbacks_are_bounded(world: shoal.World, tmp_path: Path) -> None:
    bad = dict.fromkeys(range(9, 20), math.nan)
    with pytest.raises(shoal.StepError, match="was rolled back 2 times before"):
        train(world, str(tmp_path), bad, shoal.BadSteps(rollbacks=2))
    assert [event["restored"] for event in events_of(tmp_path, "rollback")] == [8, 8]
    with pytest.raises(shoal.StepError, match="was rolled back 2 times before"):
        train(world, str(tmp_path), bad, shoal.BadSteps(rollbacks=2))


def test_without_a_checkpoint_bad_steps_end_the_run(world: shoal.World, tmp_path: Path) -> None:
    with pytest.raises(shoal.StepError, match="no checkpoint from before these steps"):
        train(world, str(tmp_path), dict.fromkeys((1, 2, 3), math.inf), shoal.BadSteps())


@pytest.mark.full
def test_the_last_batches_of_an_epoch_are_left_out(world: shoal.World, tmp_path: Path) -> None:
    bad = dict.fromkeys((17, 18, 19), math.nan)
    _, taken, _ = train(world, str(tmp_path), bad, shoal.BadSteps(), epochs=2, steps=25)
    assert taken[:22] == [*range(20), 16, 20]
    assert shoal.coverage(tmp_path).left_out == [(136, 160)]


def test_arguments_out_of_range() -> None:
    values: list[Any] = [0, -1, 1.5, True, "3", math.nan, None]
    for name in ("patience", "threshold", "window", "rollbacks"):
        for value in values:
            if (name, value) not in (("rollbacks", 0), ("threshold", 1.5)):
                with pytest.raises(shoal.StepError, match=name):
                    shoal.BadSteps(**{name: value})


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("split", ["micro-batches", "fp16", "fsdp", "pipeline"])
def test_rollbacks_with_other_splits(two: Ranks, tmp_path: Path, split: str) -> None:
    layouts = {"fsdp": "shard=2", "pipeline": "pipeline=2"}
    two.divide(layouts.get(split, "replicate=2"))
    strategies = {"fsdp": shoal.FSDP(), "pipeline": shoal.Pipeline(split_points=("2",))}
    options: dict[str, Any] = {"strategy": strategies.get(split), "micro_batches": 2}
    if split == "fp16":
        options["precision"] = "fp16"
    found = two.call(partial(train, **options), str(tmp_path / "a"), THREE, shoal.BadSteps())
    without = two.call(partial(train, skip=(9, 10, 11), **options), str(tmp_path / "b"), {}, None)
    for (model, taken, steps), (other, *_) in zip(found, without, strict=True):
        assert (taken, steps) == (ALL, 17)
        assert same(model, other)
    assert shoal.coverage(tmp_path / "a") == (160, [], [], [(72, 96)])


@pytest.mark.processes
@pytest.mark.full
def test_the_bits_are_those_of_one_process(tmp_path: Path) -> None:
    bad = THREE | {15: 50.0}
    models = []
    for size in (1, 2):
        with Ranks(size, exact="bits") as ranks:
            options = shoal.BadSteps(window=10)
            (model, *_), *_ = ranks.call(train, str(tmp_path / str(size)), bad, options)
            models.append(model)
    assert same(*models)
    steps = [[event["step"] for event in events_of(tmp_path / size, "bad_step")] for size in "12"]
    assert steps == [[10, 11, 12, 13], [10, 11, 12, 13]]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*samples(THREE), strict=True)


@pytest.mark.full
def test_a_stream_leaves_batches_out(world: shoal.World, tmp_path: Path) -> None:
    _, taken, _ = train(world, str(tmp_path), THREE, shoal.BadSteps(), dataset=Stream())
    assert taken == ALL
    assert shoal.coverage(tmp_path) == (160, [], [], [(72, 96)])


def test_another_batch_size_can_not_leave_out_parts() -> None:
    left_out = [LeftOutBatch(8, 16, False), LeftOutBatch(16, 24, False)]
    assert [is_left_out(left_out, first, 8) for first in (0, 8, 16, 24)] == [False, True, True, False]
    assert is_left_out(left_out, 8, 16)
    with pytest.raises(shoal.DataError, match="leaves out 4 of its 8 samples"):
        is_left_out(left_out, 20, 8)


def test_where_no_step_can_be_skipped(world: shoal.World, tmp_path: Path) -> None:
    guards = shoal.Guards(bad_steps=shoal.BadSteps())
    model = shoal.parallelize(nn.Linear(4, 2), world)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = shoal.Loader(samples({}), world, batch_size=BATCH)
    with pytest.raises(shoal.StepError, match="Shoal can't skip or repeat them"):
        shoal.Run(tmp_path / "a", model, loader, optimizer=optimizer, guards=guards)
    late = shoal.Step(model, optimizer, shoal.Task(squared_error), result="late")
    with pytest.raises(shoal.StepError, match="each step must wait for its result"):
        shoal.Run(tmp_path / "b", late, loader, guards=guards)
    alone = shoal.parallelize(nn.Linear(4, 2), world, shoal.LocalSGD(sync_every=2))
    step = shoal.Step(alone, torch.optim.SGD(alone.parameters(), lr=0.1), shoal.Task(squared_error))
    with pytest.raises(shoal.StepError, match="take their steps separately"):
        shoal.Run(
            tmp_path / "c",
            step,
            loader,
            guards=shoal.Guards(continuity=False, replicas=False, bad_steps=guards.bad_steps),
        )
    with pytest.raises(shoal.StepError, match=r"not a shoal\.BadSteps"):
        shoal.Guards(bad_steps=True)  # type: ignore[arg-type]

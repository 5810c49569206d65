from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import shoal
from helpers.ranks import Ranks
from helpers.small_training import squares
from shoal.training.schedule import LRSchedule
from shoal.util.errors import StepError


def rates(schedule: LRSchedule, total: int, steps: int) -> list[float]:
    """The learning rates that an optimizer with a rate of 2 sees."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = schedule(optimizer, total)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LRSchedule(decay="constant", warmup_steps=4), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        (LRSchedule(decay="linear", warmup_steps=2), [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
        (LRSchedule(decay="linear", min_ratio=0.5), [2.0, 2 - 1 / 6, 2 - 2 / 6, 1.5]),
        (LRSchedule(decay="constant", warmup_ratio=0.5), [2 / 3, 4 / 3, 2.0, 2.0]),
        (LRSchedule(decay="constant", warmup_ratio=0.4), [2 / 3, 4 / 3, 2.0, 2.0]),  # 2.4 steps
        (LRSchedule(warmup_steps=2), [1.0, 2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0]),
    ],
    ids=str,
)
def test_rates(schedule: LRSchedule, expected: list[float]) -> None:
    assert rates(schedule, 6, len(expected)) == pytest.approx(expected, abs=1e-12)


def test_a_schedule_resumes_where_it_was() -> None:
    made = []
    for _ in range(2):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
        made.append((optimizer, LRSchedule(warmup_steps=3)(optimizer, 10)))
    (optimizer, scheduler), (again, resumed) = made
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for expected in rates(LRSchedule(warmup_steps=3), 10, 10)[4:]:
        assert again.param_groups[0]["lr"] == expected
        again.step()
        resumed.step()


STEPS, RATIO = "warmup_steps is a number of optimizer steps", "warmup_ratio is a fraction of all"


def test_schedules_that_can_not_be() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"decay": "cosin"}, "decay is one of 'cosine', 'linear', 'constant'"),
        *(({"warmup_steps": steps}, STEPS) for steps in (-1, 2.5, True, "10", 0.1)),
        *(({"warmup_ratio": ratio}, RATIO) for ratio in (10, -0.1, float("nan"))),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, "both give the length of the warm-up"),
        ({"min_ratio": 2.0}, "min_ratio is a fraction of the learning rate"),
        ({"min_ratio": "0.1"}, "min_ratio is a fraction of the learning rate"),
    ]
    for options, found in rows:
        with pytest.raises(StepError, match=found) as caught:
            LRSchedule(**options)
        if options == {"warmup_steps": 0.1}:
            assert "Schedule(warmup_ratio=0.1)" in caught.value.fix


def test_the_steps_of_a_ratio_are_rounded_up() -> None:
    for ratio, total, steps in ((0.07, 100, 7), (0.1, 3, 1), (1.0, 5, 5)):
        schedule = LRSchedule(decay="constant", warmup_ratio=ratio)
        factors = [schedule.factor(step, total) for step in range(steps)]
        assert factors == [(step + 1) / steps for step in range(steps)], ratio


HALF = partial(lr_scheduler.ExponentialLR, gamma=0.5)
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "ExponentialLR": HALF,
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, 9
    ),
}


def one_after(optimizer: torch.optim.Optimizer, last: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), last(optimizer)], [3]
    )


def chained(optimizer: torch.optim.Optimizer, last: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(optimizer), one_after(optimizer, last)])


def step_with(
    world: shoal.World, schedule: Any, *, interval: str | None = None, **options: Any
) -> shoal.Step:
    """A Step with a rate of 1."""
    model = shoal.parallelize(nn.Linear(1, 1), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options |= {"schedule": schedule(optimizer), "schedule_interval": interval}
    return shoal.Step(model, optimizer, shoal.Task(squares), **options)


def loader_of(world: shoal.World, size: int = 4) -> shoal.Loader:
    """Three batches in an epoch, of which the last is smaller."""
    return shoal.Loader((torch.ones(10, 1),), world, batch_size=size)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("within", [None, one_after, chained, "several"])
def test_schedulers_whose_arguments_may_count_epochs_need_an_interval(
    world: shoal.World, name: str, within: Any
) -> None:
    def build(optimizer: torch.optim.Optimizer) -> Any:
        if within == "several":
            return [lr_scheduler.LinearLR(optimizer), SCHEDULERS[name](optimizer)]
        return within(optimizer, SCHEDULERS[name]) if within else SCHEDULERS[name](optimizer)

    with pytest.raises(StepError, match=f"schedule={name} without") as caught:
        step_with(world, build)
    assert "schedule_interval='epoch'" in caught.value.fix
    assert "schedule_interval='step'" in caught.value.fix
    step_with(world, build, interval="step")
    step_with(world, build, interval="epoch")


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9),
        lr_scheduler.LinearLR,
        lr_scheduler.ConstantLR,
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 1.0),
        lambda optimizer: LRSchedule(warmup_steps=2)(optimizer, 9),
    ],
)
def test_all_others_step_with_the_optimizer(
    world: shoal.World, build: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    step = step_with(world, build)
    step(next(loader_of(world).epochs(1)))
    assert step.schedule is not None
    assert step.schedule.last_epoch == 1
    assert "schedule" not in "".join(capfd.readouterr())


def test_another_interval_raises(world: shoal.World) -> None:
    with pytest.raises(StepError, match="one of None, 'step', 'epoch'") as raised:
        step_with(world, HALF, interval="epochs")
    assert raised.value.fix == "pass schedule_interval='epoch'"


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_schedule_that_the_script_steps_too(
    world: shoal.World, tmp_path: Path, interval: str
) -> None:
    step, data = step_with(world, HALF, interval=interval), loader_of(world)
    with shoal.Run(tmp_path / "run", step, data) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick()
        assert step.schedule is not None
        step.schedule.step()
        step(next(data.epochs(2)))
        with pytest.raises(StepError, match=r"the script has called schedule\.step\(\) 1 more times"):
            run.tick()


def test_a_schedule_of_two_steps(world: shoal.World, tmp_path: Path) -> None:
    step, data = step_with(world, HALF, interval="step"), loader_of(world)
    other = shoal.Step(
        step.model, step.optimizer, step.task, schedule=step.schedule, schedule_interval="step"
    )
    with shoal.Run(tmp_path / "run", step, data) as run:
        for batch in data.epochs(2):
            step(batch)
            other(batch)
            run.tick()


def rates_by_epoch(world: shoal.World) -> list[float]:
    """The rate after each step of two epochs."""
    step, seen = step_with(world, HALF, interval="epoch"), []
    for batch in loader_of(world).epochs(2):
        step(batch)
        seen.append(step.optimizer.param_groups[0]["lr"])
    return seen


BY_EPOCH = [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_a_schedule_by_epoch_steps_after_the_last_batch(world: shoal.World) -> None:
    assert rates_by_epoch(world) == BY_EPOCH


def test_an_epoch_also_ends_with_a_step_that_was_skipped(world: shoal.World) -> None:
    step = step_with(world, HALF, interval="epoch", precision="fp16")
    assert step._scale is not None
    skipped = []
    for batch in loader_of(world).epochs(1):
        step._scale.value = 2.0**127 if batch.ends_epoch else 1.0
        skipped.append(step(batch).skipped)
    assert skipped == [False, False, True]
    assert step.optimizer.param_groups[0]["lr"] == 0.5


def test_a_late_step_that_is_taken_back_takes_the_end_of_the_epoch_back(world: shoal.World) -> None:
    model = shoal.parallelize(nn.Linear(1, 1), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    options: dict[str, Any] = {"schedule": HALF(optimizer), "schedule_interval": "epoch"}
    step = shoal.Step(model, optimizer, shoal.Task(squares), result="late", **options)
    values = torch.ones(10, 1)
    values[9] = math.nan
    loader = shoal.Loader((values,), world, batch_size=4, shuffle=False)
    batches = loader.epochs(2)
    for _ in range(3):
        step(next(batches))
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(StepError, match="seen late"):
        step(next(batches))
    assert (step.number, optimizer.param_groups[0]["lr"]) == (2, 1.0)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_schedule_by_epoch_resumes_exactly(world: shoal.World, tmp_path: Path, stop: int) -> None:
    seen = []
    for begins in (True, False):
        step, data = step_with(world, HALF, interval="epoch"), loader_of(world)
        with shoal.Run(tmp_path, step, data, trackers=()) as run:
            run.restore()
            for batch in data.epochs(2):
                step(batch)
                seen.append(step.optimizer.param_groups[0]["lr"])
                run.tick()
                if begins and step.number == stop:
                    break
            run.save()
    assert seen == BY_EPOCH


def test_train_counts_in_the_interval(world: shoal.World, tmp_path: Path) -> None:
    totals = []

    def schedule(optimizer: torch.optim.Optimizer, total: int) -> lr_scheduler.LRScheduler:
        totals.append(total)
        return HALF(optimizer)

    def train(directory: str, **options: Any) -> float:
        done = shoal.train(
            nn.Linear(1, 1),
            shoal.Task(squares),
            (torch.ones(10, 1),),
            directory=tmp_path / directory,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            batch_size=4,
            schedule=schedule,
            world=world,
            **options,
        )
        rate: float = done.step.optimizer.param_groups[0]["lr"]
        return rate

    with pytest.raises(StepError, match="schedule=ExponentialLR without"):
        train("a", epochs=2)
    assert train("b", epochs=2, schedule_interval="epoch") == 0.25
    assert train("c", steps=5, schedule_interval="epoch") == 0.5
    assert train("d", steps=5, schedule_interval="step") == 0.5**5
    assert totals == [6, 2, 2, 5]


@pytest.mark.processes
def test_ranks_follow_the_same_epochs(two: Ranks) -> None:
    for error in two.errors(StepError, step_with, HALF):
        assert "schedule_interval='epoch'" in error.fix
    assert two.call(rates_by_epoch) == [BY_EPOCH] * 2

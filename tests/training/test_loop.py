"""The loop given: what it trains, keeps, stops at and resumes, on one process and several."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import shoal
from helpers.clocks import ManualClock
from helpers.ranks import Ranks
from helpers.small_training import cross_entropy, events_of, saved
from shoal.distributed.deadline import Deadline
from shoal.training.early_stopping import EarlyStoppingState
from shoal.util.errors import CheckpointError, StepError

pytestmark = pytest.mark.processes

SAMPLES, BATCH = 40, 8  # five steps an epoch


def dataset(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return inputs, (inputs.sum(1) > 0).long()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(directory: Path, **options: Any) -> shoal.TrainResult:
    given: dict[str, Any] = {
        "directory": directory,
        "optimizer": adam,
        "batch_size": BATCH,
        "epochs": 2,
    }
    return shoal.train(net, shoal.Task(cross_entropy), dataset(), **(given | options))


def by_hand(world: shoal.World, directory: Path) -> list[Tensor]:
    """The same as `train(directory, clip=…, schedule=…)`, from the public parts."""
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(net(), world)
    optimizer = adam(model)
    schedule = shoal.LRSchedule(warmup_steps=3)(optimizer, 10)
    step = shoal.Step(model, optimizer, shoal.Task(cross_entropy), clip=0.5, schedule=schedule)
    data = shoal.Loader(dataset(), world, batch_size=BATCH)
    with shoal.Run(directory, step, data) as run:
        for batch in data.epochs(2):
            step(batch)
            run.tick()
    return [p.detach().clone() for p in model.parameters()]


def through_train(world: shoal.World, directory: Path) -> tuple[list[Tensor], float]:
    world.reseed("weights", by_rank=False)
    schedule = shoal.LRSchedule(warmup_steps=3)
    done = train(directory, world=world, clip=0.5, schedule=schedule)
    return [p.detach().clone() for p in done.model.parameters()], adam_rate(done)


def adam_rate(done: shoal.TrainResult) -> float:
    return float(done.step.optimizer.param_groups[0]["lr"])


@pytest.mark.full
def test_it_is_the_loop_made_by_hand_bit_for_bit(two: Ranks, tmp_path: Path) -> None:
    hand = two.call(by_hand, tmp_path / "hand")
    for ours, (theirs, rate) in zip(hand, two.call(through_train, tmp_path / "given"), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        assert rate == pytest.approx(0, abs=1e-12)  # the schedule has ended: 10 steps, not 5


def test_a_dry_run_is_the_beginning_of_the_run(tmp_path: Path) -> None:
    validation = shoal.Validation(
        dataset=dataset(1),
        every=3,
        monitor="accuracy",
        mode="max",
        metrics={"accuracy": shoal.Accuracy()},
        patience=50,
    )
    options: dict[str, Any] = {
        "schedule": shoal.LRSchedule(warmup_steps=2),
        "validation": validation,
        "ema": 0.5,
    }
    dry = train(tmp_path / "a", steps=2, **options)
    assert (dry.reason, dry.step.number) == ("steps", 2)
    resumed = train(tmp_path / "a", **options)
    whole = train(tmp_path / "b", **options)
    assert (resumed.reason, whole.reason) == ("epochs", "epochs")
    assert resumed.metrics == whole.metrics
    assert resumed.best == whole.best
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.ema is not None
    assert whole.ema is not None
    averages = (done.ema.state_dict()["averages"] for done in (resumed, whole) if done.ema)
    assert all(torch.equal(a, b) for a, b in zip(*(each.values() for each in averages), strict=True))
    done = train(tmp_path / "a", **options)
    assert (done.reason, done.step.number) == ("epochs", 10)


def test_evaluations_come_when_asked_and_are_recorded(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def callback(moment: shoal.TrainingStatus) -> None:
        assert moment.result is not None
        seen.append((moment.kind, moment.run.step))

    train(tmp_path, validation=shoal.Validation(dataset=dataset(1)), callbacks=[callback])
    steps = [("step", number) for number in range(1, 11)]
    assert seen == [*steps[:5], ("evaluation", 5), *steps[5:], ("evaluation", 10), ("end", 10)]
    found = events_of(tmp_path, "evaluation")
    assert [event["step"] for event in found] == [5, 10]
    assert all(event["samples"] == SAMPLES for event in found)


def nothing_is_counted(output: Tensor, target: Tensor) -> tuple[float, float]:
    return 0.0, 0.0


def huge(output: Tensor, target: Tensor) -> tuple[float, float]:
    return math.inf, 1.0


def test_a_finished_run_still_knows_its_last_evaluation(tmp_path: Path) -> None:
    validation = shoal.Validation(
        dataset=dataset(1),
        every=4,
        metrics={
            "accuracy": shoal.Accuracy(),
            "nothing": nothing_is_counted,
            "huge": huge,
            "by class": torchmetrics.Recall(task="multiclass", num_classes=2, average="none"),
        },
    )
    seen: list[dict[str, Any]] = []
    for _ in range(2):  # the second time there is nothing left to do
        done = train(tmp_path, validation=validation, callbacks=[lambda m: seen.append({**m.metrics})])
        classes = done.metrics["by class"]
        assert isinstance(classes, Tensor)
        seen.append({**done.metrics, "by class": classes.tolist()})
    trained, again = seen[-3], seen[-1]
    assert math.isnan(again["nothing"])
    assert again["huge"] == math.inf
    assert again.keys() == {"loss", "samples", "accuracy", "nothing", "huge", "by class"}
    assert str(again) == str(trained)  # to the last digit, and NaN equals NaN
    assert str(events_of(tmp_path, "evaluation")[-1]["loss"]) == str(again["loss"])


def test_the_line_knows_where_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, steps=7)
    train(tmp_path)
    first, second = capsys.readouterr().out.split("resumed at sample 56")
    assert "100 % · step 7 · epoch 1.40/1.4 · " in first
    assert "80.0 % · step 8 · epoch 1.60/2 · " in second
    assert "100 % · step 10 · epoch 2.00/2 · " in second


def test_the_best_is_kept_apart(tmp_path: Path) -> None:
    worse = shoal.Validation(dataset=dataset(1), every=1, mode="max")  # the first is the best
    done = train(tmp_path, validation=worse, keep=1)
    first = events_of(tmp_path, "evaluation")[0]
    assert done.best == first["loss"]
    assert saved(tmp_path, "best") == [1]
    assert saved(tmp_path) == [10]


def test_averaged_parameters_are_what_is_evaluated(world: shoal.World, tmp_path: Path) -> None:
    validation = shoal.Validation(dataset=dataset(1), every=10)
    done = train(tmp_path, world=world, validation=validation, ema=0.9)
    assert done.ema is not None
    with done.ema.applied():
        assert shoal.evaluate(done.step, dataset(1))["loss"] == done.metrics["loss"]
    assert shoal.evaluate(done.step, dataset(1))["loss"] != done.metrics["loss"]


def test_patience_ends_it_and_it_stays_ended(tmp_path: Path) -> None:
    for _ in range(2):
        validation = shoal.Validation(dataset=dataset(1), every=1, mode="max", patience=3)
        done = train(tmp_path, validation=validation)
        assert (done.reason, done.step.number) == ("patience", 4)


class ByRank:
    """A metric that is another number on each rank, as a local one of a careless user would be."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0

    def __call__(self, moment: shoal.TrainingStatus) -> bool:
        self.calls += moment.kind == "evaluation"
        return self.rank == 1 and self.calls == 2


def stopped(world: shoal.World, directory: Path) -> tuple[str, int]:
    world.reseed("weights", by_rank=False)
    validation = shoal.Validation(dataset=dataset(1), every=2)
    done = train(directory, world=world, validation=validation, callbacks=[ByRank(world.rank)])
    return done.reason, done.step.number


@pytest.mark.full
def test_one_rank_may_end_it_for_all(two: Ranks, tmp_path: Path) -> None:
    assert two.call(stopped, tmp_path) == [("callback", 4)] * 2


class Private(torchmetrics.Metric):
    """Another number on each rank, as a validation loss computed without the others would be."""

    def __init__(self, numbers: Callable[[], float]) -> None:
        super().__init__()
        self.numbers = numbers

    def update(self, output: Tensor, target: Tensor) -> None:
        pass

    def compute(self) -> float:
        return self.numbers()


class Numbers:
    """The step, growing or falling; the same one for all copies of a metric."""

    def __init__(self, sign: int) -> None:
        self.sign = sign
        self.step = 0

    def __call__(self) -> float:
        return float(self.sign * self.step)

    def __deepcopy__(self, memo: object) -> Numbers:
        return self

    def follow(self, moment: shoal.TrainingStatus) -> None:
        self.step = moment.run.step


def apart(world: shoal.World, directory: Path, growing: int) -> tuple[Any, ...]:
    """Training whose metric grows on rank `growing` and falls on the other."""
    world.reseed("weights", by_rank=False)
    numbers = Numbers(1 if world.rank == growing else -1)
    validation = shoal.Validation(
        dataset=dataset(1),
        every=2,
        metrics={"own": Private(numbers)},
        monitor="own",
        mode="max",
        patience=2,
    )
    done = train(directory, world=world, validation=validation, callbacks=[numbers.follow])
    world.barrier()
    kept = [path.name for path in (directory / "best").iterdir()]
    return done.reason, done.step.number, done.best, kept, done.metrics["own"]


@pytest.mark.full
def test_ranks_that_see_other_metrics_stop_and_keep_the_same(two: Ranks, tmp_path: Path) -> None:
    """FAILURES 19: rank 0's number decides for all, whether it is the better or the worse one."""
    for growing, outcome in (
        (0, ("epochs", 10, 10.0, ["step-10"])),
        (1, ("patience", 6, -2.0, ["step-2"])),
    ):
        one, other = two.call(apart, tmp_path / str(growing), growing)
        assert one[:-1] == other[:-1] == outcome
        assert one[-1] == -other[-1] != 0


def in_time(world: shoal.World, directory: Path) -> tuple[str, int, list[int]]:
    done = train(directory, world=world, epochs=1000, max_time=1e-9)
    world.barrier()  # rank 0 removes old checkpoints after all have the new one
    return done.reason, done.step.number, saved(directory)


def test_time_ends_it_on_all_ranks_with_a_checkpoint(two: Ranks, tmp_path: Path) -> None:
    one, other = two.call(in_time, tmp_path)
    reason, number, steps = one
    assert other == one
    assert reason == "max_time"
    assert 1 <= number < 5 * 1000
    assert number in steps


def test_the_clock_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    asked: list[float] = []
    with shoal.init() as world:

        def broadcast(answer: tuple[bool, int]) -> tuple[bool, int]:
            asked.append(clock.now())
            return answer

        monkeypatch.setattr(world, "broadcast", broadcast)
        deadline = Deadline(100.0, world, clock)
        while not deadline.over():
            clock.sleep(0.01)
    assert 100.0 <= clock.now() < 100.1
    assert len(asked) < 60


def test_what_can_not_be_evaluated_fails_before_the_first_step(tmp_path: Path) -> None:
    def broken(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        raise KeyError("broken")

    recall = torchmetrics.Recall(task="multiclass", num_classes=2, average="none")
    seen: list[shoal.TrainingStatus] = []
    for metric, monitor, kind, found in (
        (broken, "loss", KeyError, "broken"),
        (recall, "it", StepError, "its value is not one number: tensor"),
    ):
        validation = shoal.Validation(dataset=dataset(1), metrics={"it": metric}, monitor=monitor)
        with pytest.raises(kind, match=found):
            train(tmp_path, validation=validation, callbacks=[seen.append])
    assert seen == []


def test_the_best_by_one_metric_is_none_by_another(tmp_path: Path) -> None:
    train(tmp_path, epochs=1, validation=shoal.Validation(dataset=dataset(1), every=1))
    options: dict[str, Any] = {"every": 1, "metrics": {"accuracy": shoal.Accuracy()}}
    options |= {"dataset": dataset(1), "monitor": "accuracy"}
    done = train(tmp_path, validation=shoal.Validation(**options, mode="max"))
    lowest = train(tmp_path, epochs=3, validation=shoal.Validation(**options))
    events = events_of(tmp_path, "evaluation")
    scores = [event["accuracy"] for event in events if "accuracy" in event]
    assert len(scores) == 10
    assert done.best == max(scores[:5])
    assert lowest.best == min(scores[5:])


@pytest.mark.parametrize("answer", [np.bool_(True), torch.tensor(True)])
def test_what_a_comparison_says_ends_it_too(tmp_path: Path, answer: object) -> None:
    validation = shoal.Validation(dataset=dataset(1), every=2)
    done = train(tmp_path, validation=validation, callbacks=[lambda _: answer])
    assert (done.reason, done.step.number) == ("callback", 2)


def test_saving_every_zero_steps_is_refused_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the interval between saves") as caught:
        train(tmp_path, save=0)
    assert caught.value.given == "shoal.train(…, save=0)"
    assert not list(tmp_path.iterdir())


def test_what_is_better() -> None:
    for values, mode, best in (
        ([3.0, 1.0, 2.0], "min", [True, True, False]),
        ([3.0, 4.0, 4.0], "max", [True, True, False]),
        ([math.nan, 4.0, math.nan], "max", [False, True, False]),
    ):
        verdict = EarlyStoppingState(shoal.Validation(dataset=None, mode=mode))
        assert [verdict.add(value, {}, {}) for value in values] == best


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda path: train(path, epochs=None), "neither epochs nor steps"),
        (lambda path: train(path, max_time=0.0), "a number above 0"),
        (lambda path: shoal.Validation(dataset=None, monitor="f1"), "the metrics are loss"),
        (lambda path: shoal.Validation(dataset=None, patience=0), "1 or more"),
        (lambda path: shoal.Validation(dataset=None, every=0), "1 or more"),
    ],
)
def test_loops_that_can_not_be(call: Callable[[Path], Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(StepError, match=found):
        call(tmp_path)


@pytest.mark.parametrize("own", [False, True])
def test_an_evaluation_collates_as_training_does(tmp_path: Path, own: bool) -> None:
    calls = []

    def joined(samples: list[Any], name: str = "train") -> tuple[Tensor, Tensor]:
        calls.append(name)
        inputs, labels = zip(*samples, strict=True)
        return torch.stack(inputs), torch.stack(labels)

    validation = shoal.Validation(
        dataset=list(zip(*dataset(1), strict=True)),
        collate_fn=partial(joined, name="evaluation") if own else None,
        metrics={"accuracy": shoal.Accuracy()},
        outputs=lambda output: output,
    )
    train(tmp_path, epochs=1, collate_fn=joined, validation=validation)
    assert set(calls) == ({"train", "evaluation"} if own else {"train"})
    assert calls[0] == ("evaluation" if own else "train")  # the first evaluation is tried at the start

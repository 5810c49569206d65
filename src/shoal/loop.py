"""The loop given: training with evaluation, best checkpoint and early stopping, from public parts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.data import Loader
from shoal.ema import EMA
from shoal.engine import Strategy
from shoal.errors import StepError
from shoal.evaluation import evaluate as evaluate_on
from shoal.layout import Layout
from shoal.parallel import parallelize
from shoal.run import Run
from shoal.step import Result, Step
from shoal.task import Task
from shoal.world import World, init, random_state, set_random_state

CHECK_SECONDS = 5.0
"""How often, at most, ranks agree on whether the time is over."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """On what a training run is evaluated, when, and what follows from it.

    `every` counts optimizer steps; without it, evaluation comes at the end of each epoch. `best` names
    the metric by which checkpoints are compared, `higher` says which way; the best one is kept in
    `best/` of the run directory. After `patience` evaluations without a better one training stops.
    The rest is as for `shoal.evaluate`.
    """

    dataset: Any
    every: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    targets: Callable[[Any], Any] | None = None
    batch_size: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    best: str = "loss"
    higher: bool = False
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.best != "loss" and self.best not in self.metrics:
            raise StepError(
                given=f"Evaluation(best={self.best!r})",
                found=f"the metrics are {', '.join(('loss', *self.metrics))}",
                fix="best='loss', or the name of a metric, with higher=True where more is better",
            )
        for name, value in (("every", self.every), ("patience", self.patience)):
            if value is not None and value < 1:
                raise StepError(
                    given=f"Evaluation({name}={value})",
                    found="it is a number of 1 or more",
                    fix=f"leave {name} out, or give a positive number",
                )


class Moment(NamedTuple):
    """What a callback is told: after each step, each evaluation, and at the end.

    `kind` is "step", "evaluation" or "end". `result` is the step's, `metrics` the last evaluation's.
    """

    kind: str
    run: Run
    model: nn.Module
    result: Result | None
    metrics: Mapping[str, Any]


class Trained(NamedTuple):
    """How a training run ended: `reason` is "epochs", "steps", "patience", "max_time" or "callback".

    `metrics` are those of the last evaluation, `best` is the value of the metric compared, and `ema`
    holds the averaged parameters if they were asked for.
    """

    model: nn.Module
    step: Step
    metrics: Mapping[str, Any]
    best: float | None
    ema: EMA | None
    reason: str


def train(
    model: nn.Module | Callable[[], nn.Module],
    task: Task,
    dataset: Any,
    *,
    directory: str | Path,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    schedule: Callable[[torch.optim.Optimizer, int], LRScheduler] | None = None,
    micro_batches: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    precision: str = "fp32",
    clip: float | None = None,
    compile: str | None = None,
    parallel: Strategy | None = None,
    layout: str | Layout = "replicate=-1",
    seed: int = 0,
    world: World | None = None,
    evaluate: Evaluation | None = None,
    save: int | None = None,
    keep: int = 3,
    ema: float | None = None,
    callbacks: Sequence[Callable[[Moment], object]] = (),
    max_time: float | None = None,
) -> Trained:
    """Train `model` on `dataset` for `epochs` or `steps`, going on where `directory` ends. Collective.

    `model` is a module, or what makes one: it is then called with the random streams of `seed`, the
    same on all ranks. `optimizer` makes the optimizer from the parallelized model. `batch_size` is
    global. `schedule(optimizer, total)` makes a torch scheduler over all optimizer steps: a
    `shoal.Schedule`. `save` is how many steps lie between checkpoints (an epoch unless given); there is
    always one at the end. `ema` is the decay of averaged parameters, which are then evaluated.
    `max_time` ends training, with a checkpoint, after so many seconds. Where both `epochs` and `steps`
    are given the schedule spans the epochs and the steps end the run: `steps=2` is a dry run.

    Callbacks are called on all ranks; one that returns True at an evaluation, on any rank, ends
    training. Before the first step one batch of the evaluation is tried, so that what can't be
    evaluated fails early. Built from Loader, Step, Run and evaluate alone, whose errors it passes on.
    """
    if epochs is None and steps is None:
        raise StepError(
            given="shoal.train(…) without an end",
            found="neither epochs nor steps",
            fix="epochs=10, or steps=10_000",
        )
    with ExitStack() as stack:
        if world is None:
            world = stack.enter_context(init(layout=layout, seed=seed))
        made = model if isinstance(model, nn.Module) else model()
        made = parallelize(made, world, parallel)
        loader = Loader(
            dataset,
            world,
            batch_size=batch_size,
            micro_batches=micro_batches,
            collate_fn=collate_fn,
            num_workers=num_workers,
        )
        chosen = optimizer(made)
        total = len(loader) * epochs if epochs is not None else steps or 0
        rates = schedule and schedule(chosen, total)
        step = Step(made, chosen, task, precision=precision, clip=clip, compile=compile, schedule=rates)
        average = None if ema is None else EMA(made, decay=ema)
        verdict = Verdict(evaluate)
        state: dict[str, Any] = {"verdict": verdict} | ({} if average is None else {"ema": average})
        run = stack.enter_context(Run(directory, step, loader, state=state, keep=keep))
        run.restore()
        loop = _Loop(run, step, average, verdict, callbacks, Deadline(max_time, world))
        reason = loop.train(epochs, steps, save=save)
        run.save()
        loop.tell("end")
        return Trained(made, step, loop.metrics, verdict.best, average, reason)


class Verdict:
    """The best evaluation so far, how many have passed since, and what follows."""

    def __init__(self, evaluation: Evaluation | None) -> None:
        self.evaluation = evaluation
        self.best: float | None = None
        self.since = 0

    def add(self, value: float) -> bool:
        """Take the next value; whether it is the best so far. NaN never is."""
        better = not math.isnan(value) and (
            self.best is None or (value > self.best if self._higher else value < self.best)
        )
        self.since = 0 if better else self.since + 1
        if better:
            self.best = value
        return better

    @property
    def _higher(self) -> bool:
        return self.evaluation is not None and self.evaluation.higher

    @property
    def impatient(self) -> bool:
        """Whether training should stop for want of a better one."""
        patience = None if self.evaluation is None else self.evaluation.patience
        return patience is not None and self.since >= patience

    def state_dict(self) -> dict[str, Any]:
        """The best value and the evaluations since."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.best, self.since = state["best"], state["since"]


class Deadline:
    """Ends a run in time on all ranks at the same step, without a collective in every step.

    Rank 0 looks at its clock; when it does, it also says at which step it will look again: after as
    many as fit into CHECK_SECONDS, or into what is left. All ranks count the same steps.
    """

    def __init__(self, seconds: float | None, world: World) -> None:
        if seconds is not None and not seconds > 0:
            raise StepError(
                given=f"max_time={seconds}",
                found="the time is a positive number of seconds",
                fix="max_time=3600.0, or leave it out",
            )
        self._seconds = seconds
        self._world = world
        self._begun = self._looked = time.monotonic()
        self._steps = 0
        self._at, self._next = 0, 1

    def over(self) -> bool:
        """Whether to stop after this step. Collective at the steps agreed on."""
        self._steps += 1
        if self._seconds is None or self._steps < self._next:
            return False
        stop, self._next = self._world.broadcast(self._look(time.monotonic()))
        return bool(stop)

    def _look(self, now: float) -> tuple[bool, int]:
        left = (self._seconds or 0.0) - (now - self._begun)
        timed = self._steps - self._at
        each = (now - self._looked) / timed
        self._looked, self._at = now, self._steps
        # Half of what is left, and no more than twice the steps just timed: steps may grow slower.
        fit = int(min(CHECK_SECONDS, left / 2) / max(each, 1e-6))
        return left <= 0, self._steps + max(1, min(fit, 2 * timed))


class _Loop:
    def __init__(
        self,
        run: Run,
        step: Step,
        ema: EMA | None,
        verdict: Verdict,
        callbacks: Sequence[Callable[[Moment], object]],
        deadline: Deadline,
    ) -> None:
        self.run = run
        self.step = step
        self.ema = ema
        self.verdict = verdict
        self.callbacks = callbacks
        self.deadline = deadline
        self.metrics: Mapping[str, Any] = {}

    def train(self, epochs: int | None, steps: int | None, *, save: int | None) -> str:
        """Run up to the end; which end it was."""
        loader, evaluation = self.run.loader, self.verdict.evaluation
        if self.verdict.impatient:
            return "patience"
        if steps is not None and self.step.number >= steps:
            return "steps"
        if evaluation is not None:
            self._try_out(evaluation)
        epoch = loader.epoch
        for batch in loader.epochs(10**12 if epochs is None else epochs):
            result = self.step(batch)
            if self.ema is not None and not result.skipped:
                self.ema.update()
            self.tell("step")
            ended, epoch = loader.epoch != epoch, loader.epoch
            stop = None
            every = None if evaluation is None else evaluation.every
            if evaluation is not None and (self.step.number % every == 0 if every else ended):
                stop = self._evaluate(evaluation)
            self.run.tick(every=save)
            if save is None and ended:
                self.run.save()
            if stop is None and self.deadline.over():
                stop = "max_time"
            if stop is None and steps is not None and self.step.number >= steps:
                stop = "steps"
            if stop is not None:
                return stop
        return "epochs"

    def tell(self, kind: str) -> list[object]:
        """Call the callbacks; what they returned."""
        moment = Moment(kind, self.run, self.step.model, self.step.last, self.metrics)
        return [callback(moment) for callback in self.callbacks]

    def _evaluate(self, evaluation: Evaluation) -> str | None:
        with self.ema.applied() if self.ema is not None else nullcontext():
            self.metrics = self._measure(evaluation)
        self.run.note("evaluation", self.metrics)
        shown = ", ".join(
            f"{name} {value:.4g}" for name, value in self.metrics.items() if isinstance(value, float)
        )
        self.run.world.say(f"step {self.step.number:,}: {shown}")
        # Rank 0 decides for all: a metric may differ in its last bit between ranks.
        value = self.run.world.broadcast(float(self.metrics[evaluation.best]))
        if self.verdict.add(value):
            self.run.save(to="best")
        if any(self.run.world.gather(any(answer is True for answer in self.tell("evaluation")))):
            return "callback"
        return "patience" if self.verdict.impatient else None

    def _measure(self, evaluation: Evaluation, batches: int | None = None) -> dict[str, Any]:
        return evaluate_on(
            self.step,
            evaluation.dataset,
            metrics=evaluation.metrics,
            targets=evaluation.targets,
            batch_size=evaluation.batch_size,
            collate_fn=evaluation.collate_fn,
            num_workers=evaluation.num_workers,
            batches=batches,
        )

    def _try_out(self, evaluation: Evaluation) -> None:
        kept = random_state()
        self._measure(evaluation, batches=1)
        set_random_state(kept)

"""`shoal.train`: the training loop with validation, best checkpoint and early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler as TorchSampler

from shoal.data import Loader
from shoal.data.orders import SampleOrder
from shoal.data.step_result import StepResult
from shoal.distributed.deadline import Deadline
from shoal.distributed.init import init
from shoal.distributed.layout import Layout
from shoal.distributed.seeds import random_state, set_random_state
from shoal.distributed.world import World
from shoal.strategies import parallelize
from shoal.strategies.contracts import ModelTransform, Strategy
from shoal.strategies.task import Task
from shoal.training.early_stopping import EarlyStoppingState, Validation, numbers
from shoal.training.ema import EMA
from shoal.training.evaluation import evaluate as evaluate_on
from shoal.training.run import Run
from shoal.training.save_policy import Every, check_every
from shoal.training.step import Step
from shoal.util.arguments import check_integer, check_number
from shoal.util.errors import StepError


class TrainingStatus(NamedTuple):
    """The argument of a callback, which Shoal calls after each step and evaluation, and at the end.

    Attributes:
        kind: "step", "evaluation" or "end".
        run: Run of the training.
        model: Parallelized model.
        result: StepResult of the last step; None before the first.
        metrics: Metrics of the last evaluation by name; empty before the first.

    Examples:
        A callback for `shoal.train(…, callbacks=[stop])`:

        >>> def stop(status):
        ...     return status.kind == "evaluation" and status.metrics["loss"] < 0.1
    """

    kind: str
    run: Run
    model: nn.Module
    result: StepResult | None
    metrics: Mapping[str, Any]


class TrainResult(NamedTuple):
    """The result of `shoal.train`.

    Attributes:
        model: Trained model, parallelized.
        step: Its Step; `step.number` is the number of optimizer steps.
        metrics: Metrics of the last evaluation by name; empty without validation.
        best: Best value of the monitored metric; None without validation.
        ema: The averaged parameters; None without `ema=`.
        reason: Cause of the end: "epochs", "steps", "patience", "max_time" or "callback".

    Examples:
        >>> shoal.TrainResult._fields
        ('model', 'step', 'metrics', 'best', 'ema', 'reason')
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
    optimizer: Callable[[nn.Module], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]],
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    schedule: Callable[[torch.optim.Optimizer, int], LRScheduler] | None = None,
    schedule_interval: str | None = None,
    micro_batches: int = 1,
    order: SampleOrder | TorchSampler[Any] | None = None,
    seed_transforms: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    precision: str = "fp32",
    clip: float | None = None,
    compile: str | None = None,
    strategy: Strategy | ModelTransform | Sequence[Strategy | ModelTransform] | None = None,
    layout: str | Layout = "replicate=-1",
    seed: int | None = None,
    world: World | None = None,
    validation: Validation | None = None,
    save: Every | None = None,
    checkpoints: str | Path | None = None,
    keep: int = 3,
    ema: float | None = None,
    callbacks: Sequence[Callable[[TrainingStatus], object]] = (),
    max_time: float | None = None,
) -> TrainResult:
    """Train a model on a dataset for `epochs` or `steps`, resuming from `directory`. Collective.

    With validation, Shoal evaluates one batch before the first step, so that errors in the validation
    appear early. A final checkpoint is saved at the end.

    Args:
        model: Module to train, or a function that returns one: Shoal calls it with the random streams
            of `seed`, the same on all ranks.
        task: Inputs and loss of the model.
        dataset: Training data; all kinds that a Loader takes.
        directory: Run directory. If it has checkpoints, training resumes from the latest complete one.
        optimizer: Function of the parallelized model that returns a torch optimizer, or a list of
            several.
        batch_size: Number of samples in a global batch, over all ranks and micro-batches.
        epochs: Number of epochs since the start of training. Required without `steps`. Default: None.
        steps: Number of optimizer steps since the start of training. With both, the schedule spans the
            epochs and the steps end the run: `steps=2` is a dry run. Default: None.
        schedule: Function `(optimizer, total)` that returns a torch scheduler, such as a
            `shoal.LRSchedule`; `total` is the number of optimizer steps, or of epochs with
            `schedule_interval="epoch"`. It is called for each of several optimizers. Default: None.
        schedule_interval: "step" or "epoch", as in Step. Default: None.
        micro_batches: Number of micro-batches in a local batch, for gradient accumulation. Default: 1.
        order: Replaces shuffling, as in Loader: a WeightedSampling, a torch Sampler or a SampleOrder.
            Default: None.
        seed_transforms: Seed the generators of `random`, NumPy and torch before each sample. Default:
            False.
        collate_fn: Function that makes a micro-batch from a list of samples. `None` takes torch's
            `default_collate`. Default: None.
        num_workers: Worker processes of each rank that load samples. Default: 0.
        precision: "fp32", "bf16" or "fp16", as in Step. Default: "fp32".
        clip: Largest norm of the gradients, above 0. `None` does not clip. Default: None.
        compile: "inductor" (torch.compile), "blocks" (each repeated block) or "script" (TorchScript).
            `None` does not compile. Default: None.
        strategy: One or several strategies for `shoal.parallelize`. `None` is DDP, or SingleProcess in
            a World of size 1. Default: None.
        layout: Degree of each axis of the device mesh, as in `shoal.init`; not with `world`.
            Default: "replicate=-1".
        seed: Seed of every random stream, as in `shoal.init`; not with `world`. Default: None.
        world: World to train in. `None` calls `shoal.init` and closes it at the end. Default: None.
        validation: Dataset and metrics to evaluate during training, with best checkpoint and early
            stopping. Default: None.
        save: Interval between saves, as in `Run.tick(every=…)`: optimizer steps, a timedelta or a
            YoungDaly. `None` saves after each epoch. Default: None.
        checkpoints: Another directory or a URL for the checkpoints, as in Run. Default: None.
        keep: Number of latest checkpoints to keep, 1 or more. Default: 3.
        ema: Decay of an EMA of the parameters, at least 0 and below 1; evaluations use the averaged
            parameters. `None` has no EMA. Default: None.
        callbacks: Functions that take a TrainingStatus, called on all ranks. If one returns True at
            an evaluation, on any rank, training ends. Default: ().
        max_time: Seconds after which training ends with a checkpoint, above 0. Default: None.

    Returns:
        The trained model, its Step, the metrics, the EMA and the reason of the end.

    Raises:
        StepError: If an argument has no valid value, or a loss or gradient is not finite.
        DataError: If the dataset and the options of the Loader do not fit.
        CheckpointError: If the run directory can't be written, or its checkpoints are of another model.
        SystemExit: After a save, if a signal on any rank requested a stop.

    Examples:
        >>> import tempfile
        >>> def loss(output, batch):
        ...     return torch.nn.functional.mse_loss(output, batch[1], reduction="sum"), len(output)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     result = shoal.train(
        ...         torch.nn.Linear(4, 1),
        ...         shoal.Task(loss),
        ...         (torch.ones(8, 4), torch.ones(8, 1)),
        ...         directory=directory,
        ...         optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ...         batch_size=4,
        ...         epochs=1,
        ...     )  # doctest: +ELLIPSIS
        50.0 % · step 1 · epoch 0.50/1 · loss ...
        100 % · step 2 · epoch 1.00/1 · loss ...
        >>> result.step.number, result.reason
        (2, 'epochs')
    """
    _check(epochs, steps, save, max_time, (optimizer, schedule, validation))
    _check_world(world, layout, seed)
    with ExitStack() as stack:
        if world is None:
            world = stack.enter_context(init(layout=layout, seed=seed))
        made = parallelize(model, world, strategy)
        loader = Loader(
            dataset,
            world,
            batch_size=batch_size,
            micro_batches=micro_batches,
            order=order,
            seed_transforms=seed_transforms,
            collate_fn=collate_fn,
            num_workers=num_workers,
        )
        chosen: Any = optimizer(made)
        total = _length(loader, epochs, steps, by_epoch=schedule_interval == "epoch")
        several = chosen if isinstance(chosen, list | tuple) else [chosen]
        rates = schedule and [schedule(each, total) for each in several]
        step = Step(
            made,
            chosen,
            task,
            precision=precision,
            clip=clip,
            compile=compile,
            schedule=rates,
            schedule_interval=schedule_interval,
        )
        average = None if ema is None else EMA(made, decay=ema)
        verdict = EarlyStoppingState(validation and validation.collating(collate_fn))
        state: dict[str, Any] = {"verdict": verdict} | ({} if average is None else {"ema": average})
        run = Run(directory, step, loader, state=state, checkpoints=checkpoints, keep=keep)
        stack.enter_context(run)
        loop = _Loop(run, step, average, verdict, callbacks, Deadline(max_time, world))
        return loop.run_to_end(epochs, steps, save=save)


def _length(loader: Loader, epochs: int | None, steps: int | None, *, by_epoch: bool) -> int:
    """Return the number of optimizer steps of a run, or that of its epochs."""
    if by_epoch:
        return epochs or math.ceil((steps or 0) / len(loader))
    return len(loader) * epochs if epochs else steps or 0


def _check_world(world: World | None, layout: str | Layout, seed: int | None) -> None:
    if world is not None and (layout != "replicate=-1" or seed is not None):
        raise StepError(
            given=f"shoal.train(…, layout={str(layout)!r}, seed={seed!r}, world=world)",
            found=f"the world has a layout and a seed already: {world.layout}, {world.seed}",
            fix=f"call shoal.init(layout={str(layout)!r}, seed={seed!r}), and leave both out of "
            "shoal.train",
        )


def _check(
    epochs: int | None,
    steps: int | None,
    save: Every | None,
    max_time: float | None,
    kinds: tuple[object, object, object],
) -> None:
    _check_kinds(*kinds)
    if epochs is None and steps is None:
        raise StepError(
            given="shoal.train(…) without an end",
            found="neither epochs nor steps",
            fix="pass epochs=10 or steps=10_000",
        )
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None:
            check_integer(StepError, "shoal.train", name, value, 1, usual=10)
    if save is not None:
        check_every(save, "shoal.train(…, save={})")
    if max_time is not None:
        check_number(StepError, "shoal.train", "max_time", max_time, above=True, usual=3600.0)


def _check_optimizer(optimizer: object) -> None:
    """Raise StepError for an optimizer, or a class of optimizers, in place of a function."""
    if callable(optimizer) and not isinstance(optimizer, type):
        return
    name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    given = f"{name}{'' if isinstance(optimizer, type) else '(…)'}"
    made = f"torch.optim.{name}(model.parameters(), lr=0.1)"
    if isinstance(optimizer, list | tuple):
        given, made = "[…]", "[torch.optim.Muon(…), torch.optim.AdamW(…)]"
    raise StepError(
        given=f"shoal.train(…, optimizer={given})",
        found="optimizer is a function of the parallelized model that returns an optimizer",
        fix=f"optimizer=lambda model: {made}",
    )


def _check_kinds(optimizer: object, schedule: object, validation: object) -> None:
    """Raise StepError for an optimizer, a schedule or a validation of another kind."""
    _check_optimizer(optimizer)
    if schedule is not None and not callable(schedule):
        raise StepError(
            given=f"shoal.train(…, schedule={type(schedule).__name__})",
            found="schedule is a function of an optimizer and a number of steps",
            fix="schedule=shoal.LRSchedule(warmup_steps=100)",
        )
    if validation is not None and not isinstance(validation, Validation):
        raise StepError(
            given=f"shoal.train(…, validation={type(validation).__name__})",
            found="it is not a shoal.Validation",
            fix="validation=shoal.Validation(dataset=data)",
        )


class _Loop:
    def __init__(
        self,
        run: Run,
        step: Step,
        ema: EMA | None,
        verdict: EarlyStoppingState,
        callbacks: Sequence[Callable[[TrainingStatus], object]],
        deadline: Deadline,
    ) -> None:
        self.run = run
        self.step = step
        self.ema = ema
        self.verdict = verdict
        self.callbacks = callbacks
        self.deadline = deadline

    def run_to_end(self, epochs: int | None, steps: int | None, *, save: Every | None) -> TrainResult:
        """Restore, train, save, and return the result."""
        self.run.restore()
        reason = self.train(epochs, steps, save=save)
        self.run.save()
        self.tell("end")
        model, best = self.step.model, self.verdict.best
        return TrainResult(model, self.step, self.verdict.metrics, best, self.ema, reason)

    def train(self, epochs: int | None, steps: int | None, *, save: Every | None) -> str:
        """Run up to the end; return its reason."""
        loader, evaluation = self.run.loader, self.verdict.evaluation
        if self.verdict.impatient:
            return "patience"
        if steps is not None and self.step.number >= steps:
            return "steps"
        if evaluation is not None:
            self._try_out(evaluation)
        batches = loader.epochs(10**12 if epochs is None else epochs)
        if steps is not None:
            end = loader.after(steps - self.step.number)
            loader.goal = end if loader.goal is None else min(end, loader.goal)
        for batch in batches:
            result = self.step(batch)
            if self.ema is not None and not result.skipped:
                self.ema.update()
            self.tell("step")
            stop = None
            every = None if evaluation is None else evaluation.every
            if evaluation is not None and (
                self.step.number % every == 0 if every else batch.ends_epoch
            ):
                stop = self._evaluate(evaluation)
            self.run.tick(every=save)
            if save is None and batch.ends_epoch:
                self.run.save(wait=False)
            if stop is None and self.deadline.over():
                stop = "max_time"
            if stop is None and steps is not None and self.step.number >= steps:
                stop = "steps"
            if stop is not None:
                return stop
        return "epochs"

    def tell(self, kind: str) -> list[object]:
        """Call the callbacks; return their results."""
        moment = TrainingStatus(kind, self.run, self.step.model, self.step.last, self.verdict.metrics)
        return [callback(moment) for callback in self.callbacks]

    def _evaluate(self, evaluation: Validation) -> str | None:
        with self.ema.applied() if self.ema is not None else nullcontext():
            metrics = self._measure(evaluation)
        self.run.note("evaluation", metrics)
        shown = ", ".join(
            f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, float)
        )
        self.run.world.print(f"validation at step {self.step.number:,}: {shown}")
        # Rank 0 decides for all: a metric may differ in its last bit between ranks.
        value, kept = self.run.world.broadcast((evaluation.compared(metrics), numbers(metrics)))
        if self.verdict.add(value, metrics, kept):
            self.run.save(to="best", wait=False)
        if any(self.run.world.gather(any(map(_is_true, self.tell("evaluation"))))):
            return "callback"
        return "patience" if self.verdict.impatient else None

    def _measure(self, evaluation: Validation, batches: int | None = None) -> dict[str, Any]:
        return evaluate_on(
            self.step,
            evaluation.dataset,
            metrics=evaluation.metrics,
            targets=evaluation.targets,
            outputs=evaluation.outputs,
            batch_size=evaluation.batch_size,
            collate_fn=evaluation.collate_fn,
            num_workers=evaluation.num_workers,
            batches=batches,
        )

    def _try_out(self, evaluation: Validation) -> None:
        kept = random_state()
        evaluation.compared(self._measure(evaluation, batches=1))
        set_random_state(kept)


def _is_true(answer: object) -> bool:
    """Return whether a callback returned True: a bool of Python, NumPy or torch."""
    if isinstance(answer, Tensor):
        return answer.dtype == torch.bool and answer.numel() == 1 and bool(answer)
    return isinstance(answer, bool | np.bool_) and bool(answer)

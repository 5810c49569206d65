"""One optimizer step: precision, scaling, correction by the true count, clipping, update, schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.batch import Batch, not_finite
from shoal.coupled import say_division
from shoal.engine import Correction, OpenEngine, check_clip, correct
from shoal.errors import CheckpointError, StepError
from shoal.names import (
    check_model,
    check_optimizer,
    members,
    named,
    numbered,
    parameter_names,
    restored,
    shapes,
    storable,
)
from shoal.parallel import engine_of
from shoal.sameness import check_same_environment
from shoal.shares import divided
from shoal.task import Micro, Task
from shoal.timeline import CHECKPOINT, FORWARD
from shoal.trial import check_loss_adds_up

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILERS = ("inductor", "script")


class Result(NamedTuple):
    """What one step came to, the same on all ranks; times in seconds on this rank.

    Of this rank's share alone where the strategy is asynchronous. `loss` is the mean over the global
    batch, `norm` the gradient norm before clipping. A step whose fp16 gradients overflowed is
    `skipped`: the parameters did not change. `forward`, `backward` and `update` are without
    `communication`, for which the rank waited in them; by the clock of the host, so on CUDA that is
    how long it took to queue them, and to wait for the loss.
    """

    loss: float
    norm: float
    counted: float
    skipped: bool
    forward: float
    backward: float
    update: float
    communication: float = 0.0


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018), with torch.amp.GradScaler's policy.

    GradScaler decides on the device for each optimizer alone; here all ranks decide from the one
    norm that the step computes anyway, so scaling costs no further pass over the gradients.
    """

    value: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good: int = 0

    def adapt(self, *, finite: bool) -> None:
        """Halve after an overflow, double after `interval` steps without one."""
        if not finite:
            self.value, self.good = self.value * self.backoff, 0
        elif self.good + 1 == self.interval:
            self.value, self.good = self.value * self.growth, 0
        else:
            self.good += 1


class Step:
    """Takes a Batch through forward, backward and one optimizer step, equally at any split.

    `precision` is "fp32" (the parameters' own dtype, no autocast), "bf16" or "fp16" (autocast; fp16
    with loss scaling). `clip` bounds the global gradient norm. `schedule` is stepped once per
    optimizer step. `compile` is "inductor" (torch.compile) or "script" (TorchScript).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        *,
        precision: str = "fp32",
        clip: float | None = None,
        schedule: LRScheduler | None = None,
        compile: str | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise StepError(
                given=f"precision={precision!r}",
                found=f"the precisions are {', '.join(PRECISIONS)}",
                fix="precision='bf16' on recent hardware; 'fp32' keeps the parameters' own dtype",
            )
        if compile is not None and compile not in COMPILERS:
            raise StepError(
                given=f"compile={compile!r}",
                found=f"the compilers are {', '.join(COMPILERS)}",
                fix="compile='inductor', or leave it out",
            )
        if not isinstance(task, Task):
            raise StepError(
                given=f"Step(model, optimizer, {type(task).__name__})",
                found="the third is a Task, which says what is computed from a batch",
                fix="shoal.Step(model, optimizer, shoal.Task(loss))",
            )
        self.model = model
        self.engine = engine_of(model)
        parameter_names(model, optimizer)  # refuses what no step can drive
        self.optimizer = optimizer
        self.task = task
        self.precision = precision
        self.clip = check_clip(clip)
        self.schedule = _check_schedule(schedule, optimizer)
        self.number = 0
        self.last: Result | None = None
        self.counting: AbstractContextManager[object] = nullcontext()
        """Forward and backward run in it: whoever counts what they compute."""
        self._autocast = PRECISIONS[precision]
        self._scale = LossScale() if precision == "fp16" else None
        self._compile = compile
        self._prepared = False

    def __call__(self, batch: Batch) -> Result:
        """One optimizer step on the global batch. Collective.

        Raises StepError, on all ranks alike, when loss or gradients are not finite (with fp16 the
        step is skipped and the scale lowered instead); the parameters are untouched then. Where each
        rank takes steps of its own (Hogwild, LocalSGD, DiLoCo) it is raised on that rank alone, and
        whoever catches it has taken a step without a sample.
        """
        timeline = self.engine.world.timeline
        before = timeline.enter(FORWARD)
        begun = timeline.spent[FORWARD:CHECKPOINT]
        try:
            decided, skipped = self._advance(batch)
        finally:
            timeline.enter(before)
        f, b, c, u = timeline.spent[FORWARD:CHECKPOINT]
        times = (f - begun[0]) / 1e9, (b - begun[1]) / 1e9, (c - begun[2]) / 1e9, (u - begun[3]) / 1e9
        return self._count(decided, skipped, *times)

    def _advance(self, batch: Batch) -> tuple[Correction, bool]:
        """One optimizer step; whether it was skipped."""
        self.engine.world.stepping()
        self.catch_up()
        if not self._prepared:
            self._prepare(batch)
        scale = 1.0 if self._scale is None else self._scale.value
        try:
            with self.counting:
                totals = self.engine.gradients(self.task, batch, autocast=self._autocast, scale=scale)
            decided = correct(totals, size=batch.size, scale=scale, clip=self.clip)
        except BaseException:
            self.engine.discard()  # whoever catches it goes on with the next batch
            self._fail(batch)
            raise
        skipped = self._scale is not None and math.isfinite(decided.loss) and not decided.finite
        if decided.finite:
            self.engine.update(self.optimizer, decided.factor)
            self._follow_schedule()
        else:
            self.engine.discard()
            if skipped and self.engine.alone:
                self._follow_schedule()  # others may have stepped
            elif not skipped:
                self._fail(batch)
                over = "this rank's share" if self.engine.alone else "all ranks"
                raise not_finite(decided, batch, over=over)
        if self._scale is not None:
            self._scale.adapt(finite=decided.finite)
        batch.taken = True
        return decided, skipped

    def _fail(self, batch: Batch) -> None:
        """Where the others may have taken this step, count it here too, as one without a sample."""
        if self.engine.alone:
            batch.taken = True
            self._follow_schedule()
            self._count(Correction(math.nan, 0.0, 0.0, 0.0, True), True)

    def _follow_schedule(self) -> None:
        if self.schedule is not None:
            self.schedule.step()

    def catch_up(self) -> None:
        """Count the batches that a loop of one's own has finished on the model since the last call."""
        if isinstance(self.engine, OpenEngine) and self.engine.finished is not None:
            self.number += self.engine.uncounted - 1
            self._count(self.engine.finished, False)
            self.engine.finished, self.engine.uncounted = None, 0

    def infer(self, micro: Micro, seed: int) -> Any:
        """The model's output on a micro-batch in this step's precision. Collective."""
        return self.engine.infer(self.task, micro, seed, autocast=self._autocast)

    def state_dict(self) -> dict[str, Any]:
        """All from which this step goes on, the optimizer's state by parameter name. Collective."""
        self.engine.settle(self.optimizer)
        return self.form()

    def form(self) -> dict[str, Any]:
        """What `state_dict` returns, but for values that still differ between ranks. Collective."""
        state: dict[str, Any] = {
            "model": storable(self.model.state_dict()),
            "optimizer": named(self.optimizer, self._names),
            "number": self.number,
            "engine": self.engine.state(),
        }
        if self.schedule is not None:
            state["schedule"] = self.schedule.state_dict()
        if self._scale is not None:
            state["scale"] = {"value": self._scale.value, "good": self._scale.good}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Raises CheckpointError before anything changes, as `check_state` does.
        """
        self.check_state(state)
        optimizer = numbered(self.optimizer, state["optimizer"], self._names)
        own = self.model.state_dict()
        model = restored(own, {n: value for n, value in state["model"].items() if n in own})
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self._scale is not None:
            self._scale.value = state["scale"]["value"]
            self._scale.good = state["scale"]["good"]
        if isinstance(self.engine, OpenEngine):
            self.engine.finished, self.engine.uncounted = None, 0  # of batches that were not saved
        self.engine.load_state(state["engine"])
        self.number = state["number"]

    def template(self) -> dict[str, Any]:
        """Where the tensors of a state are to be read to that this rank holds parts of."""
        parameters = dict(self.model.named_parameters())
        return {
            "model": divided(self.model.state_dict(), torch.empty_like),
            "optimizer": {"state": divided({name: parameters[name] for name in self._names})},
        }

    def elsewhere(self) -> list[tuple[str, ...]]:
        """Where in a state is what other ranks hold and this one does not. Collective."""
        own = self.model.state_dict().keys()
        others = [name for name in self._of_all_ranks(dict.fromkeys(own)) if name not in own]
        return [*(("model", n) for n in others), *(("optimizer", "state", n) for n in others)]

    def elements(self) -> int:
        """How many elements the parameters of the model have, over all ranks. Collective."""
        mine = {name: p.numel() for name, p in self.model.named_parameters()}
        return sum(self._of_all_ranks(mine).values())

    @property
    def compiled(self) -> bool:
        """Whether forward and backward are run by other code than the model's."""
        return self._compile is not None

    @property
    def dtype(self) -> torch.dtype:
        """What most of the model computes in: that of mixed precision, or of its parameters."""
        sizes: Counter[torch.dtype] = Counter()
        for parameter in self.model.parameters():
            sizes[parameter.dtype] += parameter.numel()
        return self._autocast or max(sizes, key=sizes.__getitem__, default=torch.float32)

    @property
    def _names(self) -> list[str]:
        return parameter_names(self.model, self.optimizer)  # groups may have been added

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` is of another model, optimizer, schedule or precision.

        Collective: ranks may hold parts of the model, and `state` is of all of it.
        """
        here = self._of_all_ranks(shapes(self.model.state_dict()))
        check_model(self.model, state["model"], here)
        groups = self._of_all_ranks(members(self.optimizer, self._names))
        check_optimizer(self.optimizer, state["optimizer"], groups)
        parts = {"schedule": self.schedule, "scale": self._scale}
        for part, own in parts.items():
            if (part in state) != (own is not None):
                raise CheckpointError(
                    given=f"a Step {'with' if own is not None else 'without'} a {part}",
                    found=f"a checkpoint {'with' if part in state else 'without'} one",
                    fix="build the Step as in the run that wrote the checkpoint (schedule=, "
                    "precision=), or start afresh: shoal.Run('runs/b', …)",
                )

    def _of_all_ranks(self, mine: dict[str, Any]) -> dict[str, Any]:
        world = self.engine.world
        if world.data_size == world.size:  # every rank has the whole model
            return mine
        return {name: value for part in world.gather(mine) for name, value in part.items()}

    def _count(
        self,
        decided: Correction,
        skipped: bool,
        forward: float = 0.0,
        backward: float = 0.0,
        communication: float = 0.0,
        update: float = 0.0,
    ) -> Result:
        self.number += 1
        loss, norm, counted, _, _ = decided
        self.last = Result(loss, norm, counted, skipped, forward, backward, update, communication)
        return self.last

    def _prepare(self, batch: Batch) -> None:
        check_same_environment(self.engine.world)
        check_loss_adds_up(self.engine, self.task, batch, autocast=self._autocast)
        say_division(self.engine, len(batch))
        if self._compile is not None:
            self.engine.compile(self._compile)
        self._prepared = True


def _check_schedule(schedule: object, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """`schedule` if it can be stepped without a metric and steers `optimizer`."""
    if schedule is None:
        return None
    kind = type(schedule).__name__
    if not isinstance(schedule, LRScheduler):
        found = "it is not a torch.optim.lr_scheduler.LRScheduler"
    elif isinstance(schedule, ReduceLROnPlateau):
        found = "it is stepped with a metric after validation, not with each optimizer step"
    elif schedule.optimizer is not optimizer:
        found = f"it steers another {type(schedule.optimizer).__name__} than the one given"
    else:
        return schedule
    raise StepError(
        given=f"schedule={kind}",
        found=found,
        fix="shoal.Schedule(warmup=100)(optimizer, steps), or a scheduler of torch's; a plateau is "
        "yours to step: plateau.step(shoal.evaluate(step, data)['loss']), "
        "Run(…, state={'plateau': plateau})",
    )

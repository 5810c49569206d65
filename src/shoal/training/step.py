"""One optimizer step: precision, scaling, correction by the true count, clipping, update, schedule."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal._torch.modules import compiler_of
from shoal._torch.optimizers import skipping
from shoal.data.batch import Batch
from shoal.data.coupling.step import CoupledStep
from shoal.data.micro import MicroBatch
from shoal.data.step_result import StepResult
from shoal.distributed.consistency import check_same_environment
from shoal.distributed.rank_noise import RankNoise
from shoal.distributed.seeds import random_state, set_random_state
from shoal.strategies import engine_of
from shoal.strategies.correction import (
    Correction,
    DeviceCorrection,
    check_clip,
    correct,
    correct_on_device,
    not_finite,
)
from shoal.strategies.coupling.notice import say_division
from shoal.strategies.random_draws.draws import slices_of
from shoal.strategies.task import Task
from shoal.telemetry.step_timer import CHECKPOINT, FORWARD
from shoal.training.bad_steps import BadStepRule
from shoal.training.first_batch import check_first_batch
from shoal.training.loss_scale import LossScale
from shoal.training.nonfinite import find_nonfinite
from shoal.training.pending_step import PendingStep, result_mode
from shoal.training.schedule import (
    check_script_steps,
    script_steps,
    step_schedule,
    steps_by_epoch,
)
from shoal.training.several import kind_of
from shoal.training.train_state import TrainState
from shoal.util.arguments import check_choice
from shoal.util.decision import Decision
from shoal.util.errors import StepError

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILERS = ("inductor", "blocks", "script")
RESULTS = ("now", "late")

Checking: TypeAlias = Callable[[Batch, torch.dtype | None, float], AbstractContextManager[None]]
"""Returns the context of the gradients of a batch, given the dtype of autocast and the loss scale."""


class Step(TrainState):
    """Forward, backward and one optimizer step on a Batch, exact at any number of ranks.

    Args:
        model: Model that `shoal.parallelize` returned.
        optimizer: torch optimizer over its parameters, or a list of several, which step in this order.
        task: Inputs and loss of the model.
        precision: "fp32" (the parameters' own dtype, no autocast), "bf16" or "fp16" (autocast; fp16
            with dynamic loss scaling). Default: "fp32".
        clip: Largest norm of the gradients of the global batch, above 0. `None` does not clip. Default:
            None.
        schedule: torch scheduler over `optimizer`, or a list of schedulers over several optimizers,
            stepped once per `schedule_interval`. Default: None.
        schedule_interval: "step" (each optimizer step) or "epoch" (the end of each epoch). Required for
            StepLR, MultiStepLR, ExponentialLR and the cosine schedulers of torch, whose arguments may
            count either. `None` is "step" for all others. Default: None.
        compile: Compiler: "inductor" (torch.compile), "blocks" (torch.compile of each repeated block,
            once for all of a class) or "script" (TorchScript). `None` does not compile. Default: None.
        result: "now" waits for loss and gradient norm in each step. "late" does not wait for the
            device: the next step reads both, and raises if the loss was not finite. It needs a fused
            optimizer (`fused=True`). `None` is "late" on an accelerator where that is possible, and
            else "now". Default: None.

    Attributes:
        number: Number of optimizer steps since the start of training.
        last: StepResult of the last step; None before the first.
        result_mode: Decision between "now" and "late", with its reason.

    Raises:
        StepError: If an argument has an invalid value, or the optimizer has parameters of another
            model.

    Examples:
        >>> def loss(output, batch):
        ...     return torch.nn.functional.mse_loss(output, batch[1], reduction="sum"), len(output)
        >>> with shoal.init() as world:
        ...     model = shoal.parallelize(torch.nn.Linear(4, 1), world)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
        ...     loader = shoal.Loader((torch.ones(8, 4), torch.ones(8, 1)), world, batch_size=4)
        ...     counted = [step(batch).counted for batch in loader.epochs(1)]
        >>> counted, step.number
        ([4.0, 4.0], 2)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        task: Task,
        *,
        precision: str = "fp32",
        clip: float | None = None,
        schedule: LRScheduler | Sequence[LRScheduler] | None = None,
        schedule_interval: str | None = None,
        compile: str | None = None,
        result: str | None = None,
    ) -> None:
        usual = "use precision='bf16'"
        check_choice(StepError, "shoal.Step", "precision", precision, PRECISIONS, fix=usual)
        usual = "use compile='inductor', or leave it out"
        check_choice(StepError, "shoal.Step", "compile", compile, (None, *COMPILERS), fix=usual)
        check_choice(StepError, "shoal.Step", "result", result, (None, *RESULTS))
        _check_order(model, optimizer)
        if not isinstance(task, Task):
            raise StepError(
                given=f"Step(model, optimizer, {type(task).__name__})",
                found="the third argument is a Task, which defines inputs and loss",
                fix="shoal.Step(model, optimizer, shoal.Task(loss))",
            )
        super().__init__(engine_of(model), optimizer, schedule)
        self._by_epoch = steps_by_epoch(self.schedule, schedule_interval)
        compiler = compiler_of(model)
        if compiler is not None:
            self.engine.compile_with(compiler)
        self.task = task
        self.precision = precision
        self.clip = check_clip(clip)
        self._autocast = PRECISIONS[precision]
        self._scale = LossScale() if precision == "fp16" else None
        self._compile = compile
        fp16 = self._scale is not None
        self.result_mode = result_mode(result, self.engine, self.optimizer, fp16=fp16)
        self._result_given = result
        self._pending: PendingStep | None = None
        self.checking: Checking | None = None
        """Checks the gradients of a batch, if a guard does so."""
        self.bad_steps: BadStepRule | None = None
        """Decides which steps to skip, if a guard does so."""
        self._searches = False
        self._random: dict[str, Any] = {}
        if self.result_mode.value == "late":
            self.engine.world.before_closing(self._end)
        self._prepared = False
        self._tried = False

    def __call__(self, batch: Batch) -> StepResult:
        """Take one optimizer step on the global batch. Collective.

        Args:
            batch: Batch of a Loader.

        Returns:
            The mean loss, the gradient norm, the count and the times of the step.

        Raises:
            StepError: On all ranks, if loss or gradients are not finite; the parameters do not change.
                With `result="late"`, it is raised by the next step, save or evaluation, or at the end
                of the run; the step after the failed one is skipped too, and neither counts as taken.
                With fp16 the step is skipped and the loss scale is halved instead. Under strategies
                in which each rank takes independent steps (Hogwild, LocalSGD, DiLoCo), only that rank
                raises it; if the caller catches it, the step counts as a step without samples. On the
                first batch, also if the loss function returns a mean instead of a sum, or a buffer
                depends on how the batch is split.
            AgreementError: On all ranks, at the first batch of a Loader, if the ranks have different
                data.
        """
        if not isinstance(batch, Batch):
            raise StepError(
                given=f"step({type(batch).__name__})",
                found="not a Batch of a Loader, so the size of the global batch is unknown",
                fix="for batch in loader.epochs(10): step(batch)",
            )
        timeline = self.engine.world.timeline
        before = timeline.enter(FORWARD)
        begun = timeline.spent[FORWARD:CHECKPOINT]
        try:
            result = self._advance(batch)
        finally:
            timeline.enter(before)
        f, b, c, u = timeline.spent[FORWARD:CHECKPOINT]
        times = (f - begun[0]) / 1e9, (b - begun[1]) / 1e9, (c - begun[2]) / 1e9, (u - begun[3]) / 1e9
        return self.count(result(*times))

    def _advance(self, batch: Batch) -> Callable[..., StepResult]:
        """Take one optimizer step; return its result, given the times."""
        self.engine.world.service(RankNoise).begin()
        self.engine.world.watchdog.begin_step()
        if not self._prepared:
            self.prepare(batch)
        elif (
            not self.engine.independent_steps
        ):  # its ranks don't come to a second Loader at the same time
            batch.compare_ranks()
        if self._pending is None:
            self.engine.settle()  # a step of another Step on this model
        self.engine.world.service(CoupledStep).drop()
        try:
            correction = self._correct(batch)
        except BaseException:
            self.engine.discard()  # a caller that catches the error continues with the next batch
            self._fail(batch)
            raise
        if isinstance(correction, DeviceCorrection):
            return self._update_late(batch, correction)
        return self._update(batch, correction)

    def _correct(self, batch: Batch) -> Correction | DeviceCorrection:
        """Compute the gradients of the batch and their correction, late ones on the device."""
        scale = 1.0 if self._scale is None else self._scale.value
        if self._searches:
            self._random = random_state()
        checking = self.checking
        checked = nullcontext() if checking is None else checking(batch, self._autocast, scale)
        with checked, self.counting:
            totals = self.engine.gradients(self.task, batch, autocast=self._autocast, scale=scale)
        if self.result_mode.value == "late":
            before = None if self._pending is None else self._pending.skip
            sums = totals.vector()
            return correct_on_device(sums, size=batch.size, clip=self.clip, before=before)
        return correct(totals.read(), size=batch.size, scale=scale, clip=self.clip)

    def _update(self, batch: Batch, decided: Correction) -> Callable[..., StepResult]:
        """Update the parameters, skip an overflow or a bad step, or raise StepError."""
        overflow = self._scale is not None and math.isfinite(decided.loss) and not decided.finite
        rule = self.bad_steps
        bad = rule is not None and not overflow and rule.is_bad(self.number + 1, batch, decided)
        taken = decided.finite and not bad
        if taken:
            self.engine.update(self.optimizer, decided.factor)
            self.engine.world.service(CoupledStep).apply()
        else:
            self.engine.discard()
            where = self._search(batch) if self._searches and not (decided.finite or overflow) else ""
            if bad and rule is not None:
                rule.explain(where)
            elif not overflow:
                self._fail(batch)
                alone = self.engine.independent_steps
                raise not_finite(decided.loss, decided.norm, batch, alone=alone, where=where)
        # Where ranks step separately, others may have stepped.
        self._follow_schedule(batch, taken=taken or self.engine.independent_steps)
        if self._scale is not None:
            self._scale.adapt(finite=decided.finite)
        batch.processed = True
        return partial(StepResult, decided.loss, decided.norm, decided.counted, overflow or bad)

    def _update_late(self, batch: Batch, decided: DeviceCorrection) -> Callable[..., StepResult]:
        """Update the parameters unless the device finds values that are not finite.

        Only then look at the step before, so that the device never waits for the host.
        """
        pending = PendingStep(self, batch, decided)
        with skipping(self.optimizer, decided.skip):
            self.engine.update(self.optimizer, decided.factor)
        self.engine.world.service(CoupledStep).apply()
        self._settle(batch)
        self._pending = pending
        self.engine.unsettled = self._settle  # keeps this Step, if the script drops it
        self._follow_schedule(batch)
        batch.processed = True
        return pending.result_after

    def _settle(self, since: Batch | None = None) -> None:
        """Look at the last late result; raise StepError if it is not finite.

        Then the step has not been taken, nor the one on the batch `since`, which has begun.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle(self, since)

    def _end(self) -> None:
        """Look at the last result of a script without a Run, unless the script has failed."""
        if sys.exception() is None:
            self._settle()

    def _fail(self, batch: Batch) -> None:
        """Count a failed step, as one without samples, if other ranks may have taken it."""
        if self.engine.independent_steps:
            batch.processed = True
            self._follow_schedule(batch)
            self.count(StepResult(math.nan, 0.0, 0.0, skipped=True))

    def _follow_schedule(self, batch: Batch, *, taken: bool = True) -> None:
        """Step the schedule after an optimizer step that was `taken`, or after an epoch."""
        if self.schedule is not None and (batch.ends_epoch if self._by_epoch else taken):
            step_schedule(self.schedule)

    def _follow_schedule_from_here(self) -> None:
        super()._follow_schedule_from_here()
        self._script_steps = script_steps(self.schedule)

    def skip_bad_steps(self, rule: BadStepRule) -> BadStepRule:
        """Let `rule` decide which steps to skip. Raises StepError where no step can be skipped."""
        if self.engine.independent_steps:
            raise StepError(
                given=f"shoal.Guards(bad_steps=…) with {self.engine.strategy}",
                found="its ranks take their steps separately, so that they can't decide together",
                fix="leave bad_steps out",
            )
        self._wait_for_results("bad_steps decides before the update")
        self.bad_steps = rule
        return rule

    def search_nonfinite(self) -> None:
        """Let errors and events of losses that are not finite name the module they began in."""
        if self.compiled or self.engine.independent_steps:
            raise StepError(
                given="shoal.Guards(find_nonfinite=True) with "
                + ("a compiled model" if self.compiled else self.engine.strategy),
                found="it repeats a step of all ranks with hooks on modules",
                fix="leave find_nonfinite out, or train without compile and in synchronous steps",
            )
        self._wait_for_results("find_nonfinite repeats the step")
        self._searches = True

    def _search(self, batch: Batch) -> str:
        """Repeat a step whose loss or gradients are not finite, and return where that began."""
        after = random_state()
        self.engine.world.service(CoupledStep).drop()
        set_random_state(self._random)
        scale = 1.0 if self._scale is None else self._scale.value
        try:
            return find_nonfinite(self.engine, self.task, batch, autocast=self._autocast, scale=scale)
        finally:
            self.engine.discard()
            set_random_state(after)

    @property
    def in_bad_steps(self) -> bool:
        """Whether the last steps were bad and skipped."""
        return self.bad_steps is not None and bool(self.bad_steps.in_a_row)

    def _wait_for_results(self, reason: str) -> None:
        if self._result_given == "late":
            raise StepError(
                given="shoal.Step(…, result='late') in a Run with guards",
                found=f"each step must wait for its result: {reason}",
                fix="leave result out",
            )
        if self.result_mode.value == "late":
            self.result_mode = Decision(what="result", value="now", reason=reason)

    def check_loop(self) -> None:
        """Raise StepError if the Step has options, which `batch.backward` would ignore."""
        written = {
            "precision": f"with torch.autocast({self.engine.world.device.type!r}, torch.bfloat16): "
            "around forward (fp16 needs the loss scaling of a Step)",
            "clip": f"batch.finish(model, clip={self.clip})",
            "schedule": "shoal.Run(directory, model, loader, optimizer=optimizer, schedule=schedule), "
            "and schedule.step() after optimizer.step()",
            "compile": "model = torch.compile(model) before shoal.parallelize(model, world)",
            "result": "leave result out: batch.finish returns the result at once",
        }
        values = {
            "precision": self._autocast and repr(self.precision),
            "clip": self.clip,
            "schedule": self.schedule and kind_of(self.schedule),
            "compile": self._compile and repr(self._compile),
            "result": self._result_given and repr(self._result_given),
        }
        given = {name: value for name, value in values.items() if value is not None}
        if given:
            shown = ", ".join(f"{name}={value}" for name, value in given.items())
            raise StepError(
                given=f"shoal.Step(model, optimizer, task, {shown}) and batch.backward on its model",
                found=f"in a custom training loop these options have no effect: {', '.join(given)}",
                fix="; ".join(written[name] for name in given)
                + "; or step(batch) in place of the loop over the batch",
            )

    def check_schedule(self, *, epoch_ended: bool) -> None:
        """Raise StepError if the script has stepped the schedule too. The Step itself steps it."""
        check_script_steps(self.schedule, self._script_steps)

    def try_loss(self, batch: Batch, *, coupling: bool = False) -> None:
        """Try the Task's loss function on `batch`, once, and with `coupling` the model. Collective.

        Raises StepError, on all ranks, if it returns a mean instead of a sum.
        """
        if coupling or not self._tried:
            self.untried = check_first_batch(
                self.engine,
                self.task,
                batch,
                autocast=self._autocast,
                compiled=self.compiled,
                coupling=coupling,
            )
            self._tried = True

    def infer(self, micro: MicroBatch, seed: int) -> Any:
        """Return the model's output on a micro-batch in this step's precision. Collective.

        Args:
            micro: Micro-batch, one of `batch.micros`.
            seed: Seed of its random numbers, `batch.seed`.

        Returns:
            The model's output; None on ranks that do not have it, such as those of other pipeline
            stages.
        """
        return self.engine.infer(self.task, micro, seed, autocast=self._autocast)

    def form(self) -> dict[str, Any]:
        """Return a state as `state_dict` does, without synchronizing values over ranks. Collective.

        Returns:
            The entries of `state_dict`. Their values may differ between ranks.
        """
        state = super().form()
        if self._scale is not None:
            state["scale"] = {"value": self._scale.value, "good": self._scale.good}
        if self.bad_steps is not None:
            state["bad_steps"] = self.bad_steps.state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Collective.

        Args:
            state: State of a Step with the same model, optimizer, schedule and precision.

        Raises:
            CheckpointError: Before anything changes, if the state does not fit this Step.
        """
        super().load_state_dict(state)
        self._pending = None
        if self._scale is not None:
            self._scale.value = state["scale"]["value"]
            self._scale.good = state["scale"]["good"]
        if self.bad_steps is not None:
            self.bad_steps.load(state.get("bad_steps"))

    @property
    def compiled(self) -> bool:
        """True if compiled code runs the forward and backward passes."""
        return self._compile is not None or super().compiled

    @property
    def _draws_compiled(self) -> bool:
        """True if compiled code draws random numbers itself, which then don't belong to samples."""
        staged = self.engine.world.layout.degree("pipeline") > 1
        split = staged or slices_of(self.engine.module) is not None
        return super().compiled or self._compile == "script" or (self._compile is not None and split)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of most of the model: that of mixed precision, or of its parameters."""
        return self._autocast or super().dtype

    def _options(self) -> dict[str, object]:
        return {**super()._options(), "scale": self._scale}

    def prepare(self, batch: Batch) -> None:
        """Run the checks that the first step runs before it computes gradients. Collective.

        Args:
            batch: First batch of the training.
        """
        if self.engine.independent_steps and batch.measures_speed:
            raise StepError(
                given=f"shoal.Loader(…, shares='measured') with {self.engine.strategy}",
                found="its ranks take their steps separately, so that no step waits for a slow rank",
                fix="leave shares out",
            )
        check_same_environment(self.engine.world)
        batch.compare_ranks()
        self.try_loss(batch, coupling=True)
        say_division(self.engine, len(batch), compiled=self._draws_compiled)
        waits = self.result_mode.value == "now" and self._result_given is None
        self.tell_hints(self.result_mode.reason if waits else "")
        if self._compile is not None:
            self.engine.compile(self._compile)
        self._prepared = True


def _check_order(model: object, optimizer: object) -> None:
    """Raise StepError if a model and its optimizer are swapped."""
    if isinstance(model, Optimizer) or isinstance(optimizer, nn.Module):
        raise StepError(
            given=f"shoal.Step({type(model).__name__}, {type(optimizer).__name__}, …)",
            found="the model is the first argument, and its optimizer the second",
            fix="shoal.Step(model, optimizer, task)",
        )

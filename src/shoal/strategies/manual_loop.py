"""The implementation of `batch.backward` and `batch.finish` for custom training loops."""

from __future__ import annotations

import gc
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoal._torch.autograd import averages
from shoal._torch.modules import bare, has_compiled_call
from shoal.data.batch import IN_A_LOOP, Batch, Count, ManualLoop, not_one_model
from shoal.data.coupling.step import CoupledStep
from shoal.data.step_result import StepResult
from shoal.distributed.consistency import check_same_environment
from shoal.distributed.world import World
from shoal.strategies.contracts import Engine, LoopGradients
from shoal.strategies.correction import check_clip, correct, not_finite
from shoal.strategies.coupling.changed_buffers import LoopBuffers
from shoal.strategies.coupling.notice import say_division, say_draws
from shoal.strategies.loop_reshapes import LoopReshapes
from shoal.strategies.registry import engines_of
from shoal.strategies.task import check_loss
from shoal.telemetry.step_timer import BACKWARD, UPDATE
from shoal.util.errors import ShoalError, StepError


class EngineLoop(ManualLoop):
    """Driver of the engines of a World for custom loops; see `shoal.data.batch.ManualLoop`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._buffers: WeakKeyDictionary[Engine, LoopBuffers | None] = WeakKeyDictionary()
        """Those of the first batch; None once they have been checked."""
        self._reshapes: WeakKeyDictionary[Engine, LoopReshapes] = WeakKeyDictionary()

    def backward(
        self,
        batch: Batch,
        positional: tuple[object, ...],
        *,
        total: Tensor | None,
        mean: Tensor | None,
        count: Count | None,
        model: nn.Module | None,
    ) -> None:
        """Run backward for the current micro-batch; the last one reduces the gradients over ranks."""
        micro = batch.micro
        loss = _loss_sum(positional, total, mean, count)
        engine, gradients = self._engine(model)
        if engine not in batch.backwards:
            if self._buffers.get(engine, True):
                self._buffers[engine] = LoopBuffers(engine.module)
            _begin(engine, gradients, batch)
        reshapes = self._reshapes.setdefault(engine, LoopReshapes())
        reshapes.check(loss[0], micro, batch.size, engine.world)
        last = micro is batch.micros[-1]
        with engine.world.timeline.within(BACKWARD):
            gradients.backward(*loss, micro, batch.size, last=last)
        batch.backwards.append(engine)

    def finish(self, batch: Batch, model: nn.Module, *, clip: float | None) -> StepResult:
        """Correct and clip the gradients, and count the step; see `Batch.finish`."""
        engine, gradients = self._engine(model)
        _check_backwards(engine, batch)
        check_clip(clip)
        engine.world.watchdog.begin_step()
        counters = gradients.counters
        with engine.world.timeline.within(UPDATE):
            try:
                gradients.check()
                if buffers := self._buffers.get(engine):
                    buffers.check(engine, len(batch))
                    self._buffers[engine] = None
                for counter in counters:
                    counter.try_loss(batch)
                decided = correct(gradients.totals(), size=batch.size, scale=1.0, clip=clip)
                if not decided.finite:
                    raise not_finite(decided.loss, decided.norm, batch)
            except ShoalError:
                engine.discard()
                engine.world.service(CoupledStep).drop()
                raise
            gradients.finish(decided.factor)
            engine.world.service(CoupledStep).apply()
        result = StepResult(decided.loss, decided.norm, decided.counted)
        for counter in counters:
            counter.count(result)
        batch.processed = True
        return result

    def _engine(self, model: nn.Module | None) -> tuple[Engine, LoopGradients]:
        engines = self._engines(model)
        if len(engines) > 1:
            del engines
            gc.collect()  # frees deleted models that are still in reference cycles
            engines = self._engines(model)
        if len(engines) != 1:
            raise not_one_model(
                f"{len(engines)} parallelized models"
                if engines
                else "the given model has no engine, because it was not parallelized"
                if self._engines(None)
                else "no parallelized model"
            )
        engine = engines[0]
        if engine.loop is None:
            raise StepError(
                given="a custom training loop over a Batch",
                found="the strategy of the model needs shoal.Step: it runs backward itself, or must "
                "know when the optimizer steps",
                fix="step = shoal.Step(model, optimizer, task), then step(batch)",
            )
        return engine, engine.loop

    def _engines(self, model: nn.Module | None) -> list[Engine]:
        wanted = None if model is None else bare(model)
        return [engine for engine in engines_of(self._world) if wanted in (None, engine.module)]


def _begin(engine: Engine, gradients: LoopGradients, batch: Batch) -> None:
    for counter in gradients.counters:
        counter.check_loop()
    engine.settle()
    gradients.begin()
    engine.check_model()
    check_same_environment(engine.world)
    batch.compare_ranks()
    say_division(engine, len(batch), compiled=has_compiled_call(engine.module))
    say_draws(engine.module, engine.world)


def _check_backwards(engine: Engine, batch: Batch) -> None:
    done = sum(other is engine for other in batch.backwards)
    batch.backwards = [other for other in batch.backwards if other is not engine]
    if done != len(batch):
        raise StepError(
            given=f"batch.finish(model) for {len(batch)} micro-batch(es)",
            found=f"batch.backward was called {done} times, not once per micro-batch",
            fix=f"{IN_A_LOOP}; add several losses of one model before batch.backward",
        )


def _loss_sum(
    positional: tuple[object, ...], total: Tensor | None, mean: Tensor | None, count: Count | None
) -> tuple[Tensor, Count]:
    """Return the loss sum of a micro-batch and its count. Raise StepError for missing arguments."""
    named = {"total": total, "mean": mean, "count": count}
    given = [*("…" for _ in positional), *(f"{n}=…" for n, v in named.items() if v is not None)]
    call = f"batch.backward({', '.join(given)})"
    if positional:
        found = "positional arguments: the loss could be a sum or a mean"
    elif total is not None and mean is not None:
        found = "both a total and a mean; pass only one of them"
    elif total is None and mean is None:
        found = "no loss"
    elif count is None:
        found = "no count, the number of samples or tokens in the loss"
    else:
        loss, count = check_loss((total if mean is None else mean, count), call=call)
        _check_reduction(loss, count, named_mean=mean is not None)
        if mean is None:
            return loss, count
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # a sum may exceed float16
        return loss * (count.reshape(()).to(loss.device) if isinstance(count, Tensor) else count), count
    raise StepError(
        given=call,
        found=found,
        fix="call batch.backward(total=loss, count=len(y)) with reduction='sum', or "
        "batch.backward(mean=loss, count=len(y)) with a mean loss",
    )


def _check_reduction(loss: Tensor, count: Count, *, named_mean: bool) -> None:
    """Raise StepError for a mean passed as `total`, or a sum passed as `mean`.

    The last operation of the loss decides. With a count of 1 the sum equals the mean. A loss with
    further operations cannot be checked.
    """
    averaged = averages(loss)
    if averaged is None or averaged == named_mean or float(count) == 1:
        return
    found, other = ("a mean, not a sum", "mean") if averaged else ("a sum, not a mean", "total")
    raise StepError(
        given=f"batch.backward({'mean' if named_mean else 'total'}=loss, count={float(count):g})",
        found=f"the last operation of the loss shows that it is {found}",
        fix=f"call batch.backward({other}=loss, count=n), or "
        f"reduction='{('sum' if averaged else 'mean')}' in the loss function",
    )

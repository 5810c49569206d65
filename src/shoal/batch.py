"""One global batch as one rank sees it, and what your own loop calls on it."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from shoal._torch.autograd import averages
from shoal.compiled import bare
from shoal.coupled import say_division
from shoal.engine import Correction, Engine, OpenEngine, Result, check_clip, correct
from shoal.errors import ShoalError, StepError
from shoal.rows import Rows, gather_rows
from shoal.sameness import check_same_environment
from shoal.task import Count, Micro, Noise, check_loss
from shoal.timeline import BACKWARD, UPDATE

if TYPE_CHECKING:
    from shoal.data import Loader
    from shoal.world import World


IN_A_LOOP = "for micro in batch: batch.backward(total=loss_sum, count=n)"


class Batch:
    """One global batch as this rank sees it: its micro-batches, for `Step` or for your own loop.

    `first` is the position of the global batch's first sample since the start of training, `size` how
    many samples it has over all ranks; it is `taken` once a step has been made of it. After one that
    `ends_epoch` the next epoch begins, or training ends. Your own loop is as exact as `Step`:

        for x, y in batch:
            total = F.cross_entropy(model(x), y, reduction="sum")
            batch.backward(total=total, count=len(y))
        batch.finish(model, clip=1.0)
        optimizer.step()
        optimizer.zero_grad()
    """

    __slots__ = (
        "_backwards",
        "_current",
        "_loader",
        "_noise",
        "_world",
        "ends_epoch",
        "first",
        "micros",
        "seed",
        "size",
        "taken",
        "wait",
    )

    def __init__(
        self,
        first: int,
        size: int,
        micros: Sequence[Micro],
        *,
        seed: int,
        wait: float = 0.0,
        world: World | None = None,
        loader: Loader | None = None,
        ends_epoch: bool = False,
    ) -> None:
        self.first = first
        self.ends_epoch = ends_epoch
        self.size = size
        self.micros = micros
        self.seed = seed
        self.wait = wait
        self.taken = False
        self._world = world
        self._loader = loader
        self._current = -1
        self._backwards: list[OpenEngine] = []
        self._noise: Noise | None = None

    @property
    def share(self) -> tuple[int, int]:
        """The positions [start, stop) that this rank consumes; empty if it only stands in."""
        start = stop = -1
        for micro in self.micros:
            if micro.weight:
                start = micro.first if start < 0 else start
                stop = micro.first + micro.samples
        return (start, stop) if start >= 0 else (self.first, self.first)

    def __len__(self) -> int:
        """The number of micro-batches."""
        return len(self.micros)

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches as the collate function returned them."""
        for index, micro in enumerate(self.micros):
            self._current = index
            self._noise = None
            yield micro.value
        self._current = -1

    @property
    def micro(self) -> Micro:
        """The micro-batch that the loop `for … in batch` stands at, with its positions and weight."""
        if self._current < 0:
            raise StepError(
                given="batch.backward, batch.micro or batch.noise outside a loop over the batch",
                found="no micro-batch is under way",
                fix=IN_A_LOOP,
            )
        return self.micros[self._current]

    @property
    def noise(self) -> Noise:
        """The per-position random numbers of the current micro-batch; each draw goes on."""
        micro = self.micro
        if self._noise is None:
            self._noise = Noise(self.seed, micro.first, micro.samples)
        return self._noise

    def gather(self, tensor: Tensor) -> Rows:
        """The rows of `tensor` from all data ranks; see `shoal.gather`. Collective."""
        return gather_rows(tensor, self.micro)

    @overload
    def backward(self, *, total: Tensor, count: Count, model: nn.Module | None = None) -> None: ...

    @overload
    def backward(self, *, mean: Tensor, count: Count, model: nn.Module | None = None) -> None: ...

    def backward(
        self,
        *positional: object,
        total: Tensor | None = None,
        mean: Tensor | None = None,
        count: Count | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Run backward for the current micro-batch; the last one reduces the gradients over ranks.

        Pass either `total`, the sum of the losses of the micro-batch (`reduction="sum"`), or `mean`,
        their mean; `count` is the number of samples or tokens in the sum or the mean. Pass `total` if
        the count may be 0, since there is no mean then. `model` is the model to train; it is required
        if several have been parallelized.

        Raises StepError for a loss that does not say which of the two it is, or whose last operation
        is the other reduction; where the batch before was not finished, or its gradients were not
        cleared after, or were cleared before, `optimizer.step()`; for a Step over the model with
        options that a loop ignores; and AgreementError, on all ranks, where at the first batch of a
        Loader the ranks have other data.
        """
        micro = self.micro
        loss = _loss_sum(positional, total, mean, count)
        engine = self._engine(model)
        if engine not in self._backwards:
            self._begin(engine)
        last = self._current == len(self.micros) - 1
        with engine.world.timeline.within(BACKWARD):
            engine.backward(*loss, micro, self.size, scale=1.0, last=last)
            if last:
                engine.note_gradients()
        self._backwards.append(engine)

    def finish(self, model: nn.Module, *, clip: float | None = None) -> Result:
        """Make the gradients those of `Σ loss / Σ count` over the global batch, and clip them.

        Returns the global mean loss and the gradient norm before clipping. Raises StepError when
        they are not finite; the parameters are untouched then, and the gradients dropped. Raises it
        also, at the first batch, where the loss function of a Step over this model returns a mean.
        """
        engine = self._engine(model)
        self._check_backwards(engine)
        check_clip(clip)
        engine.world.stepping()
        states = engine.states
        with engine.world.timeline.within(UPDATE):
            try:
                engine.check_gradients()
                for state in states:
                    state.try_loss(self)
                decided = correct(engine.totals(), size=self.size, scale=1.0, clip=clip)
                if not decided.finite:
                    raise not_finite(decided, self)
            except ShoalError:
                engine.discard()
                raise
            engine.multiply(decided.factor)
        engine.note_finish()
        result = Result(decided.loss, decided.norm, decided.counted)
        for state in states:
            state.count(result)
        self.taken = True
        return result

    def compare_ranks(self) -> None:
        """At a Loader's first batch, raise AgreementError where ranks have other data. Collective."""
        if self._loader is not None:
            self._loader.compare_ranks()

    def again(self, first: int, sizes: tuple[int, ...]) -> list[Any] | None:
        """Micro-batches of `sizes` samples each, collated anew; see `Loader.again`."""
        return None if self._loader is None else self._loader.again(first, sizes)

    def _begin(self, engine: OpenEngine) -> None:
        for state in engine.states:
            state.check_loop()
        engine.begin()
        check_same_environment(engine.world)
        self.compare_ranks()
        say_division(engine, len(self.micros))

    def _check_backwards(self, engine: OpenEngine) -> None:
        done = self._backwards.count(engine)
        self._backwards = [other for other in self._backwards if other is not engine]
        if done != len(self.micros):
            raise StepError(
                given=f"batch.finish(model) for {len(self.micros)} micro-batch(es)",
                found=f"batch.backward was called {done} times, not once for each",
                fix=f"{IN_A_LOOP}, and add several losses of a model up before it",
            )

    def _engine(self, model: nn.Module | None) -> OpenEngine:
        engines = self._engines(model)
        if len(engines) > 1:
            del engines
            gc.collect()  # models that were dropped live on in reference cycles until now
            engines = self._engines(model)
        if len(engines) != 1:
            found = (
                f"{len(engines)} parallelized models"
                if engines
                else "the model given has no engine"
                if self._engines(None)
                else "no parallelized model"
            )
            raise StepError(
                given="your own loop over a Batch",
                found=found,
                fix="batch.backward(total=loss_sum, count=n, model=model) with "
                "model = shoal.parallelize(Model(), world)",
            )
        engine = engines[0]
        if not isinstance(engine, OpenEngine):
            raise StepError(
                given="your own loop over a Batch",
                found="its strategy takes whole steps: it runs backward itself, or has to know when "
                "the optimizer steps",
                fix="step = shoal.Step(model, optimizer, task), then step(batch)",
            )
        return engine

    def _engines(self, model: nn.Module | None) -> list[Engine]:
        known = self._world.engines if self._world is not None else []
        wanted = None if model is None else bare(model)
        return [engine for engine in known if wanted in (None, engine.module)]


def not_finite(result: Correction, batch: Batch, *, over: str = "all ranks") -> StepError:
    """The error of a step whose loss or gradients are not numbers."""
    what = "loss" if not math.isfinite(result.loss) else "gradient norm"
    value = result.loss if what == "loss" else result.norm
    start, stop = batch.share
    share = f"{start:,} to {stop - 1:,}" if stop > start else "none of them"
    return StepError(
        given=f"the batch at samples {batch.first:,} to {batch.first + batch.size - 1:,} "
        f"(this rank: {share})",
        found=f"a {what} of {value}, over {over}; the parameters were not touched",
        fix="lower the learning rate, clip gradients (clip=1.0), or look at these samples with "
        "torch.autograd.set_detect_anomaly(True)",
    )


def _loss_sum(
    positional: tuple[object, ...], total: Tensor | None, mean: Tensor | None, count: Count | None
) -> tuple[Tensor, Count]:
    """The sum of the losses of a micro-batch, and its count; StepError where that can't be known."""
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
        fix="batch.backward(total=loss, count=len(y)) with reduction='sum', or "
        "batch.backward(mean=loss, count=len(y)) with a mean loss",
    )


def _check_reduction(loss: Tensor, count: Count, *, named_mean: bool) -> None:
    """Raise StepError for a loss whose last operation is a mean or a sum and that is named the other.

    With a count of 1 the sum equals the mean. A loss that was computed further can't be checked.
    """
    averaged = averages(loss)
    if averaged is None or averaged == named_mean or float(count) == 1:
        return
    found, other = ("a mean, not a sum", "mean") if averaged else ("a sum, not a mean", "total")
    raise StepError(
        given=f"batch.backward({'mean' if named_mean else 'total'}=loss, count={float(count):g})",
        found=f"by the operation that computed the loss, it is {found}",
        fix=f"batch.backward({other}=loss, count=n), or "
        f"reduction='{'sum' if averaged else 'mean'}' in the loss function",
    )

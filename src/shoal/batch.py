"""One global batch as one rank sees it, and what a loop of one's own calls on it."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shoal.coupled import say_division
from shoal.engine import Correction, Engine, OpenEngine, check_clip, correct
from shoal.errors import StepError
from shoal.rows import Rows, gather_rows
from shoal.task import Count, Micro, Noise, check_loss
from shoal.timeline import BACKWARD, UPDATE

if TYPE_CHECKING:
    from shoal.world import World


class Batch:
    """One global batch as this rank sees it: its micro-batches, for `Step` or for a loop of one's own.

    `first` is the position of the global batch's first sample since the start of training, `size` how
    many samples it has over all ranks; it is `taken` once a step has been made of it. After one that
    `ends_epoch` the next epoch begins, or training ends. A loop of one's
    own is as exact as `Step`:

        for micro in batch:
            batch.backward(*loss(model(micro[0]), micro))
        batch.finish(model, clip=1.0)
        optimizer.step()
        optimizer.zero_grad()
    """

    __slots__ = (
        "_backwards",
        "_current",
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
                fix="for micro in batch: batch.backward(*loss(model(micro[0]), micro))",
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

    def backward(self, loss: Tensor, count: Count, model: nn.Module | None = None) -> None:
        """Backward of the current micro-batch; gradients are reduced over ranks after the last.

        `loss` is the sum over the micro-batch's samples, `count` what it was taken over. `model` is
        needed where several models have been parallelized, and names the one that learns.
        """
        micro = self.micro
        loss, count = check_loss((loss, count))
        engine = self._engine(model)
        if engine not in self._backwards:
            engine.begin()
            say_division(engine, len(self.micros))
        last = self._current == len(self.micros) - 1
        with engine.world.timeline.within(BACKWARD):
            engine.backward(loss, count, micro, self.size, scale=1.0, last=last)
        self._backwards.append(engine)

    def finish(self, model: nn.Module, *, clip: float | None = None) -> Correction:
        """Make the gradients those of `Σ loss / Σ count` over the global batch, and clip them.

        Returns the global mean loss and the gradient norm before clipping. Raises StepError when
        they are not finite; the parameters are untouched then, and the gradients dropped.
        """
        engine = self._engine(model)
        self._check_backwards(engine)
        check_clip(clip)
        engine.world.stepping()
        with engine.world.timeline.within(UPDATE):
            try:
                result = correct(engine.totals(), size=self.size, scale=1.0, clip=clip)
                if not result.finite:
                    raise not_finite(result, self)
            except StepError:
                engine.discard()
                raise
            engine.multiply(result.factor)
        engine.finished = result
        engine.uncounted += 1
        self.taken = True
        return result

    def _check_backwards(self, engine: OpenEngine) -> None:
        done = self._backwards.count(engine)
        self._backwards = [other for other in self._backwards if other is not engine]
        if done != len(self.micros):
            raise StepError(
                given=f"batch.finish(model) for {len(self.micros)} micro-batch(es)",
                found=f"batch.backward was called {done} times, not once for each",
                fix="for micro in batch: batch.backward(*loss(model(micro[0]), micro)), and add "
                "several losses of a model up before it",
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
                given="a loop of one's own over a Batch",
                found=found,
                fix="batch.backward(loss, count, model) with model = shoal.parallelize(Model(), world)",
            )
        engine = engines[0]
        if not isinstance(engine, OpenEngine):
            raise StepError(
                given="a loop of one's own over a Batch",
                found="its strategy takes whole steps: it runs backward itself, or has to know when "
                "the optimizer steps",
                fix="step = shoal.Step(model, optimizer, task), then step(batch)",
            )
        return engine

    def _engines(self, model: nn.Module | None) -> list[Engine]:
        known = self._world.engines if self._world is not None else []
        return [engine for engine in known if model in (None, engine.module)]


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

"""One global batch on one rank, and its methods for custom training loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

import torch
from torch import Tensor, nn

from shoal._torch.autograd import averages
from shoal.data.coupling.step import CoupledStep
from shoal.data.gather import GatheredRows, gather_rows
from shoal.data.micro import CURRENT_DRAWS, Draws, MicroBatch
from shoal.data.noise import Noise
from shoal.data.step_result import StepResult
from shoal.distributed.rank_noise import RankNoise
from shoal.distributed.to_device import named_tensors
from shoal.util.errors import StepError

if TYPE_CHECKING:
    from shoal.distributed.world import World

Count: TypeAlias = "int | float | Tensor"
"""The number of samples or tokens in a sum; a tensor if it depends on the data."""

IN_A_LOOP = "for micro in batch: batch.backward(total=loss_sum, count=n)"


class BatchSource(Protocol):
    """The methods of a Loader that its batches call."""

    @property
    def measures_speed(self) -> bool:
        """See `Loader.measures_speed`."""
        ...

    def compare_ranks(self) -> None:
        """See `Loader.compare_ranks`."""

    def again(self, first: int, sizes: tuple[int, ...]) -> list[Any] | None:
        """See `Loader.again`."""
        ...

    def micros_of(self, rank: int, first: int, size: int) -> list[MicroBatch]:
        """See `Loader.micros_of`."""
        ...


class ManualLoop:
    """Runs backward and finishes batches in a custom training loop.

    The methods of this base class raise StepError, because no model of the World has been
    parallelized. `parallelize` provides an implementation.
    """

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
        """See `Batch.backward`."""
        raise not_one_model("no parallelized model")

    def finish(self, batch: Batch, model: nn.Module, *, clip: float | None) -> StepResult:
        """See `Batch.finish`."""
        raise not_one_model("no parallelized model")


class Batch:
    """One global batch on this rank: its micro-batches, for `Step` or a custom training loop.

    A Loader makes it. Iteration yields the micro-batches as the collate function returned them, on the
    device of the World; `len(batch)` is their number. A custom training loop is as exact as `Step`.

    Attributes:
        first: Position of the first sample of the global batch, in samples since the start of training.
        size: Number of samples in the global batch, over all ranks.
        share: Positions `(start, stop)` of this rank's samples, without `stop`; an empty range if it
            has only padding samples. With groups of samples and several micro-batches, samples of other
            ranks may be between these positions; see `ranges`.
        ranges: Ranges of positions that this rank's samples have: start, stop, start, stop, ….
        epoch: Epoch of its samples, from 0.
        ends_epoch: True for the last batch of an epoch.
        processed: True once a step has processed the batch.
        wait: Seconds that the rank waited for this batch.
        seed: Seed of the random numbers of its samples.
        micros: Micro-batches with their positions and weights; `micro` is the current one in a loop
            over the batch.
        noise: Random numbers of the current micro-batch's samples, a `Noise`.

    Examples:
        >>> import torch
        >>> with shoal.init() as world:
        ...     model = shoal.parallelize(torch.nn.Linear(4, 1), world)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     loader = shoal.Loader((torch.ones(8, 4), torch.ones(8, 1)), world, batch_size=8)
        ...     for batch in loader.epochs(1):
        ...         for x, y in batch:
        ...             total = torch.nn.functional.mse_loss(model(x), y, reduction="sum")
        ...             batch.backward(total=total, count=len(y))
        ...         result = batch.finish(model, clip=1.0)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> result.counted
        8.0
    """

    __slots__ = (
        "__weakref__",
        "_current",
        "_loader",
        "_looping",
        "_noise",
        "_world",
        "backwards",
        "ends_epoch",
        "epoch",
        "first",
        "loss_sum",
        "micros",
        "processed",
        "resumes_at",
        "seed",
        "size",
        "wait",
    )

    def __init__(
        self,
        first: int,
        size: int,
        micros: Sequence[MicroBatch],
        *,
        seed: int,
        wait: float = 0.0,
        world: World | None = None,
        loader: BatchSource | None = None,
        epoch: int = 0,
        ends_epoch: bool = False,
    ) -> None:
        self.first = first
        self.epoch = epoch
        self.ends_epoch = ends_epoch
        self.size = size
        self.micros = micros
        self.seed = seed
        self.wait = wait
        self.processed = False
        self.resumes_at = first
        """The position at which a resumed run begins if no step has processed the batch."""
        self._world = world
        self._loader = loader
        self._current = -1
        self._looping = False
        self.backwards: list[object] = []
        """The engines that `backward` has run on, once for each micro-batch."""
        self._noise: Noise | None = None
        self.loss_sum: Tensor | float | None = None
        """The sum of this rank's losses that `averaged` was called with; None before."""

    @property
    def share(self) -> tuple[int, int]:
        """The positions [start, stop) of this rank's samples; empty if it has only padding samples."""
        return self.ranges[0], self.ranges[-1]

    @property
    def ranges(self) -> tuple[int, ...]:
        """The ranges of positions that this rank's samples have: start, stop, start, stop, …."""
        found: list[int] = []
        for micro in self.micros:
            if micro.weight:
                if not found or found[-1] != micro.first:
                    found += (micro.first, micro.first)
                found[-1] = micro.first + micro.samples
        return tuple(found) or (self.first, self.first)

    def __len__(self) -> int:
        """The number of micro-batches."""
        return len(self.micros)

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches as the collate function returned them."""
        step = None if self._world is None else self._world.service(CoupledStep)
        if step is not None and self._world is not None:
            self._world.service(RankNoise).begin()
            step.drop()  # of a batch that was skipped
        try:
            for index, micro in enumerate(self.micros):
                self._current, self._looping = index, True
                self._noise = None
                CURRENT_DRAWS.set(Draws(micro, self.seed))
                if step is not None:
                    step.begin(micro)
                yield micro.value
            self._current = -1
        finally:
            self._looping = False
            CURRENT_DRAWS.set(None)
            if step is not None:
                step.begin(None)

    def averaged(self, total: Tensor) -> Tensor:
        """Return the loss whose gradients, averaged over ranks, are those of the global batch's mean.

        For tools that average gradients over ranks and add those of micro-batches: DDP, FSDP2,
        Accelerate, Lightning. Ranks may have different numbers of samples; a padding sample adds
        nothing. A parallelized model uses `backward` instead.

        Args:
            total: Sum of the losses of the current micro-batch's samples, without dimensions.

        Returns:
            The loss to call `backward` on, without dimensions.

        Raises:
            StepError: If no loop over the batch is running, `total` is not a single number, or its last
                operation shows that it is a mean.

        Examples:
            >>> import torch
            >>> with shoal.init() as world:
            ...     loader = shoal.Loader((torch.ones(8, 4),), world, batch_size=4)
            ...     for batch in loader.epochs(1):
            ...         for (x,) in batch:
            ...             loss = batch.averaged(x.sum())
            >>> loss
            tensor(4.)
        """
        _check_sum(total, self.micro)
        weight = self.micro.weight
        self.loss_sum = (0.0 if self.loss_sum is None else self.loss_sum) + total.detach() * weight
        ranks = 1 if self._world is None else self._world.data_size
        return total * (weight * ranks / self.size)

    @property
    def has_more(self) -> bool:
        """Whether a loop over the batch is running, with micro-batches still to come."""
        return self._looping and self._current < len(self.micros) - 1

    @property
    def micro(self) -> MicroBatch:
        """The current micro-batch of the loop `for … in batch`, with its positions and weight."""
        if self._current < 0:
            raise StepError(
                given="batch.backward, batch.micro or batch.noise outside a loop over the batch",
                found="there is no current micro-batch",
                fix=IN_A_LOOP,
            )
        return self.micros[self._current]

    @property
    def noise(self) -> Noise:
        """The per-position random numbers of the current micro-batch; draws continue a stream."""
        micro = self.micro
        if self._noise is None:
            self._noise = micro.noise(self.seed)
        return self._noise

    def gather(self, tensor: Tensor) -> GatheredRows:
        """Return the rows of `tensor` from all data-parallel ranks; see `shoal.gather`. Collective.

        Args:
            tensor: Tensor of shape (rows, …); the number of rows may differ between ranks.

        Returns:
            The rows of all data-parallel ranks, and the index of this rank's first row.

        Raises:
            StepError: If no loop over the batch is running.
        """
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

        Pass either `total` or `mean`, by keyword; pass `total` if the count may be 0, since there is no
        mean then.

        Args:
            positional: Not allowed: a positional argument raises StepError.
            total: Sum of the losses of the micro-batch (`reduction="sum"`), a tensor without
                dimensions. Default: None.
            mean: Mean of the losses of the micro-batch, a tensor without dimensions. Default: None.
            count: Number of samples or tokens in the sum or the mean. Required.
            model: Model to train; required if several have been parallelized. Default: None.

        Raises:
            StepError: If neither `total` nor `mean` is given, or if the last operation of the loss
                shows that `total` is a mean or `mean` is a sum; if the previous batch was not finished;
                if its gradients were not cleared after `optimizer.step()`, or were cleared before it;
                if a Step over the model has options that a loop ignores.
            AgreementError: On all ranks, at the first batch of a Loader, if the ranks have different
                data.
        """
        self._manual_loop.backward(self, positional, total=total, mean=mean, count=count, model=model)

    def finish(self, model: nn.Module, *, clip: float | None = None) -> StepResult:
        """Turn the gradients into those of `Σ loss / Σ count` over the global batch, and clip them.

        Args:
            model: Model whose gradients `backward` computed.
            clip: Largest norm of the gradients, above 0. `None` does not clip. Default: None.

        Returns:
            The global mean loss, the gradient norm before clipping and the count.

        Raises:
            StepError: If `backward` was not called once for each micro-batch; if the loss function
                of a Step over this model returns a mean (at the first batch); or if the loss or the
                gradients are not finite. In the last case, the gradients are dropped and the
                parameters do not change.
        """
        return self._manual_loop.finish(self, model, clip=clip)

    def compare_ranks(self) -> None:
        """Raise AgreementError, at a Loader's first batch, if ranks' data differ. Collective."""
        if self._loader is not None:
            self._loader.compare_ranks()

    def again(self, first: int, sizes: tuple[int, ...]) -> list[Any] | None:
        """Return micro-batches of `sizes` samples each, collated again; see `Loader.again`."""
        return None if self._loader is None else self._loader.again(first, sizes)

    def not_finite(self, *, alone: bool) -> str:
        """Return which of its values are not finite; an empty string if all are.

        Collective, and the same on all ranks, unless `alone`.
        """
        found = next(
            (
                f"{name} has values that are not finite, among samples {micro.first:,} to "
                f"{micro.first + micro.samples - 1:,}"
                for micro in self.micros
                for name, tensor in named_tensors(micro.value, "batch")
                if tensor.layout == torch.strided and not bool(torch.isfinite(tensor.detach()).all())
            ),
            "",
        )
        if alone or self._world is None:
            return found
        return next(filter(None, self._world.gather(found)), "")

    @property
    def measures_speed(self) -> bool:
        """Whether the Loader gives slower ranks fewer samples."""
        return self._loader is not None and self._loader.measures_speed

    def micros_of(self, rank: int) -> list[MicroBatch]:
        """Return the virtual ranks that another rank computes; see `Loader.micros_of`."""
        if self._loader is None:
            raise NotImplementedError("a batch that no Loader has made")
        return self._loader.micros_of(rank, self.first, self.size)

    @property
    def _manual_loop(self) -> ManualLoop:
        return (self._world and self._world.provided(ManualLoop)) or ManualLoop()


def _check_sum(total: object, micro: MicroBatch) -> None:
    """Raise StepError if `total` can't be the sum of the losses of a micro-batch."""
    if not isinstance(total, Tensor) or total.dim():
        found = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        found = f"a tensor without dimensions is needed, not {found}"
    elif micro.samples > 1 and averages(total):
        found = "the last operation of the loss shows that it is a mean, not a sum"
    else:
        return
    raise StepError(
        given="batch.averaged(loss)", found=found, fix="use reduction='sum' in the loss function"
    )


def not_one_model(found: str) -> StepError:
    """Return the error for a loop over a Batch whose model is not known."""
    return StepError(
        given="a custom training loop over a Batch",
        found=found,
        fix="batch.backward(total=loss_sum, count=n, model=model) with "
        "model = shoal.parallelize(Model(), world)",
    )

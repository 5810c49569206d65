"""Gradient compression for DDP: 16 bits, 8 bits, low rank (PowerSGD), and the largest elements (TopK).

Each bucket of DDP's reducer is compressed during backward, on the thread that runs it, so all ranks
call the same collectives in the same order, however many buckets there are. (Collectives in callbacks
of Gloo's threads do not have that order, and hang.) The residual that a method leaves out is added to
the next gradient, its error feedback (Seide et al. 2014; Karimireddy et al. 2019).

The results differ from those of one process: the residual depends on the ranks' local batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shoal._torch import foreach
from shoal.strategies.data_parallel.compressed_collectives import CountedCollectives, joined, put_back
from shoal.util.arguments import check_integer, check_number
from shoal.util.errors import StepError

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BLOCK = 1024
"""Number of elements with one scale in "int8"."""
_LEVELS = 127


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Low-rank gradient compression: matrices as products of two narrow ones (Vogels et al. 2019).

    Args:
        rank: Rank of the approximation, at least 1. A larger rank is more exact and sends more bytes.
            Default: 4.
        warmup_steps: Number of steps at the start without compression, because gradients are large and
            change fast at first. Default: 10.

    Raises:
        StepError: If an argument is not an integer or too small.

    Examples:
        >>> strategy = shoal.DDP(compression=shoal.PowerSGD(rank=2))
    """

    rank: int = 4
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        for option, value, least in (("rank", self.rank, 1), ("warmup_steps", self.warmup_steps, 0)):
            check_integer(StepError, "shoal.PowerSGD", option, value, least)


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Gradient compression that sends only the largest elements (Aji and Heafield 2017).

    Args:
        ratio: Fraction of the elements of each bucket to send, in (0, 1]. Default: 0.01.

    Raises:
        StepError: If `ratio` is out of range.

    Examples:
        >>> strategy = shoal.DDP(compression=shoal.TopK(ratio=0.05))
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_number(StepError, "shoal.TopK", "ratio", self.ratio, above=True, most=1, usual=0.01)


Compress: TypeAlias = str | PowerSGD | TopK
"""Values of `shoal.DDP(compression=…)`: "fp16", "bf16", "int8", "auto", or options."""


class Bucket(NamedTuple):
    """Gradients that are ready, of one dtype on one device, and the names of their parameters.

    They are multiplied by `scale`, the loss scale of fp16, which differs from step to step.
    """

    names: Sequence[str]
    gradients: Sequence[Tensor]
    scale: float = 1.0


def check_compression(compress: object) -> Compress:
    """Return `compress`, or raise StepError if it is not a method."""
    if isinstance(compress, PowerSGD | TopK) or compress in (*HALVES, "int8", "auto"):
        return compress
    raise StepError(
        given=f"shoal.DDP(compression={compress!r})",
        found="the compression methods are 'fp16', 'bf16', 'int8', shoal.PowerSGD(…), "
        "shoal.TopK(…) and 'auto'",
        fix="use shoal.DDP(compression='auto'), which measures the network and chooses",
    )


def method(compress: Compress) -> CompressionMethod:
    """Return the implementation. "auto" must be resolved before."""
    if isinstance(compress, PowerSGD):
        return PowerSGDMethod(compress)
    if isinstance(compress, TopK):
        return TopKMethod(compress)
    return Int8Blocks() if compress == "int8" else HalfPrecision(HALVES[compress])


def reduce(chosen: CompressionMethod | None, bucket: Bucket, wire: CountedCollectives) -> None:
    """Average the bucket over ranks with `chosen`, or exactly if that is None.

    A value that is not finite on one rank is not finite on any. Raises StepError for gradients that are
    not real floating-point numbers.
    """
    dtype = bucket.gradients[0].dtype
    if not dtype.is_floating_point:
        raise StepError(
            given=f"compression=… for gradients of {str(dtype).removeprefix('torch.')}",
            found="only gradients of real floating-point numbers can be compressed",
            fix="freeze these parameters, or leave compression out",
        )
    if chosen is None:
        put_back(wire.mean(joined(bucket.gradients)), bucket.gradients)
    else:
        chosen.reduce(bucket, wire)


class CompressionMethod(ABC):
    """Means over ranks with fewer bytes, with error feedback: the residual of each parameter.

    It is added to the parameter's next gradient. Stored without the loss scale, since that of the next
    step may differ.
    """

    def __init__(self) -> None:
        self.left: dict[str, Tensor] = {}
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        """Values that were replaced since the last completed step, since a step may fail."""

    @abstractmethod
    def reduce(self, bucket: Bucket, wire: CountedCollectives) -> None:
        """Replace the gradients by their approximate means over the ranks. Collective."""

    def synchronize(self, wire: CountedCollectives) -> None:
        """Replace each residual by its mean over ranks, which contributes the same to the next mean."""
        for name in sorted(self.left):
            wire.mean(self.left[name])

    def state(self) -> dict[str, Any]:
        """Return the residuals, by name, if there are any."""
        return {"left": dict(self.left)} if self.left else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the value that `state` returned, on any number of ranks."""
        self.left = {name: value.clone() for name, value in state.get("left", {}).items()}

    def keep(self, unused: Sequence[str]) -> None:
        """Keep the residuals since the last call, except those of parameters that no rank has used."""
        skipped = set(unused)
        self._restore([each for each in self._before if each[0] is self.left and each[1] in skipped])
        self._before.clear()

    def forget(self) -> None:
        """Restore the residuals from before this step."""
        self._restore(self._before)
        self._before.clear()

    def _restore(self, entries: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
        for table, name, value in reversed(entries):
            if value is None:
                table.pop(name, None)
            else:
                table[name] = value

    def _set(self, table: dict[str, Any], name: str, value: Any) -> None:
        self._before.append((table, name, table.get(name)))
        table[name] = value

    def _with_left(self, bucket: Bucket) -> Tensor:
        """Return the sums of gradients and residuals of `bucket` as one tensor."""
        flat = joined(bucket.gradients)
        parts = flat.split([gradient.numel() for gradient in bucket.gradients])
        known = [
            (part, self.left[name].to(flat).reshape(-1))
            for name, part in zip(bucket.names, parts, strict=True)
            if name in self.left
        ]
        if known:
            own, left = zip(*known, strict=True)
            foreach.add_(own, left, alpha=bucket.scale)
        return flat

    def _leave(self, bucket: Bucket, rest: Tensor) -> None:
        """Store the residual `rest`, flattened like the gradients; zeros if it is not finite."""
        rest = torch.where(rest.isfinite().all(), rest, 0.0)  # decided on the device, without a wait
        sizes = [gradient.numel() for gradient in bucket.gradients]
        for name, gradient, part in zip(bucket.names, bucket.gradients, rest.split(sizes), strict=True):
            self._set(self.left, name, part.view_as(gradient) / bucket.scale)


class HalfPrecision(CompressionMethod):
    """Sums in 16 bits: half the bytes, without error feedback."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def reduce(self, bucket: Bucket, wire: CountedCollectives) -> None:
        """Average in 16 bits. Divides before summing, so that sums don't overflow."""
        flat = (joined(bucket.gradients) / wire.size).to(self._dtype)
        put_back(wire.mean(flat) * wire.size, bucket.gradients)


class Int8Blocks(CompressionMethod):
    """8 bits per element and a scale per block: a quarter of the bytes of float32.

    Ranks exchange parts of the bucket, each rank sums one part, and all gather the sums, as in an
    all-reduce, but with numbers that cannot overflow.
    """

    def reduce(self, bucket: Bucket, wire: CountedCollectives) -> None:
        """Average in 8 bits."""
        wanted = self._with_left(bucket)
        count = wanted.numel()
        length = math.ceil(count / (wire.size * BLOCK)) * BLOCK
        padded = torch.nn.functional.pad(wanted, (0, length * wire.size - count))
        levels, scales = _quantised(padded.view(wire.size, length))
        rest = padded.view(wire.size, length) - _restored(levels, scales, wanted.dtype)
        theirs = _restored(wire.swap(levels), wire.swap(scales), wanted.dtype)
        total = theirs.sum(0, keepdim=True) / wire.size
        levels, scales = _quantised(total)
        # Only this rank rounds this part a second time, so the error counts 1/size in the mean.
        rest[wire.rank] += (total - _restored(levels, scales, wanted.dtype))[0] * wire.size
        gathered = zip(wire.gather(levels), wire.gather(scales), strict=True)
        means = torch.cat([_restored(*each, wanted.dtype).view(-1) for each in gathered])
        self._leave(bucket, rest.view(-1)[:count])
        put_back(means[:count], bucket.gradients)


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels in int8 and a scale per block, NaN for a block with values that are not finite."""
    blocks = rows.view(len(rows), -1, BLOCK)
    # In 16 bits a scale may be rounded so far that the largest element is beyond the last level.
    scales = blocks.abs().amax(2, keepdim=True).float() / _LEVELS
    scales = torch.where(blocks.isfinite().all(2, keepdim=True), scales, math.nan)
    steps = torch.where(scales > 0, blocks / scales, 0.0).clamp_(-_LEVELS, _LEVELS)
    return steps.round_().to(torch.int8).view(len(rows), -1), scales.squeeze(2)


def _restored(levels: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    blocks = levels.view(len(levels), -1, BLOCK).to(wide) * scales.unsqueeze(2)
    return blocks.to(dtype).view(len(levels), -1)


class TopKMethod(CompressionMethod):
    """The elements of the largest absolute value, with their positions; the others are the residual."""

    def __init__(self, options: TopK) -> None:
        super().__init__()
        self._ratio = options.ratio

    def reduce(self, bucket: Bucket, wire: CountedCollectives) -> None:
        """Average the largest elements."""
        wanted = self._with_left(bucket)
        count = min(max(1, round(self._ratio * wanted.numel())), wanted.numel())
        places = wanted.nan_to_num(math.inf, math.inf, -math.inf).abs().topk(count).indices
        values = wanted[places]
        rest = wanted.index_fill(0, places, 0.0)
        means = torch.zeros_like(wanted)
        # A bucket has far fewer than 2^31 elements.
        for theirs, at in zip(wire.gather(values), wire.gather(places.int()), strict=True):
            means.index_add_(0, at, theirs)
        self._leave(bucket, rest)
        put_back(means / wire.size, bucket.gradients)


class PowerSGDMethod(CompressionMethod):
    """PowerSGD: each matrix M as P Q^T, with one power iteration per step from the last result.

    Vectors, and matrices that would not get smaller, are averaged uncompressed.
    """

    def __init__(self, options: PowerSGD) -> None:
        super().__init__()
        self._rank = options.rank
        self._whole = options.warmup_steps
        self._taken = 0
        """Number of steps that earlier attempts of the run have taken."""
        self._steps: dict[str, int] = {}
        self._bases: dict[str, Tensor] = {}

    def reduce(self, bucket: Bucket, wire: CountedCollectives) -> None:
        """Average low-rank approximations after the warm-up."""
        first = bucket.names[0]
        taken = self._steps.get(first, self._taken) + 1
        self._set(self._steps, first, taken)
        matrices = [
            (name, gradient)
            for name, gradient in zip(bucket.names, bucket.gradients, strict=True)
            if taken > self._whole and self._pays(gradient)
        ]
        compressed = {name for name, _ in matrices}
        others = [
            (name, gradient)
            for name, gradient in zip(bucket.names, bucket.gradients, strict=True)
            if name not in compressed
        ]
        if others:
            names, gradients = zip(*others, strict=True)
            self._send_whole(Bucket(names, gradients, bucket.scale), wire)
        if matrices:
            self._approximate(matrices, bucket.scale, wire)

    def _send_whole(self, bucket: Bucket, wire: CountedCollectives) -> None:
        """Average uncompressed, with the residuals of an earlier method if a run was resumed."""
        put_back(wire.mean(self._with_left(bucket)), bucket.gradients)
        for name in bucket.names:
            if name in self.left:
                self._set(self.left, name, torch.zeros_like(self.left[name]))

    def _approximate(
        self, matrices: Sequence[tuple[str, Tensor]], scale: float, wire: CountedCollectives
    ) -> None:
        wanted = []
        for name, gradient in matrices:
            left = self.left.get(name)
            whole = gradient if left is None else gradient.add(left.to(gradient), alpha=scale)
            wanted.append(whole.flatten(1))
        bases = [self._basis(name, matrix) for (name, _), matrix in zip(matrices, wanted, strict=True)]
        columns = [matrix @ basis for matrix, basis in zip(wanted, bases, strict=True)]
        put_back(wire.mean(joined(columns)), columns)
        columns = [_orthogonal(each.nan_to_num()) for each in columns]
        rows = [matrix.T @ column for matrix, column in zip(wanted, columns, strict=True)]
        put_back(wire.mean(joined(rows)), rows)
        found = zip(matrices, wanted, bases, columns, rows, strict=True)
        for (name, gradient), matrix, basis, column, row in found:
            mean = column @ row.T
            self._leave(Bucket([name], [gradient], scale), (matrix - mean).reshape(-1))
            finite = row.isfinite().all()
            self._set(self._bases, name, torch.where(finite, row, basis))
            gradient.copy_(torch.where(finite, mean, math.nan).view_as(gradient))

    def state(self) -> dict[str, Any]:
        """Return the residuals, the bases, and the number of steps that the buckets have seen."""
        return {
            **super().state(),
            "bases": dict(self._bases),
            "steps": max(self._steps.values(), default=self._taken),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state. The buckets may be other ones on a different number of ranks."""
        super().load_state(state)
        self._bases = {name: value.clone() for name, value in state.get("bases", {}).items()}
        self._taken = state.get("steps", 0)
        self._steps = {}

    def _pays(self, gradient: Tensor) -> bool:
        if gradient.dim() < 2:
            return False
        rows, columns = len(gradient), gradient.numel() // max(1, len(gradient))
        return (rows + columns) * self._rank < rows * columns

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        known = self._bases.get(name)
        if known is None:
            # The same on all ranks, without communication.
            generator = torch.Generator().manual_seed(sum(name.encode()) + matrix.shape[1])
            known = torch.randn(matrix.shape[1], self._rank, generator=generator)
        return known.to(matrix)


def _orthogonal(columns: Tensor) -> Tensor:
    """Return orthogonal columns with the same span. torch has no QR in 16 bits."""
    wide = columns.to(torch.promote_types(columns.dtype, torch.float32))
    found: Tensor = torch.linalg.qr(wide)[0]
    return found.to(columns)

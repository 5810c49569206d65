"""Fewer bytes for the gradients of replicas: lower precision, few bits, low rank, the largest only.

Each bucket of DDP's reducer passes through here while backward goes on, on the thread that runs it: so
all ranks call the same collectives in the same order, however many buckets there are. (Collectives in
callbacks of Gloo's threads don't have that order, and hang.) What a method leaves out is kept and added
to the next gradient, its error feedback (Seide et al. 2014; Karimireddy et al. 2019).

Not in the promise that one process is the specification: what is lost depends on the ranks' shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from shoal._torch import foreach
from shoal.strategies.data_parallel.compressed_collectives import Wire, joined, put_back
from shoal.util.errors import StepError

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BLOCK = 1024
"""Elements that share the scale of "int8"."""
_LEVELS = 127


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Gradients of matrices as products of two narrow ones (Vogels et al. 2019), of rank `rank`.

    The first `warmup_steps` steps are not compressed: gradients are large and change fast there.
    """

    rank: int = 4
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        for option, value, least in (("rank", self.rank, 1), ("warmup_steps", self.warmup_steps, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise StepError(
                    given=f"shoal.PowerSGD({option}={value!r})",
                    found=f"it is a number, {least} or more",
                    fix="shoal.PowerSGD(rank=4, warmup_steps=10)",
                )


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Of each bucket the `ratio` of its elements that are largest (Aji and Heafield 2017)."""

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, int | float) or not 0 < self.ratio <= 1:
            raise StepError(
                given=f"shoal.TopK(ratio={self.ratio!r})",
                found="the share of elements that is sent is in (0, 1]",
                fix="shoal.TopK(ratio=0.01)",
            )


Compress: TypeAlias = str | PowerSGD | TopK
"""What `shoal.DDP(compression=…)` takes: "fp16", "bf16", "int8", "auto", or options."""


class Bucket(NamedTuple):
    """Gradients that are ready, of parameters of these names; of one dtype, on one device.

    They are multiplied by `scale`, that of the loss with fp16, which differs from step to step.
    """

    names: Sequence[str]
    gradients: Sequence[Tensor]
    scale: float = 1.0


class Method(Protocol):
    """A way to take means over ranks with fewer bytes."""

    def reduce(self, bucket: Bucket, wire: Wire) -> None:
        """Replace the gradients by their means over the ranks, nearly. Collective."""
        ...

    def synchronize(self, wire: Wire) -> None:
        """Make what is kept the same on all ranks, without changing its mean. Collective."""
        ...

    def state(self) -> dict[str, Any]:
        """What is kept, by names of parameters."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned, on any number of ranks."""
        ...

    def keep(self, unused: Sequence[str]) -> None:
        """The means since the last time are taken, but for those of parameters that nobody has used."""
        ...

    def forget(self) -> None:
        """They are not: what is kept is what was kept before them."""
        ...


def check_compression(compress: object) -> Compress:
    """`compress` if it names a method. Raises StepError."""
    if isinstance(compress, PowerSGD | TopK) or compress in (*HALVES, "int8", "auto"):
        return compress
    raise StepError(
        given=f"shoal.DDP(compression={compress!r})",
        found="the ways to compress gradients are 'fp16', 'bf16', 'int8', shoal.PowerSGD(…), "
        "shoal.TopK(…) and 'auto'",
        fix="shoal.DDP(compression='auto'), which measures the link and chooses",
    )


def method(compress: Compress) -> Method:
    """What does it; "auto" has to be decided before."""
    if isinstance(compress, PowerSGD):
        return LowRank(compress)
    if isinstance(compress, TopK):
        return Largest(compress)
    return Bits() if compress == "int8" else Half(HALVES[compress])


def reduce(chosen: Method | None, bucket: Bucket, wire: Wire) -> None:
    """Take means as `chosen` does it, and exactly where that is None.

    What is not finite on any rank is seen by all. Raises StepError for what are no real numbers.
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


class Half:
    """Sums in 16 bits: half the bytes. Nothing is kept."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def reduce(self, bucket: Bucket, wire: Wire) -> None:
        """See the protocol. Divided first, so that a sum does not overflow where no part does."""
        flat = (joined(bucket.gradients) / wire.size).to(self._dtype)
        put_back(wire.mean(flat) * wire.size, bucket.gradients)

    def synchronize(self, wire: Wire) -> None:
        """Nothing is kept."""

    def state(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def keep(self, unused: Sequence[str]) -> None:
        """Nothing is kept."""

    def forget(self) -> None:
        """Nothing is kept."""


class Feedback:
    """What was left out so far, of each parameter, to be added to its next gradient.

    Kept without the scale that the loss had, since the next one may have another.
    """

    def __init__(self) -> None:
        self.left: dict[str, Tensor] = {}
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        """What stood where something was kept since the last step that was taken: a step may fail."""

    def synchronize(self, wire: Wire) -> None:
        """Each rank keeps the mean of what all have left out: in the next mean it counts the same."""
        for name in sorted(self.left):
            wire.mean(self.left[name])

    def state(self) -> dict[str, Any]:
        """What was left out, by name."""
        return {"left": dict(self.left)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what was left out."""
        self.left = {name: value.clone() for name, value in state.get("left", {}).items()}

    def keep(self, unused: Sequence[str]) -> None:
        """See the protocol."""
        nobodys = set(unused)
        self._go_back([each for each in self._before if each[0] is self.left and each[1] in nobodys])
        self._before.clear()

    def forget(self) -> None:
        """See the protocol."""
        self._go_back(self._before)
        self._before.clear()

    def _go_back(self, entries: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
        for table, name, value in reversed(entries):
            if value is None:
                table.pop(name, None)
            else:
                table[name] = value

    def _set(self, table: dict[str, Any], name: str, value: Any) -> None:
        self._before.append((table, name, table.get(name)))
        table[name] = value

    def _with_left(self, bucket: Bucket) -> Tensor:
        """The gradients of `bucket` and what was left of them, joined."""
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
        """Keep `rest`, joined like the gradients, unless it is not finite: that must not stay."""
        if not bool(rest.isfinite().all()):
            rest = torch.zeros_like(rest)
        sizes = [gradient.numel() for gradient in bucket.gradients]
        for name, gradient, part in zip(bucket.names, bucket.gradients, rest.split(sizes), strict=True):
            self._set(self.left, name, part.view_as(gradient) / bucket.scale)


class Bits(Feedback):
    """8 bits per element and a scale for each block of them: a quarter of the bytes of float32.

    Ranks swap shares of the bucket, each sums one, and all gather the sums: as an all-reduce does it,
    but with numbers that can't overflow.
    """

    def reduce(self, bucket: Bucket, wire: Wire) -> None:
        """See the protocol."""
        wanted = self._with_left(bucket)
        count = wanted.numel()
        length = math.ceil(count / (wire.size * BLOCK)) * BLOCK
        padded = torch.nn.functional.pad(wanted, (0, length * wire.size - count))
        levels, scales = _quantised(padded.view(wire.size, length))
        rest = padded.view(wire.size, length) - _restored(levels, scales, wanted.dtype)
        theirs = _restored(wire.swap(levels), wire.swap(scales), wanted.dtype)
        total = theirs.sum(0, keepdim=True) / wire.size
        levels, scales = _quantised(total)
        # The second rounding is this rank's alone: in the mean it is one of as many.
        rest[wire.rank] += (total - _restored(levels, scales, wanted.dtype))[0] * wire.size
        gathered = zip(wire.gather(levels), wire.gather(scales), strict=True)
        means = torch.cat([_restored(*each, wanted.dtype).view(-1) for each in gathered])
        self._leave(bucket, rest.view(-1)[:count])
        put_back(means[:count], bucket.gradients)


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Levels in int8, and for each block its scale; NaN where it has something that is not finite."""
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


class Largest(Feedback):
    """The elements of the largest absolute value, with their places; the others are kept."""

    def __init__(self, options: TopK) -> None:
        super().__init__()
        self._share = options.ratio

    def reduce(self, bucket: Bucket, wire: Wire) -> None:
        """See the protocol."""
        wanted = self._with_left(bucket)
        count = min(max(1, round(self._share * wanted.numel())), wanted.numel())
        places = wanted.nan_to_num(math.inf, math.inf, -math.inf).abs().topk(count).indices
        values = wanted[places]
        rest = wanted.index_fill(0, places, 0.0)
        means = torch.zeros_like(wanted)
        # A bucket has far fewer than 2^31 elements.
        for theirs, at in zip(wire.gather(values), wire.gather(places.int()), strict=True):
            means.index_add_(0, at, theirs)
        self._leave(bucket, rest)
        put_back(means / wire.size, bucket.gradients)


class LowRank(Feedback):
    """Each matrix M as P Q^T: one round of the power method a step, begun where the last one ended.

    Vectors, and matrices that would not get smaller, are averaged as they are.
    """

    def __init__(self, options: PowerSGD) -> None:
        super().__init__()
        self._rank = options.rank
        self._whole = options.warmup_steps
        self._taken = 0
        """The steps that other attempts of the run have taken."""
        self._steps: dict[str, int] = {}
        self._bases: dict[str, Tensor] = {}

    def reduce(self, bucket: Bucket, wire: Wire) -> None:
        """See the protocol."""
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

    def _send_whole(self, bucket: Bucket, wire: Wire) -> None:
        """With what is left of them, if a run goes on from where another method was."""
        put_back(wire.mean(self._with_left(bucket)), bucket.gradients)
        for name in bucket.names:
            if name in self.left:
                self._set(self.left, name, torch.zeros_like(self.left[name]))

    def _approximate(self, matrices: Sequence[tuple[str, Tensor]], scale: float, wire: Wire) -> None:
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
        for (name, gradient), matrix, column, row in zip(matrices, wanted, columns, rows, strict=True):
            mean = column @ row.T
            self._leave(Bucket([name], [gradient], scale), (matrix - mean).reshape(-1))
            if bool(row.isfinite().all()):
                self._set(self._bases, name, row)
                gradient.copy_(mean.view_as(gradient))
            else:
                gradient.fill_(math.nan)

    def state(self) -> dict[str, Any]:
        """Besides, the bases, and how many steps each bucket has seen."""
        return {
            **super().state(),
            "bases": dict(self._bases),
            "steps": max(self._steps.values(), default=self._taken),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there; other ranks may cut other buckets."""
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
            # The same on all ranks, which don't meet for it.
            generator = torch.Generator().manual_seed(sum(name.encode()) + matrix.shape[1])
            known = torch.randn(matrix.shape[1], self._rank, generator=generator)
        return known.to(matrix)


def _orthogonal(columns: Tensor) -> Tensor:
    """Orthogonal columns of the same span; torch has no QR in 16 bits."""
    wide = columns.to(torch.promote_types(columns.dtype, torch.float32))
    found: Tensor = torch.linalg.qr(wide)[0]
    return found.to(columns)

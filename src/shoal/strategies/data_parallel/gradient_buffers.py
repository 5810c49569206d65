"""Room for gradients in flat tensors, which is used again in each step.

Memory that is freed and allocated in each step may cost more time than the additions: the allocator
returns it to the operating system, which clears each page at its next use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.util.errors import StepError

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, kw_only=True)
class GradientBuffers:
    """Room for one gradient of each parameter.

    `flats` has one tensor per bucket, padded to one chunk of equal size for each rank. `views` are the
    parts of the parameters, contiguous on any number of ranks, because a norm adds up in the order of
    memory.
    """

    flats: list[Tensor]
    views: list[Tensor]

    def zero(self) -> None:
        """Set all elements to 0."""
        for flat in self.flats:
            flat.zero_()

    def add(self, other: GradientBuffers) -> None:
        """Add the gradients of `other`."""
        for flat, addend in zip(self.flats, other.flats, strict=True):
            flat.add_(addend)


class BufferPool:
    """The buffers of a reducer: `take` gives some that are not in use, and `give_back` returns them."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._buckets = _grouped(parameters)
        self._free: list[GradientBuffers] = []

    def take(self) -> GradientBuffers:
        """Return buffers that contain zeros."""
        if not self._free:
            return self._new_buffers()
        buffers = self._free.pop()
        buffers.zero()
        return buffers

    def give_back(self, buffers: GradientBuffers) -> None:
        """Use them for another gradient."""
        self._free.append(buffers)

    def _new_buffers(self) -> GradientBuffers:
        flats: list[Tensor] = []
        views: dict[int, Tensor] = {}
        for bucket in self._buckets:
            sizes = [parameter.numel() for parameter in bucket]
            chunk = -(-sum(sizes) // self._ranks)
            flats.append(bucket[0].new_zeros(self._ranks * chunk))
            parts = flats[-1][: sum(sizes)].split(sizes)
            views.update((id(p), part.view(p.shape)) for p, part in zip(bucket, parts, strict=True))
        return GradientBuffers(flats=flats, views=[views[id(p)] for p in self._parameters])


class SingleGradients:
    """In a `with` block, raises StepError for a second gradient of a parameter in one backward pass.

    Autograd adds all gradients of a parameter before it accumulates them, except those of a nested
    backward pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._seen: set[int] | None = None
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._check)

    def __enter__(self) -> None:
        self._seen = set()

    def __exit__(self, *_: object) -> None:
        self._seen = None

    def _check(self, parameter: Tensor) -> None:
        if self._seen is None:
            return
        if id(parameter) in self._seen:
            raise StepError(
                given="exact='bits'",
                found="a parameter that receives two gradients in one backward pass; the order of sums "
                "would depend on the number of ranks",
                fix="use torch.utils.checkpoint.checkpoint(…, use_reentrant=False), and call no "
                "backward within a backward pass",
            )
        self._seen.add(id(parameter))


def _grouped(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in groups of one dtype, of about BUCKET_BYTES."""
    kinds: dict[torch.dtype, list[list[nn.Parameter]]] = {}
    for parameter in parameters:
        groups = kinds.setdefault(parameter.dtype, [[]])
        if sum(p.numel() for p in groups[-1]) * parameter.element_size() >= BUCKET_BYTES:
            groups.append([])
        groups[-1].append(parameter)
    return [group for groups in kinds.values() for group in groups]

"""compression="auto": measure each method on gradients like the model's, and choose one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.strategies.data_parallel.compressed_collectives import CountedCollectives
from shoal.strategies.data_parallel.compression import (
    Bucket,
    Compress,
    CompressionMethod,
    PowerSGD,
    method,
    reduce,
)
from shoal.util.clock import CLOCK, Clock
from shoal.util.decision import Decision

CANDIDATES: Sequence[Compress] = ("bf16", "int8", PowerSGD())
"""Methods that "auto" tries, in the order of increasing loss."""
WORTH = 0.75
"""Largest fraction of the uncompressed time that is worth the loss. Backward hides a part of the
communication time, but not the processor time of compression."""
GAIN = 0.95
"""The same fraction of the time of a method with less loss."""
_TRIALS = 3


def choose(
    gradients: Sequence[tuple[str, Tensor]], wire: CountedCollectives, clock: Clock = CLOCK
) -> Decision[Compress | None]:
    """Return the fastest method on this network, measured on gradients like these. Collective."""
    taken: dict[str, float] = {}
    best: Compress | None = None
    for each in (None, *CANDIDATES):
        seconds = _seconds(None if each is None else _eager(each), gradients, wire, clock)
        limit = WORTH if best is None else GAIN
        if each is None or seconds < limit * taken[str(best)]:
            best = each
        taken[str(each)] = seconds
    sent = sum(gradient.nbytes for _, gradient in gradients)
    times = ", ".join(
        f"{1e3 * seconds:.3g} ms {'uncompressed' if name == 'None' else f'with {name}'}"
        for name, seconds in taken.items()
    )
    return Decision(
        what="compression of gradients",
        value=best,
        reason=f"{sent / 1e6:.3g} MB took the slowest rank {times}",
        rejected={
            name: f"{1e3 * seconds:.3g} ms"
            for name, seconds in taken.items()
            if name not in (str(best), "None")
        },
    )


def _eager(compress: Compress) -> CompressionMethod:
    return method(replace(compress, warmup_steps=0) if isinstance(compress, PowerSGD) else compress)


def _seconds(
    chosen: CompressionMethod | None,
    gradients: Sequence[tuple[str, Tensor]],
    wire: CountedCollectives,
    clock: Clock,
) -> float:
    """Return the time of the slowest rank for the gradients, the fastest of a few trials."""
    bucket = Bucket([name for name, _ in gradients], [torch.randn_like(each) for _, each in gradients])
    taken = []
    for _ in range(_TRIALS):
        wire.gather(torch.zeros(1, device=bucket.gradients[0].device))  # all begin together
        begun = clock.now()
        reduce(chosen, bucket, wire)
        float(bucket.gradients[0].reshape(-1)[0])  # wait for the device
        taken.append(clock.now() - begun)
    mine = torch.tensor(min(taken), dtype=torch.float64, device=bucket.gradients[0].device)
    return max(float(each) for each in wire.gather(mine))


def first_bytes(named: Sequence[tuple[str, Tensor]], most: float) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the commonest real dtype up to `most` bytes, and at least one."""
    bytes_of: Counter[torch.dtype] = Counter()
    for _, tensor in named:
        if tensor.is_floating_point() and tensor.numel():
            bytes_of[tensor.dtype] += tensor.nbytes
    most_of = max(bytes_of, key=bytes_of.__getitem__, default=None)
    size = 0
    for name, tensor in named:
        if tensor.dtype == most_of and tensor.numel() and (not size or size + tensor.nbytes <= most):
            size += tensor.nbytes
            yield name, tensor

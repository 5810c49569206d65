"""Which compression is worth it over the link there is: tried on gradients like the model's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.strategies.data_parallel.compressed_collectives import Wire
from shoal.strategies.data_parallel.compression import (
    Bucket,
    Compress,
    Method,
    PowerSGD,
    method,
    reduce,
)
from shoal.util.decision import Decision

CANDIDATES: Sequence[Compress] = ("bf16", "int8", PowerSGD())
"""What "auto" tries, the mildest first."""
WORTH = 0.75
"""Of the time without any: taking more than this, it is not worth its loss. Backward hides a part of
the time on the wire, but not what the processor takes to make less of it."""
GAIN = 0.95
"""The same of what is milder."""
_TRIALS = 3


def choose(gradients: Sequence[tuple[str, Tensor]], wire: Wire) -> Decision[Compress | None]:
    """The way that is fastest over the link there is, tried on gradients like these. Collective."""
    taken: dict[str, float] = {}
    best: Compress | None = None
    for each in (None, *CANDIDATES):
        seconds = _seconds(None if each is None else _eager(each), gradients, wire)
        limit = WORTH if best is None else GAIN
        if each is None or seconds < limit * taken[str(best)]:
            best = each
        taken[str(each)] = seconds
    sent = sum(gradient.nbytes for _, gradient in gradients)
    times = ", ".join(
        f"{1e3 * seconds:.3g} ms {'as they are' if name == 'None' else f'by {name}'}"
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


def _eager(compress: Compress) -> Method:
    return method(replace(compress, warmup_steps=0) if isinstance(compress, PowerSGD) else compress)


def _seconds(chosen: Method | None, gradients: Sequence[tuple[str, Tensor]], wire: Wire) -> float:
    """The slowest rank's time for the gradients, the fastest of a few trials."""
    bucket = Bucket([name for name, _ in gradients], [torch.randn_like(each) for _, each in gradients])
    taken = []
    for _ in range(_TRIALS):
        wire.gather(torch.zeros(1, device=bucket.gradients[0].device))  # all begin together
        begun = time.perf_counter()
        reduce(chosen, bucket, wire)
        float(bucket.gradients[0].reshape(-1)[0])  # a device may not have ended yet
        taken.append(time.perf_counter() - begun)
    mine = torch.tensor(min(taken), dtype=torch.float64, device=bucket.gradients[0].device)
    return max(float(each) for each in wire.gather(mine))

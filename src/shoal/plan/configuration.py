"""One way to train a model: layout, micro-batch, recomputation, precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.distributed.layout import Layout

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Bytes of one parameter in each kind of memory, with Adam, and of collectives."""

    parameter: int
    """The parameter, with its copy in 16 bits if there is one."""
    gradient: int
    state: int
    activation: int
    gathered: int
    """A parameter that FSDP gathers."""
    reduced: int
    """A gradient that ranks sum."""


FORMATS = {
    "mixed": NumberFormat(parameter=6, gradient=4, state=8, activation=2, gathered=2, reduced=4),
    "fp16": NumberFormat(parameter=6, gradient=2, state=8, activation=2, gathered=2, reduced=2),
    "half": NumberFormat(parameter=2, gradient=2, state=4, activation=2, gathered=2, reduced=2),
    "fp32": NumberFormat(parameter=4, gradient=4, state=8, activation=4, gathered=4, reduced=4),
}
"""`mixed` computes in 16 bits; parameters, gradients and optimizer state are float32: 18 bytes. `fp16`
is the same with gradients in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """One way to train: how ranks divide the work, and what they store.

    `global_batch` and `micro_batch` are in samples. `overlap` says whether gradients are summed during
    the backward pass, `tensor_overlap` whether the sums of tensor parallelism in the backward pass run
    during the products for the gradients of weights. `stages` is the number of pipeline stages per rank
    (interleaved above 1). `split_points` and `schedule` are those of `shoal.Pipeline` for a traced
    module; without split points, its stages get equal FLOPs.
    """

    layout: Layout
    global_batch: int
    micro_batch: int
    recompute: Recompute = "none"
    precision: str = "mixed"
    sequence_parallel: bool = False
    stages: int = 1
    overlap: bool = True
    tensor_overlap: bool = False
    split_points: tuple[str, ...] = ()
    schedule: str = "1f1b"

    @property
    def numbers(self) -> NumberFormat:
        """The bytes of a number in each kind of memory."""
        return FORMATS[self.precision]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in one optimizer step."""
        return self.global_batch // (self.layout.data_size * self.micro_batch)

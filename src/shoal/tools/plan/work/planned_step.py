"""One way to train a model: layout, micro-batch, recomputation, precision; and its work as values.

The work of a step are FLOPs, bytes, operations and collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias, TypeVar

import numpy as np

from shoal.distributed.layout import Layout
from shoal.distributed.pipeline_schedules import SCHEDULES

Quantity: TypeAlias = Any
"""A number of one plan, or an array with the numbers of several plans."""


class Amounts:
    """Amounts by name, to add and to scale: the base of frozen dataclasses."""

    def __mul__(self, factor: Quantity) -> Self:
        return type(self)(*(each * factor for each in vars(self).values()))

    def __add__(self, other: Self) -> Self:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(ours + theirs for ours, theirs in pairs))


@dataclass(frozen=True)
class Work(Amounts):
    """FLOPs, bytes and operations."""

    products: Quantity = 0.0
    product_bytes: Quantity = 0.0
    attention: Quantity = 0.0
    traffic: Quantity = 0.0
    operations: Quantity = 0.0
    convolutions: Quantity = 0.0
    fp8_products: Quantity = 0.0


@dataclass(frozen=True)
class RankGroup:
    """Ranks of one collective: their number, and the distance of neighbours in rank order.

    Ranks fill one node after the other, so that `stride` and the devices of a node say how many
    members a node has.
    """

    size: Quantity
    stride: Quantity

    def per_node(self, devices: int) -> Quantity:
        """Return the members of the group that share a node."""
        return np.maximum(1, np.minimum(self.size, devices // self.stride))


@dataclass(frozen=True, kw_only=True)
class StepCollective:
    """A call of a collective, with the bytes of the full tensor.

    `wait` says what waits for it: "module" (the next operation), "stream" (the stream that calls it,
    on a CPU the next operation) or "update" (nothing before the update). A send and a receive have the
    other rank of the group (`peer`) and the number of the message. A receive stands where the message
    is first read.
    """

    operation: str
    count: int
    group: RankGroup
    wait: str
    peer: int = -1
    message: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkSegment:
    """The work of a rank until its next collective, in one part of the step (`moment`)."""

    moment: str
    work: Work
    collective: StepCollective | None = None


Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Bytes of one parameter in each kind of memory, with Adam, and of collectives.

    `fp8` is 1 if the linear layers in front of the output layer compute in 8 bits.
    """

    parameter: int
    """The parameter, with its copy in 16 bits if there is one."""
    gradient: int
    state: int
    activation: int
    gathered: int
    """A parameter that FSDP gathers."""
    reduced: int
    """A gradient that ranks sum."""
    fp8: int = 0


_MIXED = NumberFormat(parameter=6, gradient=4, state=8, activation=2, gathered=2, reduced=4)
FORMATS = {
    "mixed": _MIXED,
    "fp8": replace(_MIXED, fp8=1),
    "fp16": NumberFormat(parameter=6, gradient=2, state=8, activation=2, gathered=2, reduced=2),
    "half": NumberFormat(parameter=2, gradient=2, state=4, activation=2, gathered=2, reduced=2),
    "fp32": NumberFormat(parameter=4, gradient=4, state=8, activation=4, gathered=4, reduced=4),
}
"""`mixed` computes in 16 bits; parameters, gradients and optimizer state are float32: 18 bytes. `fp16`
is the same with gradients in 16 bits, and `fp8` with the products of layers in 8 bits, to which their
operands are cast."""

ANY_PRECISION = "any"
"""The precision with which a search tries all formats."""


Values = TypeVar("Values")


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """One way to train: how ranks divide the work, and what they store.

    `global_batch` and `micro_batch` are in samples. `overlap` says whether gradients are summed during
    the backward pass, `tensor_overlap` whether the sums of tensor parallelism in the backward pass run
    during the products for the gradients of weights, and `split_sends` whether its ranks split the
    logits and what a pipeline sends: Megatron-LM does both, Shoal neither. `score_bytes` are those that
    a loss needs of each score, by default in float32 the logarithm of its probability, the gradient of
    that and its own. `fused` says whether element-wise operations are compiled, as Megatron-LM's are
    anyway. `stages` is the number of pipeline stages per rank (interleaved above 1, also with the
    schedule "1f1b"). `split_points` and `schedule` are those of `shoal.Pipeline`; without split points,
    the stages of a traced module get equal FLOPs. `reshard_after_forward` and `accumulate` are those of
    `shoal.FSDP`.

    What follows from these options is computed for many plans at once too, whose options are arrays:
    `search.candidates.Candidates`.
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
    split_sends: bool = False
    score_bytes: int = 12
    fused: bool = False
    split_points: tuple[str, ...] = ()
    schedule: str = "1f1b"
    reshard_after_forward: bool = True
    accumulate: Literal["sharded", "whole"] = "sharded"

    @cached_property
    def numbers(self) -> Any:
        """The bytes of a number in each kind of memory."""
        return FORMATS[self.precision]

    @cached_property
    def folded(self) -> Quantity:
        """Whether the first and the last stage of a pipeline are on one rank."""
        return SCHEDULES[self.schedule].folded

    @cached_property
    def splits(self) -> Quantity:
        """Whether the backward pass has two parts, for the gradients of inputs and of weights."""
        return SCHEDULES[self.schedule].splits

    @property
    def micro_batches(self) -> Quantity:
        """Micro-batches of one rank in one optimizer step."""
        data = self.layout.replicate * self.layout.shard * self.layout.expert
        return self.global_batch // (data * self.micro_batch)

    def tabulate(self, columns: Sequence[str], function: Callable[[PlannedStep], Values]) -> Values:
        """Return a function that depends on these options only."""
        return function(self)

    def tokens(self, seq: int) -> Quantity:
        """Return the tokens of a micro-batch on one rank, with samples of `seq` tokens."""
        return self.micro_batch * seq / self.layout.context

    @property
    def eager(self) -> bool:
        """Whether each element-wise operation is a kernel of its own."""
        return not (self.fused or self.split_sends)

    @property
    def slices(self) -> Quantity:
        """The ranks that split what tensor parallelism alone does not."""
        return np.where(self.sequence_parallel, self.layout.tensor, 1)

    @property
    def sharded(self) -> Quantity:
        """Whether ranks shard the parameters."""
        return self.layout.shard > 1

    @property
    def shards(self) -> Quantity:
        """The ranks over which a parameter is sharded: FSDP uses the context axis too."""
        return np.where(self.sharded, self.layout.shard * self.layout.context, 1)

    @property
    def copies(self) -> Quantity:
        """The ranks that have the same part of the parameters and sum its gradients."""
        return self.layout.replicate * self.layout.shard * self.layout.context // self.shards

    @property
    def keeps_parameters(self) -> Quantity:
        """Whether sharded parameters stay gathered between the passes, as always in a pipeline."""
        return (self.layout.pipeline > 1) | (self.reshard_after_forward == 0)

    @property
    def keeps_gradients(self) -> Quantity:
        """Whether only the last micro-batch sums gradients over shards, as always in a pipeline."""
        return (self.layout.pipeline > 1) | (self.accumulate == "whole")

    @property
    def both_tables(self) -> Quantity:
        """Whether a rank has the embedding and the output layer."""
        return (self.layout.pipeline == 1) | self.folded

    @property
    def splits_logits(self) -> Quantity:
        """Whether ranks of tensor parallelism split the logits."""
        return (self.layout.pipeline == 1) | self.split_sends

    @property
    def strategy(self) -> str:
        """The strategy for `shoal.parallelize`; `…` is what depends on the module."""
        parts = []
        if self.recompute != "none":
            modules = 'modules=("….attention",)' if self.recompute == "selective" else ""
            parts.append(f"shoal.ActivationCheckpointing({modules})")
        if self.layout.context > 1:
            parts.append("shoal.ContextParallel()")
        if self.layout.tensor > 1:
            parts.append("shoal.TensorParallel(plan=…)")
        if self.layout.expert > 1:
            parts.append("shoal.ExpertParallel()")
        if self.layout.expert == 1 or self.layout.pipeline > 1 or self.sharded:
            parts.append(self._last_strategy())
        return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"

    def _last_strategy(self) -> str:
        if self.layout.pipeline > 1:
            stages = f", stages_per_rank={self.stages}" if self.stages > 1 else ""
            return f'shoal.Pipeline(example_args=…, schedule="{self.schedule}"{stages})'
        if self.layout.shard == 1:
            return "shoal.DDP()"
        options = [] if self.reshard_after_forward else ["reshard_after_forward=False"]
        options += ['accumulate="whole"'] if self.accumulate == "whole" else []
        return f"shoal.FSDP({', '.join(options)})"

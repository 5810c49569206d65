"""Schedules whose stages go down the ranks and up again, so that each rank has a stage of both halves.

torch has them too, but its import takes seconds. The backward pass of a stage may run in two parts, for
inputs and for weights; the second part fills gaps.
"""

from __future__ import annotations

from collections import Counter

from shoal.distributed.pipeline_action import PipelineAction


class _Actions:
    """The actions of one rank, whose stages are `down` and `up`."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.found: list[PipelineAction] = []
        self.forwards: Counter[int] = Counter()
        """Forward passes of each stage so far."""
        self._backwards: Counter[int] = Counter()
        self.waiting: list[PipelineAction] = []
        """Backward passes for weights whose inputs are done."""

    def forward(self, stage: int) -> None:
        """Add the next forward pass of a stage."""
        self.found.append(PipelineAction("F", stage, self.forwards[stage]))
        self.forwards[stage] += 1

    def backward(self, stage: int, *, split: bool) -> None:
        """Add the next backward pass of a stage, or only its part for inputs."""
        micro = self._backwards[stage]
        self._backwards[stage] += 1
        self.found.append(PipelineAction("I" if split else "B", stage, micro))
        if split:
            self.waiting.append(PipelineAction("W", stage, micro))

    def weights(self, *stages: int) -> None:
        """Add the first waiting backward pass for weights of one of these stages."""
        first = next(each for each in self.waiting if each.stage in stages)
        self.waiting.remove(first)
        self.found.append(first)

    def both_parts(self, stage: int) -> None:
        """Add the next backward pass of a stage as two actions."""
        self.backward(stage, split=True)
        self.weights(stage)


def zbv_actions(rank: int, ranks: int, micro_batches: int) -> tuple[PipelineAction, ...]:
    """Return the actions of a rank in ZBV, the V-shaped schedule of Qi et al. 2024 (arXiv:2405.15362).

    It is made for at least 2 * ranks - 1 micro-batches. With fewer, the actions of those that are
    missing are left out.
    """
    own = _Actions(rank, ranks)
    down, up, forwards = own.down, own.up, own.forwards
    count = max(micro_batches, 2 * ranks - 1)
    for _ in range(2 * (ranks - rank) - 1):
        own.forward(down)
    for _ in range(rank):
        own.forward(up)
        own.forward(down)
    for _ in range(ranks - rank):
        own.forward(up)
        own.both_parts(up)
    while forwards[up] < count:
        if forwards[down] < count:
            own.forward(down)
        own.both_parts(down)
        own.forward(up)
        own.both_parts(up)
    for _ in range(rank):
        own.backward(down, split=True)
        own.backward(up, split=True)
    for _ in range(ranks - rank):
        own.backward(down, split=True)
        own.weights(down)
    for each in sorted(own.waiting, key=lambda each: each.stage != up):
        own.weights(each.stage)
    return tuple(each for each in own.found if each.micro < micro_batches)


def dualpipev_actions(rank: int, ranks: int, micro_batches: int) -> tuple[PipelineAction, ...]:
    """Return the actions of a rank in DualPipeV (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2).

    Raises ValueError for fewer than 2 * ranks micro-batches.
    """
    if micro_batches < 2 * ranks:
        raise ValueError(f"DualPipeV needs at least {2 * ranks} micro-batches")
    own = _Actions(rank, ranks)
    down, up, below = own.down, own.up, ranks - rank - 1
    for _ in range(2 * below):
        own.forward(down)
    for _ in range(rank + 1):
        own.forward(down)
        own.forward(up)
    for _ in range(below):
        own.both_parts(up)
        own.forward(up)
    for _ in range(micro_batches - ranks):
        if own.forwards[down] < micro_batches:
            own.forward(down)
        own.backward(up, split=False)
        own.forward(up)
        own.backward(down, split=False)
    # The last backward passes of both stages; those of the second half leave weights for later.
    for place in range(2 * (rank + 1)):
        own.backward(down if place % 2 else up, split=place > rank)
    for _ in range(below):
        own.weights(down, up)
        own.backward(down, split=True)
    while own.waiting:
        own.weights(down, up)
    return tuple(own.found)

"""The schedules of the pipeline axis: the actions of each rank in their order.

They are not in `strategies`, which imports torch, so that `shoal plan` starts without it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shoal.util.errors import StepError


class PipelineAction(NamedTuple):
    """One action: "F" forward, "B" backward, "I" backward for inputs, "W" backward for weights."""

    kind: str
    stage: int
    micro: int


def stage_owners(stages: int, ranks: int, *, folded: bool) -> list[int]:
    """Return the rank within the pipeline that has each stage."""
    if folded:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


class _Actions:
    """The actions of one rank, if stages go down the ranks and up again: its own are `down` and `up`.

    The backward pass of a stage may run in two parts, for inputs and for weights; the second part fills
    gaps.
    """

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


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule of torch with `stages` per rank, exactly this number if `fixed`."""

    torchs: str
    stages: int = 1
    fixed: bool = True
    folded: bool = False
    """Whether rank 0 has the first stage and the last: the stages go down the ranks and up again."""
    splits: bool = False
    """Whether backward runs in two parts, for inputs and for weights."""

    def allows(self, per_rank: int) -> bool:
        """Return whether the schedule supports this number of stages per rank."""
        return per_rank == self.stages if self.fixed else per_rank >= 1


SCHEDULES = {
    "gpipe": PipelineSchedule("GPipe"),
    "1f1b": PipelineSchedule("1F1B"),
    "interleaved": PipelineSchedule("Interleaved1F1B", 2, fixed=False),
    "looped": PipelineSchedule("LoopedBFS", 2, fixed=False),
    "zero-bubble": PipelineSchedule("InterleavedZeroBubble", 2, fixed=False, splits=True),
    "zbv": PipelineSchedule("ZBVZeroBubble", 2, folded=True, splits=True),
    "dualpipev": PipelineSchedule("DualPipeV", 2, folded=True, splits=True),
}


_FOLDED = {"zbv": zbv_actions, "dualpipev": dualpipev_actions}


@lru_cache(maxsize=256)
def action_lists(
    schedule: str, ranks: int, per_rank: int, micro_batches: int
) -> tuple[tuple[PipelineAction, ...], ...]:
    """Return the actions of each rank in their order. Raise StepError for wrong micro-batches.

    torch's own lists would need its import, which takes seconds.
    """
    if SCHEDULES[schedule].fixed and per_rank == 1:
        ahead = [micro_batches if schedule == "gpipe" else ranks - rank for rank in range(ranks)]
        return tuple(_forwards_ahead(rank, some, micro_batches) for rank, some in enumerate(ahead))
    rounds = max(1, micro_batches // ranks)
    try:
        if schedule in _FOLDED:
            return tuple(_FOLDED[schedule](rank, ranks, micro_batches) for rank in range(ranks))
        if schedule == "looped":
            shape = ranks, per_rank, micro_batches
            return tuple(_breadth_first(rank, *shape) for rank in range(ranks))
        if micro_batches % rounds:
            raise ValueError(f"{micro_batches} micro-batches are not {rounds} rounds of equal size")
    except ValueError as error:
        raise micro_batches_refused(schedule, ranks, micro_batches, error) from None
    parts = ranks, per_rank, micro_batches // rounds, rounds
    return tuple(_interleaved(schedule, rank, *parts) for rank in range(ranks))


def _forwards_ahead(stage: int, ahead: int, micro_batches: int) -> tuple[PipelineAction, ...]:
    """Return up to `ahead` more forward than backward passes. torch lists 1F1B's last rank too late."""
    begun = min(ahead, micro_batches)
    works = [PipelineAction("F", stage, micro) for micro in range(begun)]
    for micro in range(micro_batches):
        works.append(PipelineAction("B", stage, micro))
        if begun + micro < micro_batches:
            works.append(PipelineAction("F", stage, begun + micro))
    return tuple(works)


def _breadth_first(
    rank: int, ranks: int, per_rank: int, micro_batches: int
) -> tuple[PipelineAction, ...]:
    """Return the passes of a rank, stage by stage (Lamy-Poirier 2022, arXiv:2211.05953)."""
    passes = [
        (place * ranks + rank, micro) for place in range(per_rank) for micro in range(micro_batches)
    ]
    forward = [PipelineAction("F", stage, micro) for stage, micro in passes]
    return (*forward, *(each._replace(kind="B") for each in reversed(forward)))


def _interleaved(
    schedule: str, rank: int, ranks: int, per_rank: int, size: int, rounds: int
) -> tuple[PipelineAction, ...]:
    """Return the actions of a rank in `rounds` of `size` micro-batches, of all its stages each.

    Interleaved 1F1B of Narayanan et al. 2021 (arXiv:2104.04473), with as many first passes as torch
    has; or ZB-H1 of Qi et al. 2023 (arXiv:2401.10241), in which a rank has half of the additional first
    passes, and runs the backward pass for weights `rank` passes later than that for inputs.
    """
    passes = [
        (place, number * size + micro)
        for number in range(rounds)
        for place in range(per_rank)
        for micro in range(size)
    ]
    forward = [PipelineAction("F", place * ranks + rank, micro) for place, micro in passes]
    backward = [
        PipelineAction("B", (per_rank - 1 - place) * ranks + rank, micro) for place, micro in passes
    ]
    splits = SCHEDULES[schedule].splits
    additional = (1 if splits else 2) * (ranks - 1 - rank)
    ahead = min(len(passes), (per_rank - 1) * size + additional)
    actions = forward[:ahead]
    for number, action in enumerate(backward):
        actions += forward[ahead + number : ahead + number + 1]
        actions.append(action._replace(kind="I") if splits else action)
        if splits and number >= rank:
            actions.append(backward[number - rank]._replace(kind="W"))
    if splits:
        actions += [each._replace(kind="W") for each in backward[max(0, len(backward) - rank) :]]
    return tuple(actions)


def micro_batches_refused(schedule: str, ranks: int, micro_batches: int, error: Exception) -> StepError:
    """Return the error of a schedule that does not support this number of micro-batches."""
    return StepError(
        given=f"shoal.Pipeline(schedule={schedule!r}) on {ranks} ranks with {micro_batches} "
        "micro-batch(es)",
        found=str(error),
        fix=f"shoal.Loader(…, micro_batches={max(2 * ranks, micro_batches // ranks * ranks)})",
    )

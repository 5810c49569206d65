"""The schedules of the pipeline axis: the actions of each rank in their order.

They are not in `strategies`, which imports torch, so that `shoal plan` starts without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from shoal.util.errors import StepError


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


KINDS = "FBIW"
"""The kinds of actions that compute."""


class PipelineAction(NamedTuple):
    """One action: "F" forward, "B" backward, "I" backward for inputs, "W" backward for weights."""

    kind: str
    stage: int
    micro: int


@lru_cache(maxsize=256)
def action_lists(
    schedule: str, ranks: int, per_rank: int, micro_batches: int
) -> tuple[tuple[PipelineAction, ...], ...]:
    """Return the actions of each rank in their order. Raise StepError for wrong micro-batches."""
    if SCHEDULES[schedule].fixed and per_rank == 1:
        ahead = [micro_batches if schedule == "gpipe" else ranks - rank for rank in range(ranks)]
        return tuple(_forwards_ahead(rank, some, micro_batches) for rank, some in enumerate(ahead))
    rounds = max(1, micro_batches // ranks)
    if schedule == "interleaved" and micro_batches % rounds == 0:
        size = micro_batches // rounds
        return tuple(_interleaved(rank, ranks, per_rank, size, rounds) for rank in range(ranks))
    return torch_action_lists(schedule, ranks, per_rank, micro_batches)


def _forwards_ahead(stage: int, ahead: int, micro_batches: int) -> tuple[PipelineAction, ...]:
    """Return up to `ahead` more forward than backward passes. torch lists 1F1B's last rank too late."""
    begun = min(ahead, micro_batches)
    works = [PipelineAction("F", stage, micro) for micro in range(begun)]
    for micro in range(micro_batches):
        works.append(PipelineAction("B", stage, micro))
        if begun + micro < micro_batches:
            works.append(PipelineAction("F", stage, begun + micro))
    return tuple(works)


def _interleaved(
    rank: int, ranks: int, per_rank: int, size: int, rounds: int
) -> tuple[PipelineAction, ...]:
    """Return the actions of a rank in `rounds` of `size` micro-batches, of all its stages each.

    The schedule of Narayanan et al. 2021 (arXiv:2104.04473), with as many first passes as torch has.
    torch's own list would need its import, which takes seconds.
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
    ahead = min(len(passes), (per_rank - 1) * size + 2 * (ranks - 1 - rank))
    pairs = zip(forward[ahead:], backward, strict=False)
    rest = backward[len(passes) - ahead :]
    return (*forward[:ahead], *(action for pair in pairs for action in pair), *rest)


def torch_action_lists(
    schedule: str, ranks: int, per_rank: int, micro_batches: int
) -> tuple[tuple[PipelineAction, ...], ...]:
    """Return the actions of one of torch's schedules. Raise StepError for wrong micro-batches."""
    from shoal._torch.pipelining import pipeline_order  # imports torch's pipelining

    stages = [_Stage(ranks, ranks * per_rank) for _ in range(per_rank)]
    try:
        order = pipeline_order(SCHEDULES[schedule].torchs, stages, micro_batches)
    except ValueError as error:
        raise micro_batches_refused(schedule, ranks, micro_batches, error) from None
    return tuple(tuple(_works(order[rank])) for rank in range(ranks))


def micro_batches_refused(schedule: str, ranks: int, micro_batches: int, error: Exception) -> StepError:
    """Return the error of a schedule that does not support this number of micro-batches."""
    return StepError(
        given=f"shoal.Pipeline(schedule={schedule!r}) on {ranks} ranks with {micro_batches} "
        "micro-batch(es)",
        found=str(error),
        fix=f"shoal.Loader(…, micro_batches={max(2 * ranks, micro_batches // ranks * ranks)})",
    )


class _Stage:
    """The attributes of a stage that torch's schedules read to plan."""

    submod = None
    group_rank = 0
    has_backward = True
    device = "cpu"

    def __init__(self, ranks: int, stages: int) -> None:
        self.group_size = ranks
        self.num_stages = stages
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.stage_index = 0
        self.is_first = self.is_last = True


def _works(actions: Sequence[Any]) -> Iterator[PipelineAction]:
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            kind = part.computation_type.value
            if kind in KINDS:  # others move parameters and sum gradients
                yield PipelineAction(kind, part.stage_index, part.microbatch_index)

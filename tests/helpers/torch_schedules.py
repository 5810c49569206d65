"""The actions of torch's own pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import get_schedule_class

from shoal.distributed.pipeline_action import PipelineAction
from shoal.distributed.pipeline_schedules import SCHEDULES


class Stage:
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


def torch_action_lists(
    schedule: str, ranks: int, per_rank: int, micro_batches: int
) -> tuple[tuple[PipelineAction, ...], ...]:
    """Return the actions of each rank in torch's schedule. Raise torch's ValueError."""
    kind: Any = get_schedule_class(SCHEDULES[schedule].torchs)
    # The messages between ranks take most of the time.
    bare = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda *_: None})
    stages = [Stage(ranks, ranks * per_rank) for _ in range(per_rank)]
    order = bare(stages, micro_batches).pipeline_order
    return tuple(tuple(works(order[rank])) for rank in range(ranks))


def works(actions: Sequence[Any]) -> Iterator[PipelineAction]:
    """Return those that compute; others move parameters and sum gradients."""
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            kind = part.computation_type.value
            if kind in "FBIW":
                yield PipelineAction(kind, part.stage_index, part.microbatch_index)

"""Communication time: torch's waits for other ranks, marked on the timeline.

torch does not report when it waits. So Shoal wraps the functions of torch that wait: by their names,
for the duration of a step, or on objects that belong to one model. In a version of torch without such a
function nothing is marked, and the wait counts as the part of the step in which it happens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shoal._torch.fsdp import parameter_groups
from shoal._torch.waits import pipeline_waits, tensor_waits
from shoal.distributed.world import World
from shoal.telemetry.step_timer import COMMUNICATION, Timeline

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_OF_GROUPS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
"""Methods in which FSDP2 waits for other ranks. With Gloo they call collectives; on CUDA the compute
stream waits for the communication streams in them. Both include copies into and out of buffers."""


def waiting(timeline: Timeline) -> AbstractContextManager[None]:
    """Mark a collective that Shoal calls itself. Does nothing while torch compiles."""
    return nullcontext() if torch.compiler.is_compiling() else timeline.within(COMMUNICATION)


def tensors_awaited(timeline: Timeline) -> AbstractContextManager[None]:
    """Mark the time inside that is spent waiting for functional collectives, such as DTensor's."""
    return tensor_waits(partial(_marked, timeline=lambda: timeline))


def neighbours_awaited(timeline: Timeline) -> AbstractContextManager[None]:
    """Mark the time inside that a pipeline schedule waits for adjacent stages."""
    return pipeline_waits(partial(_marked, timeline=lambda: timeline))


def mark_groups(part: FSDPModule, world: World) -> None:
    """Mark from now on the time that FSDP2 waits for the parameters and gradients of `part`."""
    for group in parameter_groups(part):
        for name in _OF_GROUPS:
            wait = getattr(group, name, None)
            if wait is not None:
                setattr(group, name, _marked(wait, lambda: world.timeline))


def _marked(wait: Callable[..., Any], timeline: Callable[[], Timeline]) -> Callable[..., Any]:
    def marked(*arguments: Any, **named: Any) -> Any:
        with timeline().within(COMMUNICATION):
            return wait(*arguments, **named)

    return marked

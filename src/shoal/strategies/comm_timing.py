"""Where torch waits for other ranks, marked on the timeline.

torch tells nobody when it waits. So functions of its own in which it does are stood in for: by their
names, for as long as a step takes, or on objects that belong to one model. Where another torch has no
such function nothing is marked, and what it waits counts as the part in which it does.
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
"""Where FSDP2 waits for the others. With Gloo that is where it calls collectives, on CUDA where the
computing stream waits for those of communication; both with copies into and out of their buffers."""


def waiting(timeline: Timeline) -> AbstractContextManager[None]:
    """In this rank's own calls of collectives; compiled code has nothing to be marked."""
    return nullcontext() if torch.compiler.is_compiling() else timeline.within(COMMUNICATION)


def tensors_awaited(timeline: Timeline) -> AbstractContextManager[None]:
    """Mark the time inside that is spent waiting for functional collectives, as those of DTensors."""
    return tensor_waits(partial(_marked, timeline=lambda: timeline))


def neighbours_awaited(timeline: Timeline) -> AbstractContextManager[None]:
    """Mark the time inside in which a pipeline's schedule waits for neighbouring stages."""
    return pipeline_waits(partial(_marked, timeline=lambda: timeline))


def mark_groups(part: FSDPModule, world: World) -> None:
    """From now on, where FSDP2 waits for the parameters and gradients of `part`."""
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

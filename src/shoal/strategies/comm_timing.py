"""Where torch waits for other ranks, marked on the timeline.

torch tells nobody when it waits. So functions of its own in which it does are stood in for: by their
names, for as long as a step takes, or on objects that belong to one model. Where another torch has no
such function nothing is marked, and what it waits counts as the part in which it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import _functional_collectives

from shoal._torch.fsdp import parameter_groups
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
    """Inside, where results of functional collectives are waited for, as those of DTensors."""
    return standing_in(_functional_collectives, "wait_tensor", timeline)


def mark_groups(part: FSDPModule, world: World) -> None:
    """From now on, where FSDP2 waits for the parameters and gradients of `part`."""
    for group in parameter_groups(part):
        for name in _OF_GROUPS:
            wait = getattr(group, name, None)
            if wait is not None:
                setattr(group, name, _marked(wait, lambda: world.timeline))


@contextmanager
def standing_in(module: Any, name: str, timeline: Timeline) -> Iterator[None]:
    """Inside, where a function of a module of torch's waits, if there is one of this name."""
    wait = getattr(module, name, None)
    if wait is None:
        yield
        return
    setattr(module, name, _marked(wait, lambda: timeline))
    try:
        yield
    finally:
        setattr(module, name, wait)


def _marked(wait: Callable[..., Any], timeline: Callable[[], Timeline]) -> Callable[..., Any]:
    def marked(*arguments: Any, **named: Any) -> Any:
        with timeline().within(COMMUNICATION):
            return wait(*arguments, **named)

    return marked

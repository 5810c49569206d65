"""Wraps, for a while, the functions of torch in which a rank waits for others: they have no hooks.

Where a torch lacks one, nothing is wrapped: its time counts to the part of the step in which it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from shoal._torch.dispatch import tree_map_only

Wrapper: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def tensor_waits(wrap: Wrapper) -> AbstractContextManager[None]:
    """Wrap the wait for the results of functional collectives, such as those of DTensors."""
    from torch.distributed import _functional_collectives

    return _wrapped(_functional_collectives, "wait_tensor", wrap)


def arrived(tree: Any) -> Any:
    """Return a tree in which results of functional collectives are plain tensors, after a wait."""
    from torch.distributed import _functional_collectives

    kind = getattr(_functional_collectives, "AsyncCollectiveTensor", None)
    return tree if kind is None else tree_map_only(kind, lambda each: each.trigger_wait(), tree)


def pipeline_waits(wrap: Wrapper) -> AbstractContextManager[None]:
    """Wrap the wait of a pipeline schedule for adjacent stages."""
    from torch.distributed.pipelining import schedules

    return _wrapped(schedules, "_wait_batch_p2p", wrap)


@contextmanager
def _wrapped(module: Any, name: str, wrap: Wrapper) -> Iterator[None]:
    wait = getattr(module, name, None)
    if wait is None:
        yield
        return
    setattr(module, name, wrap(wait))
    try:
        yield
    finally:
        setattr(module, name, wait)

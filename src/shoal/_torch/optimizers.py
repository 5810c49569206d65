"""Steps of an optimizer without its hooks, and steps that the device may skip."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer takes a flag on the device that keeps a step from changing anything.

    torch's fused Adam, AdamW, SGD and, not in torch 2.11, Adagrad do.
    """
    supported = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supported) and all(group.get("fused") for group in optimizer.param_groups)


def schedulers_in(scheduler: LRScheduler | None) -> Iterator[LRScheduler]:
    """Yield a scheduler, and those of which a SequentialLR or ChainedScheduler consists."""
    if scheduler is not None:
        yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from schedulers_in(part)


@contextmanager
def skipping(optimizer: Optimizer, skip: Tensor) -> Iterator[None]:
    """Let the optimizer step change nothing if `skip`, a float32 tensor on its device, is 1."""
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def twin_of(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[Any, Any],
    *,
    copied: bool = False,
) -> Optimizer:
    """Return an optimizer like `optimizer` with other groups and state, and without hooks.

    Its other attributes are those of `optimizer`, or copies of them. Raises TypeError for a class that
    computes its groups, such as one around another optimizer.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    replaced = {"param_groups": groups, "state": defaultdict(dict, state)}
    replaced |= {name: OrderedDict() for name in _HOOKS}
    own = {n: value for n, value in vars(optimizer).items() if n != "step" and n not in replaced}
    if copied:
        memo = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        own = {name: copy.deepcopy(value, memo) for name, value in own.items()}
    vars(twin).update(own, **replaced)
    if twin.param_groups is not groups or twin.state is not replaced["state"]:
        raise TypeError(f"{type(optimizer).__name__} wraps another optimizer")
    return twin


def step_without_hooks(optimizer: Optimizer) -> None:
    """Take a step of `optimizer` without calling its hooks."""
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]

"""The skip of an optimizer step on the device, which torch made for its GradScaler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer takes a flag on the device that keeps a step from changing anything.

    torch's fused Adam, AdamW, SGD and, not in torch 2.11, Adagrad do.
    """
    supported = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supported) and all(group.get("fused") for group in optimizer.param_groups)


@contextmanager
def skipping(optimizer: Optimizer, skip: Tensor) -> Iterator[None]:
    """Let the optimizer step change nothing if `skip`, a float32 tensor on its device, is 1."""
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]

"""Observation of gradients that a script clips with torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def observe_clipping(clipped: Callable[[list[Tensor]], None]) -> None:
    """Call `clipped` with the parameters before each call that clips their gradients."""
    for name in CLIPS:
        observed = _observed(getattr(clip_grad, name), clipped)
        for module in (torch.nn.utils, clip_grad):
            setattr(module, name, observed)


def _observed(
    original: Callable[..., Any], clipped: Callable[[list[Tensor]], None]
) -> Callable[..., Any]:
    @wraps(original)
    def function(parameters: Any, *arguments: Any, **named: Any) -> Any:
        # A list, since an iterator can be read only once.
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipped(listed)
        return original(listed, *arguments, **named)

    return function

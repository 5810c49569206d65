"""Observation of gradients that a script clips with torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from shoal.tools.verify.patches import call_around

CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def observe_clipping(clipped: Callable[[list[Tensor]], None]) -> None:
    """Call `clipped` with the parameters before each call that clips their gradients."""

    def observed(clip: Callable[..., Any], parameters: Any, *arguments: Any, **named: Any) -> Any:
        # A list, since an iterator can be read only once.
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipped(listed)
        return clip(listed, *arguments, **named)

    for name in CLIPS:
        for module in (torch.nn.utils, clip_grad):
            call_around(module, name, observed)

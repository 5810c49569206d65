"""How many random numbers the modules of several stages have drawn, sent from stage to stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.data.micro import CURRENT_DRAWS
from shoal.strategies.coupling.notice import DROPOUTS
from shoal.strategies.partition.stages import Stage, draws_itself
from shoal.strategies.random_draws.draws import name_of

_TORCHS = "torch.nn.modules."
_OTHERS = (
    nn.FractionalMaxPool2d | nn.FractionalMaxPool3d | nn.MultiheadAttention | nn.RNNBase | nn.RReLU
)
"""The layers of torch that draw, apart from `DROPOUTS`."""


class DrawCounts:
    """The draws of modules that several stages run, such as one dropout layer for all blocks.

    A number belongs to a module and to how many draws that module has made before. So a stage sends
    these counts with its activations, as a last tensor. There is none if stages share no such module.
    """

    def __init__(self, stages: Sequence[Stage], device: torch.device) -> None:
        self._device = device
        found: Counter[str] = Counter()
        for stage in stages:
            body, *modules = stage.body.modules()
            drawing = [*filter(_may_draw, modules), *([body] if draws_itself(stage) else [])]
            found.update({name for each in drawing if (name := name_of(each)) is not None})
        self._names = sorted(name for name, times in found.items() if times > 1)

    def taken_from(self, received: Sequence[Any]) -> Sequence[Any]:
        """Continue the counts of the stage before, and return what it has sent without them."""
        if not self._names or not received:  # the first stage receives nothing
            return received
        draws = CURRENT_DRAWS.get()
        if draws is not None and not torch.compiler.is_compiling():
            draws.set_counts(self._names, received[-1].tolist())
        return received[:-1]

    def added_to(self, sent: Sequence[Any]) -> tuple[Any, ...]:
        """Return what a stage sends, with the counts."""
        if not self._names:
            return tuple(sent)
        draws = None if torch.compiler.is_compiling() else CURRENT_DRAWS.get()
        counts = [0] * len(self._names) if draws is None else draws.counts(self._names)
        return *sent, torch.tensor(counts, device=self._device)


def _may_draw(module: nn.Module) -> bool:
    """Return whether a module may draw outside its submodules."""
    known = type(module).__module__.startswith(_TORCHS)
    return not known or isinstance(module, _OTHERS | DROPOUTS)

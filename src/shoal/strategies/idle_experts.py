"""Experts that no sample of a batch has used, on any rank: their parameters get no gradient.

On one process, autograd gives them none, and an optimizer leaves them as they are. Ranks exchange
slices of all experts, and would give them zeros, with which an optimizer still decays or moves them.
On one process too, they get zeros from a module that computes with experts without tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

ATTRIBUTE = "_shoal_experts"
"""The attribute with the dispatch of a module of experts."""
COUNT = "_shoal_choices"
"""The attribute of an expert with the number of times that this rank has used it in the batch.

None for experts whose gradients autograd decides about.
"""


def divided_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules of experts that are distributed over ranks."""
    return [module for module in model.modules() if hasattr(module, ATTRIBUTE)]


class IdleExperts:
    """The experts of a model that are separate modules, and how often they were used."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._experts = [part for part in module.modules() if COUNT in vars(part)]

    def drop(self) -> None:
        """Remove the gradients of experts that no rank has used in the batch. Collective."""
        experts = self._counted()
        if not experts:
            return
        counts: list[Tensor] = [vars(expert)[COUNT] for expert in experts]
        total = torch.stack(counts)
        dist.all_reduce(total, group=self._group)
        for expert, used in zip(experts, total.tolist(), strict=True):
            if not used:
                for parameter in expert.parameters():
                    parameter.grad = None
        self.forget()

    def forget(self) -> None:
        """Begin a new batch."""
        for expert in self._counted():
            vars(expert)[COUNT].zero_()

    def _counted(self) -> list[nn.Module]:
        return [expert for expert in self._experts if vars(expert)[COUNT] is not None]

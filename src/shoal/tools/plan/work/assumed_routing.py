"""The choices of routers in a trace, in which neither tokens nor routers have values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.dispatch import without_modes
from shoal._torch.simulation import FakeTensors
from shoal.distributed.world import World
from shoal.strategies.expert_parallel.parts import number_of_experts
from shoal.tools.plan.work.slowest import busiest_load


class AssumedRouting:
    """Gives modules of experts equal numbers of tokens, in place of those that their routers choose.

    With `busiest`, the experts of this rank get as many as those of the busiest of all ranks.

    Attributes:
        imbalance: The rows of the busiest rank relative to the mean: the largest of all modules.
    """

    def __init__(self, world: World, fake: FakeTensors | None, *, busiest: bool) -> None:
        self.imbalance = 1.0
        self._ranks = world.layout.expert
        self._place = world.layout.coordinate(world.rank, "expert")
        self._fake = fake
        self._busiest = busiest

    def attach(self, model: nn.Module) -> nn.Module:
        """Choose the experts of all modules of experts in a model, and return it."""
        for module in model.modules():
            if number := number_of_experts(module):
                self._choose_for(module, number)
        return model

    def _choose_for(self, module: nn.Module, number: int) -> None:
        name = [*inspect.signature(type(module).forward).parameters][2]

        def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if self._fake is not None:
                self._fake.keeps_values = True
            if name in named:
                return given, named | {name: self._chosen(named[name], number)}
            return (given[0], self._chosen(given[1], number), *given[2:]), named

        def leave(*_: object) -> None:
            if self._fake is not None:
                self._fake.keeps_values = False

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, always_call=True)

    def _chosen(self, index: Tensor, number: int) -> Tensor:
        """Return experts in place of those in `index`, of shape (tokens, choices)."""
        if index.dim() != 2:
            return index  # an error of the strategy
        tokens, choices = index.shape
        load = busiest_load(tokens, choices, number, self._ranks)
        self.imbalance = max(self.imbalance, load)
        with without_modes():
            return chosen_experts(
                tokens, choices, number, self._ranks, self._place, load if self._busiest else 1.0
            )


def chosen_experts(
    tokens: int, choices: int, experts: int, ranks: int, place: int, load: float
) -> Tensor:
    """Return the chosen experts of a rank's tokens, of shape (tokens, choices).

    The experts of the rank at `place` get `load` times their part of the choices, in equal numbers, and
    all others get the rest.
    """
    count, own = tokens * choices, experts // ranks
    here = min(count, round(load * count * own / experts))
    places = torch.arange(count)
    others = places % max(1, experts - own) + own
    chosen = torch.where(places < here, places % own, others)
    return ((chosen + place * own) % experts).view(tokens, choices)

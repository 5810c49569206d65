"""What `shoal.DDP(compression="auto")` is tried on: gradients like most of the model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from shoal.strategies.data_parallel import choose_compression
from shoal.strategies.data_parallel.compressed_collectives import CountedCollectives

pytestmark = pytest.mark.processes

RANKS = 2


class Sums(nn.Module):
    """The sum of the absolute values of its parameters, for each sample."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(each.clone() for each in parameters)

    def forward(self, inputs: Tensor) -> Tensor:
        sums: Tensor = torch.stack([each.abs().float().sum() for each in self.all]).sum()
        return sums * torch.ones(len(inputs))


def chosen_for(world: shoal.World, parameters: list[Tensor]) -> tuple[list[str], float]:
    """What is tried for "auto" with these parameters, and the loss of a step then."""
    tried: list[str] = []
    inner = choose_compression.choose

    def noted(gradients: Any, wire: CountedCollectives) -> Any:
        tried.extend(name for name, _ in gradients)
        return inner(gradients, wire)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_compression, "choose", noted)
        model = shoal.parallelize(Sums(parameters), world, shoal.DDP(compression="auto"))

    def summed(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return output.sum(), len(output)

    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.0), shoal.Task(summed))
    loader = shoal.Loader((torch.ones(12, 2),), world, batch_size=6)
    return tried, [step(batch).loss for batch in loader.epochs(1)][-1]


@pytest.mark.parametrize(
    ("parameters", "tried"),
    [
        ([torch.ones(0, 3), torch.ones(5), torch.ones(7)], ["all.1", "all.2"]),
        ([torch.ones(12, dtype=torch.complex64)], []),
        ([torch.ones(2, dtype=torch.complex64), torch.ones(10)], ["all.1"]),
        ([torch.ones((), dtype=torch.float16), torch.ones(11)], ["all.1"]),
    ],
)
def test_what_most_gradients_are_is_tried(
    parameters: list[Tensor], tried: list[str], ranks: Ranks
) -> None:
    assert ranks.call(chosen_for, parameters) == [(tried, 12.0)] * RANKS

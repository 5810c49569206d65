"""The first module with a value that is not finite, in the forward and the backward pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import step_of


class Bad(nn.Module):
    """Passes its input on; for inputs above a limit, the value or the gradient is not finite."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.where not in ("forward", "backward") or x.detach().abs().max() < 50:
            return x * self.scale
        if self.where == "forward":
            return x / (self.scale - self.scale)
        # The gradient of the square root is infinite at 0.
        return x + (self.scale - self.scale.detach()).sqrt()


def model_of(where: str) -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), Bad(where), nn.Dropout(0.1))
    return nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 2))


def loss(where: str, output: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    total = output.square().sum()
    return total.log() if where == "loss" and batch[0].abs().max() > 50 else total, len(output)


def train(world: shoal.World, directory: str, where: str, strategy: Any, bad_steps: Any) -> str:
    data = torch.ones(32, 4)
    data[13] = 1e3 if where != "input" else torch.inf  # of the second batch, and of the last rank
    step = step_of(world, model_of(where), partial(loss, where), strategy, lr=0.001)
    loader = shoal.Loader((data,), world, batch_size=8, shuffle=False, micro_batches=2)
    guards = shoal.Guards(find_nonfinite=True, bad_steps=bad_steps)
    with shoal.Run(directory, step, loader, trackers=(), guards=guards) as run:
        for batch in loader.epochs(1):
            try:
                step(batch)
            except shoal.StepError as error:
                return error.found
            if bad_steps is not None and step.bad_steps is not None and step.bad_steps.found:
                return step.bad_steps.found[0].reason
            run.tick()
    return ""


PLACES = {
    "forward": "the output of 1.1 (Bad), in the forward pass on rank",
    "backward": "(Bad), in the backward pass on rank",
    "input": "the input of the model (Sequential), in the forward pass on rank",
}


@pytest.mark.parametrize("where", PLACES)
def test_the_module_is_found(world: shoal.World, tmp_path: Path, where: str) -> None:
    found = train(world, str(tmp_path), where, None, None)
    assert "the parameters were not changed; the first value that is not finite: " in found
    assert PLACES[where] in found
    found = train(world, str(tmp_path / "b"), where, None, shoal.BadSteps())
    assert f", first in {found.partition(', first in ')[2]}" in found
    assert PLACES[where] in found


@pytest.mark.processes
@pytest.mark.full
def test_the_rank_is_found(two: Ranks, tmp_path: Path) -> None:
    for where, place in PLACES.items():
        for found in two.call(train, str(tmp_path / where), where, None, None):
            assert f"{place} 1" in found
    pipeline = shoal.Pipeline(split_points=("2",))
    for layout, strategy in (("shard=2", shoal.FSDP()), ("pipeline=2", pipeline)):
        two.divide(layout)
        found, other = two.call(train, str(tmp_path / layout), "forward", strategy, None)
        assert found == other
        assert PLACES["forward"] + (" 1" if layout == "shard=2" else "") in found


def test_compiled_models_are_not_searched(world: shoal.World, tmp_path: Path) -> None:
    step = step_of(world, nn.Linear(4, 2), partial(loss, ""), compile="inductor")
    loader = shoal.Loader((torch.ones(8, 4),), world, batch_size=8)
    with pytest.raises(shoal.StepError, match="hooks on modules"):
        shoal.Run(tmp_path, step, loader, guards=shoal.Guards(find_nonfinite=True))

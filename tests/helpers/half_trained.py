"""A small training in plain torch, and its continuation by a Run from an imported checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import shoal
from shoal.checkpoint.importing.first_checkpoint import import_checkpoint

BATCH, STEPS = 8, 3


class SmallNet(nn.Module):
    """A network with a buffer between its parameters, and layers of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(1))
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.middle = nn.Linear(6, 6, dtype=torch.float64)
        self.last = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, values: Tensor) -> Tensor:
        """Return the scores of three classes."""
        scores: Tensor = self.last(torch.tanh(self.middle(self.norm(torch.tanh(self.first(values))))))
        return scores


def samples() -> tuple[Tensor, Tensor]:
    """Six batches of inputs and classes."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6 * BATCH, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (6 * BATCH,), generator=generator)


def built(seed: int = 0) -> SmallNet:
    """The network with its first weights."""
    torch.manual_seed(seed)
    return SmallNet()


def decaying(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """A schedule that changes in each step."""
    return LambdaLR(optimizer, lambda number: 1 / (number + 1))


def train_plainly(
    model: nn.Module, optimizer: Any, schedule: Any, first: int, rank: int = 0, size: int = 1
) -> None:
    """Take three steps, from batch `first` on, with this rank's share of each batch."""
    inputs, classes = samples()
    share = BATCH // size
    for number in range(first, first + STEPS):
        here = slice(number * BATCH + rank * share, number * BATCH + (rank + 1) * share)
        F.cross_entropy(model(inputs[here]), classes[here]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def half_trained() -> tuple[SmallNet, AdamW, LambdaLR]:
    """The network after three steps, with its optimizer and schedule."""
    model = built()
    optimizer = AdamW(model.parameters(), lr=0.01)
    schedule = decaying(optimizer)
    train_plainly(model, optimizer, schedule, 0)
    return model, optimizer, schedule


def continued(world: shoal.World, run: Path, **options: Any) -> tuple[dict[str, Any], nn.Module]:
    """Restore a run and take three steps; return the Step's state at the restore, and the model."""
    model = shoal.parallelize(options.get("model") or built(seed=9), world)
    optimizer = options.get("optimizer", lambda m: AdamW(m.parameters(), lr=0.5))(model)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])

    schedule = options.get("schedule", decaying)(optimizer)
    step = shoal.Step(model, optimizer, shoal.Task(loss), schedule=schedule)
    inputs, classes = samples()
    dtype = next(model.parameters()).dtype
    loader = shoal.Loader((inputs.to(dtype), classes), world, batch_size=BATCH, shuffle=False)
    with shoal.Run(run, step, loader, trackers=()) as opened:
        restored = opened.restore()
        assert restored is not None
        assert (restored.step, restored.position) == (STEPS, STEPS * BATCH)
        state = cloned(step.state_dict())
        for batch in loader.epochs(1):
            step(batch)
            opened.tick()
        opened.save()
    return state, model


def cloned(tree: Any) -> Any:
    """A copy of a tree of dicts."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    return {k: cloned(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def assert_continued(
    world: shoal.World,
    source: Path,
    run: Path,
    at_save: tuple[Mapping[str, Tensor], Mapping[str, Mapping[str, Tensor]]],
    end: Mapping[str, Tensor],
    within: float = 1e-12,
    **options: Any,
) -> None:
    """Import `source` and go on: bit-equal state at the restore, then the parameters of `end`.

    `at_save` are the model and the states of its optimizer, by name.
    """
    import_checkpoint(source, run)
    state, model = continued(world, run, **options)
    weights, moments = at_save
    for name, tensor in weights.items():
        assert torch.equal(state["model"][name], tensor), name
    assert state["optimizer"]["state"].keys() == moments.keys()
    for name, entries in moments.items():
        for key, value in entries.items():
            assert torch.equal(state["optimizer"]["state"][name][key], torch.as_tensor(value)), name
    for name, tensor in model.state_dict().items():
        difference = (tensor - end[name]).abs().max().item()
        assert math.isfinite(difference)
        assert difference <= within, name


def named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The states of an optimizer by parameter name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: cloned(dict(entry)) for p, entry in optimizer.state.items()}

"""Training that plain PyTorch began, and saved with torch.save, continues in a Run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import shoal
from helpers.ranks import Ranks

EPOCHS, SAVED_EPOCH, SAMPLES, BATCH, SEED = 4, 1, 50, 16, 0


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True)


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def train_plainly(path: Path) -> list[float]:
    """Train without interruption and return the losses of the epochs after the one that is saved."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for epoch in range(EPOCHS):
        order = shoal.Permutation(SAMPLES, seed=SEED, epoch=epoch)
        for inputs, targets in DataLoader(TensorDataset(*data()), BATCH, sampler=order):
            loss = mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += [loss.item()] * (epoch > SAVED_EPOCH)
        if epoch == SAVED_EPOCH:
            state = {
                "model_state_dict": net.state_dict(),
                "optimizer_state_dict": optimizer.state_dict(),
            }
            torch.save({"epoch": epoch, **state, "loss": loss}, path)
    return losses


def summed(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return mse_loss(output, batch[1], reduction="sum"), len(output)


def continue_training(world: shoal.World, folder: Path, steps: int | None) -> list[float]:
    """Take at most `steps` steps, save, and return their losses. The recipe is that of the guide."""
    net = shoal.parallelize(model(), world)
    optimizer = torch.optim.AdamW(net.parameters())
    step = shoal.Step(net, optimizer, shoal.Task(summed))
    loader = shoal.Loader(data(), world, batch_size=BATCH, seed=SEED)
    losses = []
    with shoal.Run(folder / "run", step, loader, trackers=()) as run:
        if run.restore() is None:
            saved = torch.load(folder / "checkpoint.pth", map_location="cpu", weights_only=True)
            shoal.load(net, saved["model_state_dict"])
            optimizer.load_state_dict(saved["optimizer_state_dict"])
            position = (saved["epoch"] + 1) * loader.epoch_size
            loader.load_state_dict(loader.state_dict() | {"position": position})
        for batch in islice(loader.epochs(EPOCHS), steps):
            losses.append(step(batch).loss)
            run.tick()
        run.save()
    return losses


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 2)])
def test_the_losses_are_those_of_plain_training(
    sizes: tuple[int, int], ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """The Run is interrupted within an epoch, and resumes from its own checkpoint."""
    expected = train_plainly(tmp_path / "checkpoint.pth")
    first, second = (
        ranks_of(size).call(continue_training, tmp_path, steps)[0]
        for size, steps in zip(sizes, (3, None), strict=True)
    )
    assert (len(first), len(second)) == (3, 5)
    assert first + second == pytest.approx(expected, rel=1e-12)

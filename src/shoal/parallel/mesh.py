"""What engines share whose parameters are divided over axes of the mesh."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.layout import AXES, DATA_AXES
from shoal.parallel.local import LocalEngine, as_scalar, global_norm
from shoal.shares import parts, share
from shoal.world import World


def summing_group(world: World) -> dist.ProcessGroup | None:
    """Of ranks that have other samples, or other slices of them; None where there are no others."""
    if world.layout.degree("context") == 1:
        return world.data_group if world.data_size > 1 else None
    return world.mesh[(*DATA_AXES, "context")]._flatten("slices").get_group()


class MeshEngine(LocalEngine):
    """Runs the module here, with its shares of parameters; norms are those of the whole.

    The sums of loss, count and squared norm travel in one all-reduce over the world, each counted
    once: by the ranks that speak, and by each share as often as it is there.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module, world)
        others = [axis for axis in AXES if axis not in DATA_AXES]
        self.speaks = all(world.layout.coordinate(world.rank, axis) == 0 for axis in others)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Send rank 0's buffers to all: they follow each rank's own samples."""
        for buffer in self.module.buffers():
            dist.broadcast(share(buffer), 0, group=self.world.group)

    def _gradients(self) -> list[Tensor]:
        with torch.no_grad():
            return [share(p.grad) for p in self.parameters if p.grad is not None]

    def _norm(self) -> Tensor:
        """This rank's part of the norm: its square, summed over ranks, is that of the whole."""
        learning = [p for p in self.parameters if p.grad is not None]
        alike: dict[int, list[Tensor]] = {}
        for parameter, gradient in zip(learning, self._gradients(), strict=True):
            alike.setdefault(self.world.size // parts(parameter), []).append(gradient)
        squares = [global_norm(some).double().square() / copies for copies, some in alike.items()]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def _sums(self, norm: Tensor) -> tuple[float, float, float]:
        zero = norm.new_zeros((), dtype=torch.float64)
        shown = [one for one in self._shown if one[2]] if self.speaks else []
        losses = sum((loss.to(zero) for loss, _, _ in shown), zero)
        counts = sum((as_scalar(count, zero) for _, count, _ in shown), zero)
        sums = torch.stack((losses, counts, norm.to(zero).square()))
        loss_sum, count, squares = self.world.all_reduce(sums).tolist()
        return loss_sum, count, math.sqrt(squares)

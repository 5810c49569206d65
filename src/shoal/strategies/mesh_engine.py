"""What engines share whose parameters are divided over axes of the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal._torch.mesh import flatten
from shoal.distributed.layout import AXES, DATA_AXES
from shoal.distributed.world import World
from shoal.strategies.base_engine import HoldingEngine, as_scalar, global_norm
from shoal.strategies.dtensor import parts, share
from shoal.strategies.registry import engines_of
from shoal.telemetry.step_timer import COMMUNICATION


def summing_group(world: World) -> dist.ProcessGroup | None:
    """Of ranks that have other samples, or other slices of them; None where there are no others."""
    if world.layout.degree("context") == 1:
        return world.data_group if world.data_size > 1 else None
    return flatten(world.mesh[(*DATA_AXES, "context")], "slices").get_group()


class MeshEngine(HoldingEngine):
    """Holds shares or parts of the parameters; norms are those of the whole.

    The sums of loss, count and squared norm travel in one all-reduce over the world, each counted
    once: by the ranks that speak, and by each share as often as it is there.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module, world)
        others = [axis for axis in AXES if axis not in DATA_AXES]
        self.speaks = all(world.layout.coordinate(world.rank, axis) == 0 for axis in others)

    def settle(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Send the first data rank's buffers to all: they follow each rank's own samples."""
        if self.world.data_size > 1:
            for buffer in self.module.buffers():
                dist.broadcast(share(buffer), group=self.world.data_group, group_src=0)

    @contextmanager
    def others_aside(self) -> Iterator[None]:
        """Keep the gradients of other models: a loss of this one may run through them (a GAN's).

        For where backward can't name its leaves: FSDP's hooks would see nothing of it.
        """
        others = [engine for engine in engines_of(self.world) if engine is not self]
        # Not `module.parameters()`: of a module that is gathered now those are not the shares.
        holding = [other for other in others if isinstance(other, HoldingEngine)]
        kept = [(p, p.grad) for other in holding for p in other.parameters]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _gradients(self) -> list[Tensor]:
        with torch.no_grad():
            return [share(p.grad) for p in self.parameters if p.grad is not None]

    def _norm(self) -> Tensor:
        """This rank's part of the norm: its square, summed over ranks, is that of the whole."""
        learning = [p for p in self.parameters if p.grad is not None]
        holders = self.world.size // self.world.layout.degree("pipeline")
        alike: dict[int, list[Tensor]] = {}
        for parameter, gradient in zip(learning, self._gradients(), strict=True):
            alike.setdefault(holders // parts(parameter), []).append(gradient)
        squares = [global_norm(some).double().square() / copies for copies, some in alike.items()]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def _sums(self, norm: Tensor) -> tuple[float, float, float]:
        zero = norm.new_zeros((), dtype=torch.float64)
        shown = [one for one in self._shown if one[2]] if self.speaks else []
        losses = sum((loss.to(zero) for loss, _, _ in shown), zero)
        counts = sum((as_scalar(count, zero) for _, count, _ in shown), zero)
        sums = torch.stack((losses, counts, norm.to(zero).square()))
        with self.world.timeline.within(COMMUNICATION):
            self.world.all_reduce(sums)
        loss_sum, count, squares = sums.tolist()
        return loss_sum, count, math.sqrt(squares)


def sum_over(group: dist.ProcessGroup, parameters: Sequence[Tensor]) -> None:
    """Sum gradients over `group`, each rank's share with its peers.

    All take part, with zeros where a rank has none: only other ranks' samples may use a parameter.
    """
    works = []
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(share(parameter.grad), group=group, async_op=True))
    for work in works:
        if work is not None:
            work.wait()

"""The reducer of parameters that are divided over axes of the mesh, or summed over one of its groups.

Under tensor parallelism, in a pipeline and over RPC. FSDP sums gradients itself, and its reducer takes
norm and sums from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.data.batch import Count
from shoal.data.micro import Micro
from shoal.distributed.layout import AXES, DATA_AXES
from shoal.distributed.world import World
from shoal.strategies.contracts import Totals
from shoal.strategies.dtensor import is_divided, parts, share
from shoal.strategies.engine import SynchronousEngine
from shoal.strategies.held_parameters import HeldParameters, global_norm
from shoal.strategies.reducer import Reducer, backward_seed, sums
from shoal.strategies.registry import engines_of
from shoal.strategies.tensor_parallel.divided_loss import whole_loss
from shoal.strategies.tensor_parallel.sharded_modules import divide_alike
from shoal.telemetry.step_timer import COMMUNICATION
from shoal.util.errors import StepError


class MeshReducer(Reducer):
    """Sums gradients over `gradient_group` after the last micro-batch, each part with its own peers.

    The sums of loss, count and squared norm travel in one all-reduce over the world, each counted
    once: by the ranks that report the loss, and by each part as often as it is there. `norm` is this
    rank's part of the norm: its square, summed over ranks, is that of the whole.
    """

    def __init__(
        self,
        held: HeldParameters,
        *,
        reports_loss: bool,
        gradient_group: dist.ProcessGroup | None,
        buffer_group: dist.ProcessGroup | None,
        norm: Callable[[HeldParameters], Tensor],
    ) -> None:
        self.held = held
        self.reports_loss = reports_loss
        self._gradient_group = gradient_group
        self._buffer_group = buffer_group
        self._norm = norm

    def backward(
        self, loss: Tensor, count: Count, micro: Micro, size: int, *, scale: float, last: bool
    ) -> None:
        """Run backward of the loss; sum the gradients after the last. See the contract."""
        loss, count = whole_loss(self.held.module, loss, count)
        copies = self.held.world.layout.degree("context")  # of this loss; gradients of all are summed
        seed = backward_seed(loss, scale * micro.weight / size / copies)
        torch.autograd.backward([loss], [seed], inputs=self.held.leaves())
        self.held.losses.append((loss.detach(), count, micro.weight))
        if last:
            self.reduce()

    def reduce(self) -> None:
        """Sum the gradients of the batch over the ranks that have the same parameters. Collective."""
        self.held.print_unused()  # after the sums all have gradients
        for parameter in self.held.parameters:
            divide_alike(parameter)
        if self._gradient_group is not None:
            with self.held.world.timeline.within(COMMUNICATION):
                sum_over(self._gradient_group, self.held.parameters)

    def totals(self) -> Totals:
        """Sum over the world, and take the norm of the whole; see the contract."""
        self.held.check()
        return world_totals(self.held, self._norm(self.held), reports_loss=self.reports_loss)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise StepError where torch would mix divided and whole parameters."""
        for group in optimizer.param_groups:
            at_once = [name for name in ("fused", "foreach") if group.get(name)]
            if at_once and len(set(map(is_divided, group["params"]))) > 1:
                raise StepError(
                    given=f"{type(optimizer).__name__}(…, {at_once[0]}=True) with "
                    "shoal.TensorParallel()",
                    found="it updates all parameters at once, and only some of them are divided; they "
                    "were not touched",
                    fix=f"leave {at_once[0]} out, or give it two groups: the layers of the plan, and "
                    "the others",
                )

    def synchronize(self) -> None:
        """Send the buffers of the group's first rank to the others; see the contract."""
        broadcast_buffers(self.held, self._buffer_group)


def world_totals(held: HeldParameters, norm: Tensor, *, reports_loss: bool) -> Totals:
    """Return the sums over the world, of the losses and of this rank's part of the norm."""
    # Not on the device of the norm, which gradients that are offloaded have on the CPU.
    zero = torch.zeros((), dtype=torch.float64, device=held.world.device)
    losses = [one for one in held.losses if one[2]] if reports_loss else []
    held.losses.clear()
    local = torch.stack((*sums(losses, zero), norm.to(zero).square()))
    with held.world.timeline.within(COMMUNICATION):
        held.world.all_reduce(local)
    loss_sum, count, squares = local.tolist()
    return Totals(loss_sum, count, math.sqrt(squares))


def norm_of_parts(held: HeldParameters) -> Tensor:
    """Return this rank's part of the norm where several may hold the same part of a parameter."""
    learning = [p for p in held.parameters if p.grad is not None]
    holders = held.world.size // held.world.layout.degree("pipeline")
    by_copies: dict[int, list[Tensor]] = {}
    for parameter, gradient in zip(learning, held.gradients(), strict=True):
        by_copies.setdefault(holders // parts(parameter), []).append(gradient)
    squares = [global_norm(some).double().square() / copies for copies, some in by_copies.items()]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def first_along(world: World, *axes: str) -> bool:
    """Return whether this rank is the first along `axes`, by default all that share samples."""
    axes = axes or tuple(axis for axis in AXES if axis not in DATA_AXES)
    return all(world.layout.coordinate(world.rank, axis) == 0 for axis in axes)


def data_group(world: World) -> dist.ProcessGroup | None:
    """Return the group of ranks that have other samples; None where there are no others."""
    return world.data_group if world.data_size > 1 else None


def summing_group(world: World) -> dist.ProcessGroup | None:
    """Return the group of ranks that have other samples, or other slices of them; None without."""
    if world.layout.degree("context") == 1:
        return data_group(world)
    return world.flat_mesh(*DATA_AXES, "context", name="slices").get_group()


def broadcast_buffers(held: HeldParameters, group: dist.ProcessGroup | None) -> None:
    """Send the buffers of the first rank of `group` to all: they follow each rank's own samples."""
    if group is not None:
        for buffer in held.module.buffers():
            dist.broadcast(share(buffer), group=group, group_src=0)


@contextmanager
def other_gradients_kept(held: HeldParameters) -> Iterator[None]:
    """Keep the gradients of other models: a loss of this one may run through them (a GAN's).

    For where backward can't name its leaves: FSDP's hooks would see nothing of it.
    """
    engines = [engine for engine in engines_of(held.world) if isinstance(engine, SynchronousEngine)]
    # Not `module.parameters()`: of a module that is gathered now those are not what it holds.
    others = [engine.reducer.held for engine in engines if engine.reducer.held is not held]
    kept = [(p, p.grad) for other in others for p in other.parameters]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def sum_over(group: dist.ProcessGroup, parameters: Sequence[Tensor]) -> None:
    """Sum gradients over `group`, each rank's part with its peers.

    All ranks take part, with zeros where a rank has none: other ranks' samples may use a parameter.
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

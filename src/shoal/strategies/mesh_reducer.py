"""The reducer of tensor parallelism and pipelines, whose parameters are sharded over mesh axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from shoal.data.batch import Count
from shoal.data.micro import MicroBatch
from shoal.distributed.layout import AXES, DATA_AXES
from shoal.distributed.tensors import broadcast
from shoal.distributed.world import World
from shoal.strategies.correction import DeviceTotals
from shoal.strategies.coupling.batch_norm import uncovered_buffers
from shoal.strategies.coupling.observed import buffer_version
from shoal.strategies.dtensor import over_experts, parts, share
from shoal.strategies.engine import ReducerEngine
from shoal.strategies.held_parameters import HeldParameters, global_norm
from shoal.strategies.idle_experts import IdleExperts
from shoal.strategies.reducer import Reducer, backward_seed, sums
from shoal.strategies.registry import engines_of
from shoal.strategies.sharded_layers.divided_loss import whole_loss
from shoal.strategies.sharded_layers.sharded_modules import divide_alike
from shoal.telemetry.step_timer import COMMUNICATION
from shoal.util.errors import StepError

_MIXED = "mixed torch.Tensor and DTensor"


class MeshReducer(Reducer):
    """Reducer that sums gradients over `gradient_group` after the last micro-batch, shard by shard.

    One all-reduce over the world sums loss, count and squared norm. Only the ranks that report the
    loss contribute to loss and count, and each copy of a shard contributes its fraction of the squared
    norm. `norm` returns this rank's part of the norm: the sum of its squares over ranks is the square
    of the full norm. If FSDP2 has `sharded` the parameters, it sums the gradients of all but scalars.
    """

    def __init__(
        self,
        held: HeldParameters,
        *,
        reports_loss: bool,
        gradient_group: dist.ProcessGroup | None,
        buffer_group: dist.ProcessGroup | None,
        norm: Callable[[HeldParameters], Tensor],
        sharded: bool = False,
    ) -> None:
        self.held = held
        self.reports_loss = reports_loss
        self._buffer_group = buffer_group
        self._norm = norm
        summed = [p for p in held.parameters if not (sharded and p.dim())]
        experts = [p for p in summed if over_experts(p)]
        others = [p for p in summed if not over_experts(p)]
        sums = [(gradient_group, others)]
        if held.world.layout.degree("expert") > 1:  # on all ranks, since making a group is collective
            sums.append((summing_group(held.world, "expert"), experts))
        self._sums = [(group, some) for group, some in sums if group is not None and some]
        self._idle = IdleExperts(held.module, gradient_group)
        self._versions = {
            name: buffer_version(each) for name, each in uncovered_buffers(held.module).items()
        }
        self._changing: list[str] | None = None
        """The buffers that the first batch has changed on any rank, once it is known."""

    def backward(
        self, loss: Tensor, count: Count, micro: MicroBatch, size: int, *, scale: float, last: bool
    ) -> None:
        """Run backward, and sum the gradients after the last micro-batch; see the contract."""
        loss, count = whole_loss(self.held.module, loss, count)
        copies = self.held.world.layout.degree("context")  # of this loss; gradients of all are summed
        seed = backward_seed(loss, scale * micro.weight / size / copies)
        with recomputation_explained():
            torch.autograd.backward([loss], [seed], inputs=self.held.leaves(loss))
        self.held.losses.append((loss.detach(), count, micro.weight))
        if last:
            self.reduce()

    def reduce(self) -> None:
        """Sum the gradients of the batch over the ranks that have the same parameters. Collective."""
        self.held.print_unused()  # before the sums, which give all parameters a gradient
        for parameter in self.held.parameters:
            divide_alike(parameter)
        with self.held.world.timeline.within(COMMUNICATION):
            for group, parameters in self._sums:
                sum_over(group, parameters)
            self._idle.drop()

    def totals(self) -> DeviceTotals:
        """Return the sums over the world and the full norm; see the contract."""
        self.held.check()
        norm, world = self._norm(self.held), self.held.world
        # Not on the device of the norm, which gradients that are offloaded have on the CPU.
        zero = torch.zeros((), dtype=torch.float64, device=world.device)
        losses = [one for one in self.held.losses if one[2]] if self.reports_loss else []
        self.held.losses.clear()
        local = torch.stack((*sums(losses, zero), norm.to(zero).square()))
        with world.timeline.within(COMMUNICATION):
            world.all_reduce(local)
            self._share_buffers()
        local[2].sqrt_()
        return DeviceTotals(local)

    def _share_buffers(self) -> None:
        """Broadcast the buffers that forward passes change, as DDP does. Collective."""
        buffers = uncovered_buffers(self.held.module)
        if self._changing is None:  # on all ranks, also on one that is alone with its stage
            mine = [
                name
                for name, each in buffers.items()
                if self._versions.get(name) != buffer_version(each)
            ]
            self._changing = sorted({name for names in self.held.world.gather(mine) for name in names})
        if self._buffer_group is not None:
            here = [share(buffers[name]) for name in self._changing if name in buffers]
            broadcast(here, self._buffer_group)

    def discard(self) -> None:
        """Clear the gradients, and what an interrupted batch has counted."""
        super().discard()
        self._idle.forget()

    def synchronize(self) -> None:
        """Broadcast the buffers of the group's first rank, since they depend on the local batch."""
        if self._buffer_group is not None:
            broadcast(map(share, self.held.module.buffers()), self._buffer_group)


def norm_of_parts(held: HeldParameters) -> Tensor:
    """Return this rank's part of the norm if several ranks may hold the same shard of a parameter."""
    learning = [p for p in held.parameters if p.grad is not None]
    holders = held.world.size // held.world.layout.degree("pipeline")
    by_copies: dict[int, list[Tensor]] = {}
    for parameter, gradient in zip(learning, held.gradients(), strict=True):
        by_copies.setdefault(holders // parts(parameter), []).append(gradient)
    squares = [global_norm(some).double().square() / copies for copies, some in by_copies.items()]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def first_along(world: World, *axes: str) -> bool:
    """Return whether this rank is the first along `axes`. Default: all axes with the same samples."""
    axes = axes or tuple(axis for axis in AXES if axis not in DATA_AXES)
    return all(world.layout.coordinate(world.rank, axis) == 0 for axis in axes)


def data_group(world: World) -> dist.ProcessGroup | None:
    """Return the group of ranks with other samples, or None if there are no others."""
    return world.data_group if world.data_size > 1 else None


def summing_group(world: World, *without: str) -> dist.ProcessGroup | None:
    """Return the group of ranks with other samples or other slices of them, or None without.

    Ranks along the axes `without` have other parameters.
    """
    if world.layout.degree("context") == 1 and not without:
        return data_group(world)
    axes = [axis for axis in (*DATA_AXES, "context") if axis not in without]
    if all(world.layout.degree(axis) == 1 for axis in axes):
        return None
    return world.group_along(*axes, name="_".join(("slices", *without)))


@contextmanager
def other_gradients_kept(held: HeldParameters) -> Iterator[None]:
    """Preserve the gradients of other models, since a loss of this one may use them (GANs).

    For FSDP, whose hooks do not run if backward is called with `inputs`.
    """
    engines = [engine for engine in engines_of(held.world) if isinstance(engine, ReducerEngine)]
    # Not `module.parameters()`, which differ from the held ones while a module is gathered.
    others = [engine.held for engine in engines if engine.held is not held]
    kept = [(p, p.grad) for other in others for p in other.parameters]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def recomputation_explained() -> Iterator[None]:
    """Raise StepError in place of torch's errors where a backward pass meets parts of weights.

    A recomputation in a loss gets parts where the forward pass got full weights.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, CheckpointError) and _MIXED not in str(error):
            raise
        raise StepError(
            given="torch.utils.checkpoint, or a backward pass of your own, with sharded parameters",
            found=f"{str(error).splitlines()[0]} In a loss, a recomputation gets parts of weights "
            "where the forward pass got full ones",
            fix="call torch.utils.checkpoint in the model's forward, not in a loss; what it recomputes "
            "must do the same each time",
        ) from error


def sum_over(group: dist.ProcessGroup, parameters: Sequence[Tensor]) -> None:
    """Sum gradients over `group`, shard by shard.

    A rank without a gradient contributes zeros, because samples of other ranks may use the parameter.
    Parameters that no rank uses get none, so that an optimizer does not change them.
    """
    unused = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
    everywhere = torch.zeros(len(parameters), dtype=torch.uint8, device=parameters[0].device)
    for number in unused:
        everywhere[number] = 1  # on the device: a copy from the host would make the host wait
    works = [dist.all_reduce(everywhere, dist.ReduceOp.MIN, group, async_op=True)]
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(share(parameter.grad), group=group, async_op=True))
    for work in works:
        if work is not None:
            work.wait()
    if unused:  # values of a device are fetched only then
        for parameter, none in zip(parameters, everywhere.tolist(), strict=True):
            if none:
                parameter.grad = None

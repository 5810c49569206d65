"""Local SGD and DiLoCo: replicas train separately, and their parameters are averaged at intervals.

Ranks communicate only when they average, so a low-bandwidth network costs little. The results differ
from those of one process: they depend on the number of ranks and on the interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal._torch import foreach
from shoal.data.batch import Batch
from shoal.distributed.tensors import broadcast
from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.correction import Factor, Totals
from shoal.strategies.coupling.batch_norm import SEPARATE_STEPS, refuse_coupled
from shoal.strategies.data_parallel.compressed_collectives import CountedCollectives, joined, put_back
from shoal.strategies.dtensor import is_divided
from shoal.strategies.held_parameters import HeldParameters
from shoal.strategies.local import LocalEngine
from shoal.strategies.reducer import LocalReducer
from shoal.strategies.task import Task
from shoal.telemetry.step_timer import COMMUNICATION
from shoal.util.arguments import is_integer
from shoal.util.errors import StepError


class IndependentEngine(LocalEngine):
    """Engine that trains this rank's replica, which begins with rank 0's parameters and buffers.

    A custom training loop cannot use it, because it must know when the optimizer has stepped.
    """

    loopable = False
    independent_steps = True

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(LocalReducer(HeldParameters(module, world)))
        self.waits_because = Engine.waits_because
        if world.size > 1:
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point() and buffer.itemsize == 1:
                    dtype = str(buffer.dtype).removeprefix("torch.")
                    raise StepError(
                        given=f"parallelize({type(module).__name__}, world) with a strategy that "
                        f"averages buffers, and the buffer {name} of {dtype}",
                        found=f"ranks can't average {dtype}",
                        fix=f"store {name} in bfloat16, or use shoal.DDP()",
                    )
            broadcast((*module.parameters(), *module.buffers()), world.group)

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Compute the gradients of this rank's local batch; see the contract."""
        totals = super().gradients(task, batch, autocast=autocast, scale=scale)
        return totals.read()._replace(local=True)


BUCKET_BYTES = 25 << 20
"""Size of one all-reduce. A larger one would need a copy of the complete model."""


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Local SGD: ranks step separately and average their parameters at intervals (Stich 2019).

    Each rank has its own optimizer state. A checkpoint contains the mean over the ranks.

    Args:
        sync_every: Number of optimizer steps between two averages, at least 1. Default: 8.
        warmup_steps: Number of steps at the start after each of which parameters are averaged, as in
            post-local SGD (Lin et al. 2020). Default: 0.

    Raises:
        StepError: If a number of steps is not an integer or too small.

    Examples:
        >>> strategy = shoal.LocalSGD(sync_every=16, warmup_steps=1000)
    """

    axes: ClassVar[tuple[str, ...]] = ("replicate",)
    defers: ClassVar[bool] = False

    sync_every: int = 8
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_steps("LocalSGD", "sync_every", self.sync_every, least=1)
        _check_steps("LocalSGD", "warmup_steps", self.warmup_steps, least=0)

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Broadcast rank 0's parameters and buffers, and return the engine."""
        if world.size > 1:
            _refuse_sharded(model, "shoal.LocalSGD()")
            refuse_coupled(model, "shoal.LocalSGD()", SEPARATE_STEPS)
        return AveragingEngine(model.to(world.device), world, self.sync_every, self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """DiLoCo: local SGD with an outer optimizer (Douillard et al. 2023).

    Ranks step separately. Every `sync_every` steps, the mean change of their parameters is the
    gradient for one step of an outer optimizer, SGD with Nesterov momentum. Each rank has its own
    inner optimizer state. A checkpoint contains the mean over the ranks. The defaults are those of the
    paper.

    Args:
        sync_every: Number of inner optimizer steps per outer step, at least 1. Default: 500.
        lr: Learning rate of the outer optimizer, positive. Default: 0.7.
        momentum: Nesterov momentum of the outer optimizer, in [0, 1). Default: 0.9.

    Raises:
        StepError: If an argument is out of range.

    Examples:
        >>> strategy = shoal.DiLoCo(sync_every=100)
    """

    axes: ClassVar[tuple[str, ...]] = ("replicate",)
    defers: ClassVar[bool] = False

    sync_every: int = 500
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_steps("DiLoCo", "sync_every", self.sync_every, least=1)
        numbers = all(isinstance(value, int | float) for value in (self.lr, self.momentum))
        if not (numbers and 0 < self.lr < math.inf and 0 <= self.momentum < 1):
            raise StepError(
                given=f"shoal.DiLoCo(lr={self.lr!r}, momentum={self.momentum!r})",
                found="the outer learning rate must be positive, and the momentum in [0, 1)",
                fix="use lr=0.7 and momentum=0.9, the values in the paper",
            )

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Broadcast rank 0's parameters and buffers, and return the engine."""
        if world.size > 1:
            _refuse_sharded(model, "shoal.DiLoCo()")
            refuse_coupled(model, "shoal.DiLoCo()", SEPARATE_STEPS)
        return AveragingEngine(model.to(world.device), world, self.sync_every, outer=self)


def _refuse_sharded(model: nn.Module, given: str) -> None:
    """Raise StepError for a model whose layers or experts are on several ranks."""
    if any(map(is_divided, model.parameters())):
        raise StepError(
            given=f"{given} around a model whose layers or experts are sharded",
            found="ranks step separately, and the ranks of one model need each other's gradients",
            fix="leave the other strategy out, with layout='replicate=-1'; or use shoal.DDP() or "
            "shoal.FSDP() instead",
        )


class AveragingEngine(IndependentEngine):
    """Engine that trains this rank's replica on its local batch and averages at intervals."""

    def __init__(
        self,
        module: nn.Module,
        world: World,
        every: int,
        together: int = 0,
        outer: DiLoCo | None = None,
    ) -> None:
        super().__init__(module, world)
        self._wire = CountedCollectives(world)
        self._every = every
        self._together = together
        self._taken = 0
        self._outer = None if outer is None else OuterStep(module, self.held.parameters, outer)

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent since the engine was created; see `CountedCollectives`."""
        return self._wire.sent

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Compute the gradients of this rank's local batch; see the contract."""
        if self._taken == 0 and self._outer is not None:
            self._outer.start()
        return super().gradients(task, batch, autocast=autocast, scale=scale)

    def update(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        """Step on this rank, then average if it is time; see the contract."""
        if factor == 0:  # this rank had no sample: a step would make its optimizer state decay
            self.discard()
        else:
            super().update(optimizer, factor)
            self._count()

    def discard(self) -> None:
        """Clear the gradients and count a step, since other ranks may have stepped."""
        super().discard()
        self._count()

    def synchronize(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Average parameters, buffers and optimizer state. Training continues from these averages."""
        self._average(_inexact(self.module.parameters()))
        self._average(others(self.module, optimizer, self.world))

    def state(self) -> dict[str, Any]:
        """Return the number of steps taken, and the state of the outer step."""
        outer = {} if self._outer is None else self._outer.state()
        return {"taken": self._taken, **outer}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a saved state; from 0 if another strategy saved the checkpoint."""
        self._taken = state.get("taken", 0)
        if self._outer is not None:
            self._outer.load_state(state)

    def _count(self) -> None:
        self._taken += 1
        if self._taken % self._every == 0 or self._taken <= self._together:
            self._average(self.held.parameters)
            if self._outer is not None:
                self._outer.step()

    def _average(self, tensors: Sequence[Tensor]) -> None:
        with self.world.timeline.within(COMMUNICATION):
            average(tensors, self._wire, self.world.device)


class OuterStep:
    """Outer optimizer whose gradient is the mean change of the parameters since the last average."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], options: DiLoCo) -> None:
        self._module = module
        self._parameters = parameters
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._anchors = [p.detach().clone() for p in parameters]
        self._optimizer = torch.optim.SGD(
            self._anchors, lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0
        )

    def start(self) -> None:
        """Begin from the current parameters: weights may have been loaded."""
        foreach.copy_(self._anchors, [p.detach() for p in self._parameters])

    def step(self) -> None:
        """Step from the last synchronized parameters, given parameters that were just averaged."""
        parameters = [p.detach() for p in self._parameters]
        for anchor, parameter in zip(self._anchors, parameters, strict=True):
            anchor.grad = anchor - parameter
        self._optimizer.step()
        self._optimizer.zero_grad()
        foreach.copy_(parameters, self._anchors)

    def state(self) -> dict[str, Any]:
        """Return the last synchronized parameters and the outer momentum, by parameter name."""
        momentum = {
            name: self._optimizer.state[anchor]["momentum_buffer"]
            for name, anchor in zip(self._names, self._anchors, strict=True)
            if self._optimizer.state.get(anchor, {}).get("momentum_buffer") is not None
        }
        return {"anchors": dict(zip(self._names, self._anchors, strict=True)), "momentum": momentum}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; from the loaded parameters if another strategy saved it."""
        loaded = dict(self._module.named_parameters())
        anchors, momentum = state.get("anchors", loaded), state.get("momentum", {})
        for name, anchor in zip(self._names, self._anchors, strict=True):
            # A parameter that was frozen then has no anchor.
            anchor.copy_(anchors.get(name, loaded[name]).detach())
            kept = momentum.get(name)
            if kept is None:
                self._optimizer.state.pop(anchor, None)
            else:
                self._optimizer.state[anchor] = {"momentum_buffer": kept.to(anchor, copy=True)}


def average(tensors: Sequence[Tensor], wire: CountedCollectives, device: torch.device) -> None:
    """Replace each tensor by its mean over the ranks, bucket by bucket. Collective."""
    if wire.size == 1:
        return
    for bucket in _buckets([_real(tensor.detach()) for tensor in tensors]):
        flat = joined(bucket)
        # Sums in 16 bits would be rounded; and optimizers keep their step count on the CPU.
        flat = flat.to(device, torch.promote_types(flat.dtype, torch.float32))
        put_back(wire.mean(flat), bucket)


def others(module: nn.Module, optimizer: torch.optim.Optimizer | None, world: World) -> list[Tensor]:
    """Return the buffers, and the optimizer state of the parameters for which all ranks have it.

    Collective. A rank has no state for a parameter that its samples have not used so far, and none at
    all if it had no sample. All ranks keep their own state of such parameters.
    """
    state = {} if optimizer is None else optimizer.state
    moments = [_numbers(state.get(p, {})) for p in module.parameters()]
    shapes = [[(value.shape, value.dtype) for value in some] for some in moments]
    same = [len({*map(str, each)}) == 1 for each in zip(*world.gather(shapes), strict=True)]
    common = [value for some, all_have in zip(moments, same, strict=True) if all_have for value in some]
    return _inexact(module.buffers()) + common


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in buckets of one dtype on one device, up to a size."""
    begun: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        bucket = begun.setdefault(kind, [])
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > BUCKET_BYTES:
            yield begun.pop(kind)
            bucket = begun.setdefault(kind, [])
        bucket.append(tensor)
    yield from begun.values()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _numbers(state: Mapping[str, Any]) -> list[Tensor]:
    """Return the optimizer state of a parameter: moments and a step count, which may also differ."""
    return _inexact(value for value in state.values() if isinstance(value, Tensor))


def _inexact(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that can be averaged. Integer tensors stay as they are on each rank."""
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _check_steps(strategy: str, option: str, value: object, *, least: int) -> None:
    if not is_integer(value, least=least):
        raise StepError(
            given=f"shoal.{strategy}({option}={value!r})",
            found=f"{option} is a number of optimizer steps, {least} or more",
            fix=f"shoal.{strategy}({option}=8)" if least else f"leave {option} out",
        )

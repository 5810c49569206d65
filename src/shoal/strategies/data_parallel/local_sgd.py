"""Replicas that train alone and are averaged now and then: LocalSGD and DiLoCo.

Between two averagings no rank sends anything, so a slow link costs little. Not in the promise that one
process is the specification: the numbers depend on how many ranks there are and how often they meet.
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
from shoal.data.micro import Micro
from shoal.distributed.world import World
from shoal.strategies.compiled import Compiler
from shoal.strategies.contracts import Engine, Totals
from shoal.strategies.data_parallel.compressed_collectives import Wire, joined, put_back
from shoal.strategies.local import local_engine
from shoal.strategies.task import Task
from shoal.telemetry.step_timer import COMMUNICATION
from shoal.util.errors import StepError

BUCKET_BYTES = 25 << 20
"""What is sent at once: more would need a copy of the whole model."""


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Each rank takes its own steps; every `sync_every` steps the parameters are averaged (Stich 2019).

    The first `warmup_steps` steps are averaged each, as Lin et al. 2020 advise (post-local SGD).
    Moments of the optimizer stay each rank's own, but for what a checkpoint keeps, which is their
    mean.
    """

    axes: ClassVar[tuple[str, ...]] = ("replicate",)
    defers: ClassVar[bool] = False

    sync_every: int = 8
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_steps("LocalSGD", "sync_every", self.sync_every, least=1)
        _check_steps("LocalSGD", "warmup_steps", self.warmup_steps, least=0)

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Give all ranks rank 0's parameters and buffers, and return the engine."""
        return AveragingEngine(model.to(world.device), world, self.sync_every, self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Every `sync_every` steps the mean way that the ranks have gone is one step of an outer optimizer.

    Douillard et al. 2023: the outer optimizer is SGD with Nesterov momentum, `lr` and `momentum`
    are theirs, and so is what `sync_every` is by default. Moments of the inner optimizer stay each
    rank's own, but for what a checkpoint keeps, which is their mean.
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
                found="the outer rate is positive and the momentum in [0, 1)",
                fix="lr=0.7, momentum=0.9, those of the paper",
            )

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Give all ranks rank 0's parameters and buffers, and return the engine."""
        return AveragingEngine(model.to(world.device), world, self.sync_every, outer=self)


class AveragingEngine(Engine):
    """Runs the module as one process would, on this rank's local batch, and averages after some steps.

    The user's own loop can't drive it: it has to know when the optimizer has stepped.
    """

    independent_steps = True

    def __init__(
        self,
        module: nn.Module,
        world: World,
        every: int,
        together: int = 0,
        outer: DiLoCo | None = None,
    ) -> None:
        self.module = module
        self.world = world
        self._wire = Wire(world)
        self._every = every
        self._together = together
        self._taken = 0
        self._local = local_engine(module, world)
        self._parameters = self._local.reducer.held.parameters
        for tensor in (*module.parameters(), *module.buffers()):
            if world.size > 1:
                torch.distributed.broadcast(tensor.detach(), group=world.group, group_src=0)
        self._outer = None if outer is None else OuterStep(module, self._parameters, outer)

    @property
    def sent(self) -> int:
        """The bytes that this rank has put on the wire since the engine was made; see `Wire`."""
        return self._wire.sent

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Compute those of this rank's local batch; see the contract."""
        if self._taken == 0 and self._outer is not None:
            self._outer.start()
        totals = self._local.gradients(task, batch, autocast=autocast, scale=scale)
        return totals._replace(local=True)

    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Step without the others, then average if it is time; see the contract."""
        if factor == 0:  # no sample was this rank's: a step would let its moments decay
            self._local.discard()
        else:
            self._local.update(optimizer, factor)
        self._count()

    def discard(self) -> None:
        """Clear the gradients; others may have stepped, and count this as a step."""
        self._local.discard()
        self._count()

    def infer(self, task: Task, micro: Micro, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output of this rank's parameters, which `synchronize` has averaged."""
        return self._local.infer(task, micro, seed, autocast=autocast)

    def compile(self, how: str) -> None:
        """Run the forward compiled; see the contract."""
        self._local.compile(how)

    def compile_with(self, compiler: Compiler) -> None:
        """Run the forward compiled by `compiler`; see the contract."""
        self._local.compile_with(compiler)

    def synchronize(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Average parameters, buffers and moments: an averaging more, which training goes on from."""
        self._average(_inexact(self.module.parameters()))
        self._average(others(self.module, optimizer, self.world))

    def state(self) -> dict[str, Any]:
        """Return how many steps were taken, and what an outer step keeps."""
        outer = {} if self._outer is None else self._outer.state()
        return {"taken": self._taken, **outer}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there; a checkpoint of another strategy has nothing to count on from."""
        self._taken = state.get("taken", 0)
        if self._outer is not None:
            self._outer.load_state(state)

    def _count(self) -> None:
        self._taken += 1
        if self._taken % self._every == 0 or self._taken <= self._together:
            self._average(self._parameters)
            if self._outer is not None:
                self._outer.step()

    def _average(self, tensors: Sequence[Tensor]) -> None:
        with self.world.timeline.within(COMMUNICATION):
            average(tensors, self._wire, self.world.device)


class OuterStep:
    """Takes the mean way of the ranks since they met last for the gradient of an outer optimizer."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], options: DiLoCo) -> None:
        self._module = module
        self._parameters = parameters
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._anchors = [p.detach().clone() for p in parameters]
        self._optimizer = torch.optim.SGD(
            self._anchors, lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0
        )

    def start(self) -> None:
        """Begin from where the parameters are: weights may have been loaded."""
        foreach.copy_(self._anchors, [p.detach() for p in self._parameters])

    def step(self) -> None:
        """Step from where the ranks met last, on parameters that have just been averaged."""
        parameters = [p.detach() for p in self._parameters]
        for anchor, parameter in zip(self._anchors, parameters, strict=True):
            anchor.grad = anchor - parameter
        self._optimizer.step()
        self._optimizer.zero_grad()
        foreach.copy_(parameters, self._anchors)

    def state(self) -> dict[str, Any]:
        """Return where the ranks met last and the outer momentum, by the names of parameters."""
        momentum = {
            name: self._optimizer.state[anchor]["momentum_buffer"]
            for name, anchor in zip(self._names, self._anchors, strict=True)
            if self._optimizer.state.get(anchor, {}).get("momentum_buffer") is not None
        }
        return {"anchors": dict(zip(self._names, self._anchors, strict=True)), "momentum": momentum}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there; from a checkpoint of another strategy the ranks set out together."""
        loaded = dict(self._module.named_parameters())
        anchors, momentum = state.get("anchors", loaded), state.get("momentum", {})
        for name, anchor in zip(self._names, self._anchors, strict=True):
            anchor.copy_(anchors.get(name, loaded[name]).detach())  # it may have been frozen then
            kept = momentum.get(name)
            if kept is None:
                self._optimizer.state.pop(anchor, None)
            else:
                self._optimizer.state[anchor] = {"momentum_buffer": kept.to(anchor, copy=True)}


def average(tensors: Sequence[Tensor], wire: Wire, device: torch.device) -> None:
    """Replace each by its mean over the ranks, bucket by bucket. Collective."""
    if wire.size == 1:
        return
    for bucket in _buckets([_real(tensor.detach()) for tensor in tensors]):
        flat = joined(bucket)
        # 16 bits would round sums; and optimizers keep their count of steps on the CPU.
        flat = flat.to(device, torch.promote_types(flat.dtype, torch.float32))
        put_back(wire.mean(flat), bucket)


def others(module: nn.Module, optimizer: torch.optim.Optimizer | None, world: World) -> list[Tensor]:
    """What ranks that step alone have besides parameters: buffers, and moments that all have.

    Collective. A rank has none of a parameter that its samples have not used so far, and none at all
    if it had no sample; of such parameters all keep their own.
    """
    state = {} if optimizer is None else optimizer.state
    moments = [_numbers(state.get(p, {})) for p in module.parameters()]
    shapes = [[(value.shape, value.dtype) for value in some] for some in moments]
    alike = [len({*map(str, each)}) == 1 for each in zip(*world.gather(shapes), strict=True)]
    common = [
        value for some, all_have in zip(moments, alike, strict=True) if all_have for value in some
    ]
    return _inexact(module.buffers()) + common


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, those of one dtype on one device together up to a size."""
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
    """What an optimizer keeps of a parameter: moments, and a count of steps, which may differ too."""
    return _inexact(value for value in state.values() if isinstance(value, Tensor))


def _inexact(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of which there are means; whole numbers, of which there are none, stay each rank's own."""
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _check_steps(strategy: str, option: str, value: object, *, least: int) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return
    raise StepError(
        given=f"shoal.{strategy}({option}={value!r})",
        found=f"it is a number of optimizer steps, {least} or more",
        fix=f"shoal.{strategy}({option}=8)" if least else f"leave {option} out",
    )

"""The memory and the work of one rank, from steps of the user's module on tensors without values.

The module runs through Shoal's own strategies and torch's own optimizer, on one rank whose other ranks
do not exist. A dispatch mode counts the storages that live.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.autograd import in_backward
from shoal._torch.dispatch import tree_iter, tree_map, without_modes
from shoal._torch.modules import compiled_module
from shoal._torch.simulation import (
    FakeTensors,
    KernelWorkspaces,
    KnownNumbers,
    LocalCollectives,
    constructing,
    end_fake_group,
    simulating,
)
from shoal.data import Loader
from shoal.data.batch import Batch
from shoal.distributed.layout import Layout
from shoal.strategies import parallelize
from shoal.strategies.activation_checkpoint import ActivationCheckpointing
from shoal.strategies.context_parallel.options import ContextParallel
from shoal.strategies.data_parallel.ddp import DDP
from shoal.strategies.data_parallel.local_sgd import DiLoCo, LocalSGD
from shoal.strategies.dtensor import share
from shoal.strategies.expert_parallel.options import ExpertParallel
from shoal.strategies.expert_parallel.parts import number_of_experts
from shoal.strategies.fsdp.options import FSDP
from shoal.strategies.pipeline.flow import KnownForms
from shoal.strategies.pipeline.options import Pipeline
from shoal.strategies.tensor_parallel.options import TensorParallel
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.memory.estimate import RankMemory
from shoal.tools.plan.memory.live_bytes import LiveBytes, PeakStorage, reserved_bytes
from shoal.tools.plan.work.assumed_routing import AssumedRouting
from shoal.tools.plan.work.planned_step import PlannedStep, Work, WorkSegment
from shoal.tools.plan.work.simulated_world import SimulatedWorld, simulated_world
from shoal.tools.plan.work.traced_stages import split_points, stage_forms
from shoal.tools.plan.work.traced_work import TracedWork
from shoal.training.saved_plan import STEP_PRECISIONS
from shoal.training.step import PRECISIONS, Step
from shoal.util.errors import LaunchError, ShoalError

_KINDS = ("parameters", "gradients", "optimizer", "activations", "communication", "temporary")
_STEPS = 3
_NEARLY = 0.999
"""The part of the peak from which the storages are kept: garbage may be freed at another moment."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """The memory of one rank in an optimizer step, and its operations in their order.

    `plan` is the traced plan, with the split points of a pipeline. `every` is the number of steps of
    which one averages the parameters, as the traced step does; 1 for other strategies. `imbalance` is
    the number of tokens of the busiest rank's experts, relative to the mean.
    """

    plan: PlannedStep
    memory: RankMemory
    segments: tuple[WorkSegment, ...]
    every: int = 1
    imbalance: float = 1.0

    @property
    def work(self) -> Work:
        """The sum of the work of all operations."""
        return sum((each.work for each in self.segments), Work())


def trace_step(
    build: Callable[[], Workload],
    plan: PlannedStep,
    *,
    rank: int = 0,
    devices: int = 8,
    fake: bool = True,
    averaging: bool = True,
    busiest: bool = False,
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> TracedStep:
    """Return the memory and the work of one rank in a step of a training, without the other ranks.

    `build` returns the model, its task, its dataset and its strategy, None for those of the plan; it is
    called once. `devices` is the number of devices of a node. With `fake=False`, the steps compute with
    values, in the memory of this machine. `averaging` says whether the step of a strategy such as
    LocalSGD averages the parameters, and `busiest` that the experts of this rank get the tokens of the
    busiest rank, in place of the mean. `optimizer` makes another one than AdamW.

    Raises:
        ShoalError: If the module fails on fake tensors, with its name, or the plan does not fit it.
    """
    if plan.precision not in STEP_PRECISIONS:
        raise ShoalError(
            given=f"precision {plan.precision!r} of a traced module",
            found="Shoal's steps keep parameters in the dtype of the module",
            fix=f"use one of {', '.join(STEP_PRECISIONS)}; or convert the module where it is built",
        )
    world = simulated_world(plan.layout, rank, devices)
    try:
        trace = _Trace(build(), plan, world, fake=fake, busiest=busiest)
        return trace.run(optimizer or partial(torch.optim.AdamW, lr=1e-4), averaging=averaging)
    finally:
        world.close()
        end_fake_group()


def numbers_of_experts(build: Callable[[], Workload], *, fake: bool = True) -> set[int]:
    """Return the numbers of experts that the modules of a model have; none without experts."""
    plan = PlannedStep(layout=Layout(), global_batch=1, micro_batch=1)
    world = simulated_world(plan.layout, 0, 1)
    trace = _Trace(build(), plan, world, fake=fake, busiest=False)
    try:
        with simulating(), trace.fake or nullcontext(), trace.numbers:
            return {number_of_experts(module) for module in trace.built().modules()} - {0}
    except ShoalError:
        raise
    except Exception as error:
        raise trace.failure(error, {}) from error
    finally:
        world.close()


class _Trace:
    """Steps of one rank, and the storages that live in them."""

    def __init__(
        self,
        workload: Workload,
        plan: PlannedStep,
        world: SimulatedWorld,
        *,
        fake: bool,
        busiest: bool,
    ) -> None:
        self.workload = workload
        self.plan = plan
        self.world = world
        self.calls: list[nn.Module] = []
        """The modules whose forward passes run, the innermost last."""
        self.updating = self.checking = False
        self.checks = 0
        """The peak of the checks on the first batch."""
        self.passing = "forward"
        self.gradients: set[int] = set()
        self.fake = FakeTensors() if fake else None
        self.routing = AssumedRouting(world, self.fake, busiest=busiest)
        self.constructing = False
        self.numbers = KnownNumbers(self.read_by_user)
        self.live = LiveBytes(self.moment)
        self.work = TracedWork(self.moment)

    def moment(self) -> str:
        """Return the part of the step that runs; FSDP reduces gradients after the backward pass too."""
        if self.checking:
            return "checks"
        if self.updating:
            return "update"
        if in_backward():
            self.passing = "backward"
        elif self.calls:
            self.passing = "forward"
        return self.passing

    def run(
        self,
        make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        *,
        averaging: bool,
    ) -> TracedStep:
        """Take three steps: one that creates the optimizer state, and two that look for the peak.

        The checks on the first batch come before them.
        """
        names: dict[nn.Module, str] = {}
        try:
            strategy, every = self.strategy(averaging=averaging)
            with self.counted():
                model = parallelize(self.routed(), self.world, strategy)
                optimizer = make_optimizer(model.parameters())
                optimizer.register_step_pre_hook(self.note_gradients)
                precision = STEP_PRECISIONS[self.plan.precision]
                step = Step(model, optimizer, self.workload.task, precision=precision, clip=1.0)
            names |= {module: name for name, module in model.named_modules()}
            peak, batches = 0, self.batches()
            for number in range(1, _STEPS + 1):
                with self.live:
                    batch = next(batches)
                self.check_size(batch)
                gc.collect()
                last = number == _STEPS
                with self.counted(), self.following(), self.work if last else nullcontext():
                    given = self.fake_batch(batch)
                    if number == 1:
                        self.check(step, given)
                    self.live.restart(_NEARLY * peak if last else 0.0)
                    self.step(step, given)
                peak = self.live.peak
        except ShoalError:
            raise
        except Exception as error:
            raise self.failure(error, names) from error
        memory = self.kinds(model, optimizer)
        return TracedStep(
            plan=self.plan,
            memory=memory,
            segments=self.work.segments,
            every=every,
            imbalance=self.routing.imbalance,
        )

    def strategy(self, *, averaging: bool) -> tuple[Any, int]:
        """Return the strategy of the steps, and the number of steps of which one averages parameters.

        Raises ShoalError for options of the plan that a given strategy does not use.
        """
        given, plan = self.workload.strategy, self.plan
        if given is None:
            if plan.layout.pipeline > 1:
                self.plan = self.split()
            return planned_strategies(self.plan), 1
        if plan.layout.pipeline > 1 or plan.recompute != "none":
            unused = "pipelines" if plan.layout.pipeline > 1 else "--recompute"
            raise ShoalError(
                given=f"a function that returns the strategy {given!r}",
                found=f"{unused} can't be added to it",
                fix="return (model, task, dataset) without the strategy",
            )
        if isinstance(given, LocalSGD | DiLoCo):
            return replace(given, sync_every=1 if averaging else _STEPS + 1), given.sync_every
        return given, 1

    def split(self) -> PlannedStep:
        """Return the plan with split points; this rank then knows what other stages would send."""
        with simulating(), self.fake or nullcontext(), self.numbers:
            micro = self.fake_batch(next(self.batches())).micros[0]
            task = self.workload.task
            points = split_points(self.routed(), self.plan, task, micro)
            autocast = PRECISIONS[STEP_PRECISIONS[self.plan.precision]]
            forms = stage_forms(self.routed(), points, self.world, task, micro, autocast)
        self.world.provide(KnownForms, KnownForms(forms))
        return replace(self.plan, split_points=points)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Run operations on fake tensors, without other ranks, and count their storages."""
        with ExitStack() as modes:
            modes.enter_context(simulating())
            if self.fake is not None:
                modes.enter_context(self.fake)
            modes.enter_context(self.live)
            modes.enter_context(self.numbers)
            modes.enter_context(LocalCollectives())
            modes.enter_context(KernelWorkspaces())
            modes.enter_context(self.live.following_resizes())
            yield

    @contextmanager
    def following(self) -> Iterator[None]:
        """Note the modules whose forward passes run; after an error, the one that failed is last."""

        def leave(module: nn.Module, *_: object) -> None:
            self.calls.pop()

        handles = (
            nn.modules.module.register_module_forward_pre_hook(lambda m, _: self.calls.append(m)),
            nn.modules.module.register_module_forward_hook(leave),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def routed(self) -> nn.Module:
        """Return the model, whose routers choose all experts equally often."""
        return self.routing.attach(self.built())

    def built(self) -> nn.Module:
        """Return the model of the workload, as a fake one if steps are.

        A function that fails on fake tensors, such as one that reads a value, is called without them.
        """
        model = self.workload.model
        if not isinstance(model, nn.Module):
            try:
                with self.constructed():
                    made = model()
            except Exception:
                if self.fake is None:
                    raise
                with self.constructed(), without_modes():
                    model = model()
            else:
                return eager_model(made)
        eager_model(model)
        if self.fake is None:
            return model
        tensors = {id(each): each for each in chain(model.parameters(), model.buffers())}
        return copy.deepcopy(model, {key: self.fake.from_tensor(own) for key, own in tensors.items()})

    @contextmanager
    def constructed(self) -> Iterator[None]:
        """Let the user's code construct a model."""
        self.constructing = True
        try:
            with constructing(self.numbers):
                yield
        finally:
            self.constructing = False

    def read_by_user(self) -> bool:
        """Return whether the user's code reads a value: in a construction, or in a forward pass."""
        if self.constructing:
            return self.fake is None or not _read_by("torch.nn.init")
        # A loss of fake tensors may read numbers too: only forward passes are the user's.
        return bool(self.calls or self.fake is None) and _read_by_user()

    def batches(self) -> Iterator[Batch]:
        """Return the batches of this rank, with values."""
        plan, dataset = self.plan, self.workload.dataset
        self.live.watch(tree_iter(dataset), counted=False)
        loader = Loader(
            dataset,
            self.world,
            batch_size=plan.global_batch,
            micro_batches=plan.micro_batches,
            shuffle=False,
        )
        return iter(loader.epochs(_STEPS))

    def check_size(self, batch: Batch) -> None:
        """Raise ShoalError for a dataset with too few samples."""
        if batch.size < self.plan.global_batch:
            raise ShoalError(
                given=f"a global batch of {self.plan.global_batch} samples",
                found=f"the dataset has {batch.size}",
                fix="return a dataset with more samples; they may be the same tensor",
            )

    def fake_batch(self, batch: Batch) -> Batch:
        """Return a batch with fake tensors in place of those of the Loader, which are counted."""
        if self.fake is None:
            return batch
        convert = self.fake.from_tensor
        micros = [
            micro._replace(
                value=tree_map(lambda x: convert(x) if isinstance(x, Tensor) else x, micro.value)
            )
            for micro in batch.micros
        ]
        self.live.watch((x for micro in micros for x in tree_iter(micro.value)), counted=False)
        return Batch(batch.first, batch.size, micros, seed=batch.seed, world=self.world)

    def check(self, step: Step, batch: Batch) -> None:
        """Run the checks on the first batch, in which no comparison finds a difference."""
        self.live.restart(0.0)
        self.checking = True
        with self.numbers.finding_nothing():
            step.prepare(batch)
        self.checking = False
        self.checks = self.live.peak

    def step(self, step: Step, batch: Batch) -> None:
        """Take an optimizer step for any values of loss and gradients."""
        engine, autocast = step.engine, PRECISIONS[step.precision]
        self.routing.imbalance = 1.0  # the checks have parts of the batch
        engine.gradients(self.workload.task, batch, autocast=autocast, scale=1.0)
        self.updating = True
        engine.update(step.optimizer, 0.5)
        self.updating = False

    def note_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note the storages of the gradients, which the update frees."""
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self.gradients = {self.live.number(share(p.grad)) for p in parameters if p.grad is not None}

    def kinds(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> RankMemory:
        """Return the bytes at the peak by kind. The checks come before gradients and states."""
        reserved = reserved_bytes(self.live.changes)
        owned = [share(each) for each in chain(model.parameters(), model.buffers())]
        if self.checks > self.live.peak:
            held = sum({self.live.number(each): each.nbytes for each in owned}.values())
            rest = self.checks - held
            known = dict.fromkeys(_KINDS, 0) | {"parameters": held, "temporary": rest}
            return RankMemory(kinds=known, moment="checks", reserved=reserved)
        parameters = {self.live.number(each) for each in owned}
        states = (share(each) for each in tree_iter(list(optimizer.state.values())))
        optimizing = {self.live.number(each) for each in states if isinstance(each, Tensor)}
        found = dict.fromkeys(_KINDS, 0)
        for key, one in self.live.at_peak.items():
            if key in parameters:
                kind = "parameters"
            elif key in optimizing:
                kind = "optimizer"
            elif key in self.gradients:
                kind = "gradients"
            else:
                kind = _kind(one)
            found[kind] += one.size
        return RankMemory(kinds=found, moment=self.live.peak_moment, reserved=reserved)

    def failure(self, error: Exception, names: dict[nn.Module, str]) -> ShoalError:
        """Return an error that names the module whose forward pass failed."""
        place = "the step, outside of a module"
        if self.calls:
            module = self.calls[-1]
            place = f"module {names.get(module) or 'model'} ({type(module).__name__})"
        line = (str(error).strip().splitlines() or [""])[0]
        return ShoalError(
            given=f"a trace of {place}" + (" on fake tensors" if self.fake else ""),
            found=f"it raises {type(error).__name__}: {line}",
            fix="run the model on a batch; if it succeeds, measure a step with values: --measure"
            if self.fake
            else "run the module on this batch without a plan first",
        )


def _read_by(name: str) -> bool:
    """Return whether a function of this module of torch reads a value."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != name:
        frame = frame.f_back
    return frame is not None


def _read_by_user() -> bool:
    """Return whether the innermost caller outside of torch is not Shoal, as in the user's forward."""
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith(("torch.", "shoal._torch.", "shoal.tools.plan.")):
            return not name.startswith("shoal.")
        frame = frame.f_back
    return True


def _kind(one: PeakStorage) -> str:
    if one.shared:
        return "communication"
    return "activations" if one.moment == "forward" else "temporary"


def eager_model(model: nn.Module) -> nn.Module:
    """Return a model. Raises ShoalError if it is compiled: compiled code can't be traced."""
    if compiled_module(model) is not None:
        raise LaunchError(
            given="a model of torch.compile",
            found="compiled code can't be traced",
            fix="return the model, and compile it in main, or with shoal.Step(…, compile=True)",
        )
    return model


def planned_strategies(plan: PlannedStep) -> list[Any]:
    """Return Shoal's strategies for a plan, with their default options."""
    layout = plan.layout
    found: list[Any] = []
    if plan.recompute != "none":
        save = ("products", "attention") if plan.recompute == "selective" else ()
        found.append(ActivationCheckpointing(save=save))
    if layout.context > 1:
        found.append(ContextParallel())
    if layout.tensor > 1:
        found.append(TensorParallel())
    if layout.expert > 1:
        found.append(ExpertParallel())
    if layout.pipeline > 1:
        found.append(Pipeline(split_points=plan.split_points, schedule=plan.schedule))
    elif layout.shard > 1 or not found:
        found.append(FSDP() if layout.shard > 1 else DDP())
    return found

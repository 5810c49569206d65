"""The local engine: this rank runs the complete module, one micro-batch after the other."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.modules import call_uncompiled, set_compiled_call
from shoal.data.batch import Batch, Count
from shoal.data.coupling.step import CoupledStep
from shoal.data.micro import MicroBatch
from shoal.distributed.to_device import device_in, move
from shoal.distributed.world import World
from shoal.strategies.activation_checkpoint import runs_again
from shoal.strategies.compiled import Compiler, RepeatedBlocks, recomputed_refused
from shoal.strategies.correction import AnyTotals
from shoal.strategies.coupling.batch_norm import own_classes
from shoal.strategies.engine import ReducerEngine
from shoal.strategies.held_parameters import HeldParameters
from shoal.strategies.idle_experts import divided_experts
from shoal.strategies.multi_device import DeviceSpan
from shoal.strategies.random_draws.graphs import keyed_backend
from shoal.strategies.reducer import LocalReducer, Reducer
from shoal.strategies.task import Task
from shoal.telemetry.step_timer import BACKWARD, FORWARD, UPDATE
from shoal.util.errors import StepError


def local_engine(module: nn.Module, world: World) -> LocalEngine:
    """Return the engine of one process, the specification of all others."""
    return LocalEngine(LocalReducer(HeldParameters(module, world)))


class LocalEngine(ReducerEngine):
    """Engine that runs the complete module on this rank.

    `call` runs the forward of the module: the module itself, or another form of it with the same
    parameters, such as a compiled one.
    """

    loopable = True
    compiled = False
    """Whether the module, or its blocks, run compiled."""

    def __init__(self, reducer: Reducer, call: Callable[..., Any] | None = None) -> None:
        super().__init__(reducer)
        self.call: Callable[..., Any] = call or self.module

    def compile(self, how: str) -> None:
        """Run the forward pass compiled by torch.compile, or by TorchScript ("script")."""
        self._check_compilable(f"compile={how!r}", blocks=how == "blocks")
        self.compiled = True
        if how == "blocks":
            RepeatedBlocks(self.module).compile()
            return
        if how == "inductor":
            self.call = self.reducer.compiled(torch.compile(self.module, backend=keyed_backend()))
            return
        if divided_experts(self.module):
            raise StepError(
                given="compile='script' with shoal.ExpertParallel()",
                found="TorchScript cannot call the functions that send tokens to their experts",
                fix="compile='blocks'",
            )
        if self.world.layout.degree("context") > 1:
            raise StepError(
                given="compile='script' with shoal.ContextParallel()",
                found="TorchScript cannot call the functions that slice sequences and exchange slices "
                "for heads",
                fix="compile='inductor'",
            )
        with own_classes(self.module, "compile='script'"):
            scripted = torch.jit.script(self.module)
        modules = dict(self.module.named_modules(remove_duplicate=False))
        twins = dict(scripted.named_modules(remove_duplicate=False))
        modes = [module.training for module in modules.values()]

        def call(*arguments: Any, **named: Any) -> Any:
            # The scripted modules have the same parameters and buffers, but separate modes.
            nonlocal modes
            found = [module.training for module in modules.values()]
            if found != modes:
                for name, training in zip(modules, found, strict=True):
                    twins[name].training = training
                modes = found
            return scripted(*arguments, **named)

        self.call = call

    def compile_with(self, compiler: Compiler) -> None:
        """Run the forward pass compiled by `compiler`; see the contract."""
        self._check_compilable("torch.compile(model)")
        self.compiled = True
        module = self.module

        def call(*arguments: Any, **named: Any) -> Any:
            # In a separate frame: torch compiles none that begins in a layer of torch.
            return call_uncompiled(module, *arguments, **named)

        self.call = self.reducer.compiled(compiler(call))
        set_compiled_call(module, self.call)  # as in module.compile(), for custom training loops

    def _check_compilable(self, given: str, *, blocks: bool = False) -> None:
        if self.world.virtual_ranks is not None:
            raise StepError(
                given=f"{given} with exact='bits'",
                found="for micro-batches of another size, torch.compile generates code that adds "
                "numbers in another order",
                fix="leave compile out, or exact='bits'",
            )
        if self.held.span is not None and self.held.span.hooked:
            raise StepError(
                given=f"{given} with shoal.DevicePlacement(…)",
                found="the hooks that move tensors between devices would be inside the compiled code",
                fix="leave compile out; or compile parts that are on one device beforehand: "
                "model.blocks[0].compile()",
            )
        if not blocks and runs_again(self.module):
            raise recomputed_refused(given)

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> AnyTotals:
        """Run the micro-batches one after the other; see the contract."""
        self.held.check_converted()
        micros = batch.micros
        enter = self.world.timeline.enter
        coupled = self.world.service(CoupledStep)
        ahead = 1 if self.held.span is None else self.held.span.in_flight or len(micros)
        for start in range(0, len(micros), ahead):
            losses: deque[tuple[Tensor, Count]] = deque()
            for micro in micros[start : start + ahead]:
                with coupled.processing(micro):
                    losses.append(self.loss(task, micro, batch.seed, autocast))
            enter(BACKWARD)
            for index in range(start, start + len(losses)):
                loss, count = losses.popleft()
                last = index == len(micros) - 1
                with coupled.processing(micros[index]):  # which recomputes forwards
                    self.reducer.backward(
                        loss, count, micros[index], batch.size, scale=scale, last=last
                    )
            enter(UPDATE if last else FORWARD)
        return self.reducer.totals()

    def loss(
        self, task: Task, micro: MicroBatch, seed: int, autocast: torch.dtype | None
    ) -> tuple[Tensor, Count]:
        """Run the forward pass of a micro-batch; return its loss sum and its count."""
        with self._running(autocast):
            output = task.forward(self.call, micro, seed)
            return task.reduce(output, self.move_targets(output, micro), seed)

    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output of the module; see the contract."""
        with self._running(autocast):
            return task.forward(self.call, micro, seed)

    def move_targets(self, output: Any, micro: MicroBatch) -> MicroBatch:
        """Move the micro-batch if the model is on several devices; see the contract."""
        device = None if self.held.span is None else device_in(output)
        return micro if device is None else micro._replace(value=move(micro.value, device))

    @contextlib.contextmanager
    def _several(self, span: DeviceSpan, autocast: torch.dtype | None) -> Iterator[None]:
        """Use autocast on all types of devices of the model. Raise StepError for mixed devices."""
        with contextlib.ExitStack() as stack:
            for kind in {self.world.device.type, *(device.type for device in span.devices)}:
                stack.enter_context(mixed(torch.device(kind), autocast))
            try:
                yield
            except RuntimeError as error:
                if "same device" not in str(error):
                    raise
                raise StepError(
                    given=f"the forward of a {type(self.module).__name__} on "
                    + ", ".join(map(str, span.devices)),
                    found=f"an operation between its modules has tensors of several devices: {error}",
                    fix="place the modules of these tensors on one device, or use x.to(y.device) in "
                    "the forward",
                ) from error

    def _running(self, autocast: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
        if self.held.span is None:
            return mixed(self.world.device, autocast)
        return self._several(self.held.span, autocast)


def mixed(device: torch.device, autocast: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Return torch's autocast for `autocast`, or a null context for None."""
    return contextlib.nullcontext() if autocast is None else torch.autocast(device.type, autocast)

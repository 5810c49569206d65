"""The engine that runs the user's module here, whole, one micro-batch after the other."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal._torch.autograd import version
from shoal._torch.modules import call_uncompiled, set_compiled_call
from shoal.data.batch import Batch, Count
from shoal.data.micro import Micro
from shoal.distributed.to_device import device_in, move
from shoal.distributed.world import World
from shoal.strategies.activation_checkpoint import runs_again
from shoal.strategies.base_engine import HoldingEngine, first
from shoal.strategies.compiled import Compiler
from shoal.strategies.contracts import OpenEngine, Totals
from shoal.strategies.device_placement.multi_device import Span
from shoal.strategies.dtensor import share
from shoal.strategies.registry import engines_of
from shoal.strategies.task import Task
from shoal.telemetry.step_timer import BACKWARD, FORWARD, UPDATE
from shoal.util.errors import StepError


class LocalEngine(HoldingEngine, OpenEngine):
    """Runs the user's module here. Alone it is the engine of one process: the specification.

    Subclasses spread gradients over ranks by overriding `backward` and `_sums`. `call` is what runs
    the module's forward: the module itself, or a compiled form of it with the same parameters.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module, world)
        OpenEngine.__init__(self)
        self.call: Callable[..., Any] = module
        self._stepped = False
        """Whether an optimizer has stepped since the first backward of a batch that is not finished."""
        self._noted: list[tuple[int, int]] = []
        self._finished: dict[int, tuple[int, int]] = {}
        """The gradients of the last finished batch, as `batch.finish` or the optimizer left them."""
        self._awaited = False
        """Whether the optimizer has yet to step on them."""
        self._emptied = False
        """Whether it stepped after they had been cleared."""
        self._apart = False
        self._own = frozenset(map(id, self.parameters))
        handle = register_optimizer_step_post_hook(_noting_steps(weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    def compile(self, how: str) -> None:
        """Run the forward compiled by torch.compile ("inductor") or by TorchScript ("script")."""
        self._check_whole(f"compile={how!r}")
        if how == "inductor":
            self.call = torch.compile(self.module)
            return
        if self.world.layout.degree("context") > 1:
            raise StepError(
                given="compile='script' with shoal.ContextParallel()",
                found="TorchScript can't call what cuts sequences and exchanges slices for heads",
                fix="compile='inductor'",
            )
        scripted = torch.jit.script(self.module)
        modules = dict(self.module.named_modules(remove_duplicate=False))
        twins = dict(scripted.named_modules(remove_duplicate=False))
        modes = [module.training for module in modules.values()]

        def call(*arguments: Any, **named: Any) -> Any:
            # The scripted twins share parameters and buffers, but not the modes.
            nonlocal modes
            found = [module.training for module in modules.values()]
            if found != modes:
                for name, training in zip(modules, found, strict=True):
                    twins[name].training = training
                modes = found
            return scripted(*arguments, **named)

        self.call = call

    def compile_with(self, compiler: Compiler) -> None:
        """Run the forward compiled by `compiler`; see the contract."""
        self._check_whole("torch.compile(model)")
        module = self.module

        def call(*arguments: Any, **named: Any) -> Any:
            # In a frame of its own: torch compiles none that begins in a layer of torch's.
            return call_uncompiled(module, *arguments, **named)

        self.call = compiler(call)
        set_compiled_call(module, self.call)  # as in module.compile(): your own loop calls it too

    def _check_whole(self, given: str) -> None:
        if self._span is not None and self._span.hooked:
            raise StepError(
                given=f"{given} with shoal.DevicePlacement(…)",
                found="compiled code would have what moves tensors between devices in its middle",
                fix="leave compile out; or compile parts that are on one device beforehand: "
                "model.blocks[0].compile()",
            )
        if runs_again(self.module):
            raise StepError(
                given=f"{given} with shoal.ActivationCheckpointing()",
                found="torch can't compile a whole model of which parts run again in backward",
                fix="shoal.ActivationCheckpointing() with shoal.FSDP(), which compiles its units; or "
                "leave out one",
            )

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Run the micro-batches one after the other; see the contract."""
        self._check_converted()
        micros = batch.micros
        enter = self.world.timeline.enter
        ahead = 1 if self._span is None else self._span.in_flight or len(micros)
        for start in range(0, len(micros), ahead):
            losses = deque(
                self._forward(task, micro, batch.seed, autocast)
                for micro in micros[start : start + ahead]
            )
            enter(BACKWARD)
            for index in range(start, start + len(losses)):
                loss, count = losses.popleft()
                last = index == len(micros) - 1
                self.backward(loss, count, micros[index], batch.size, scale=scale, last=last)
            enter(UPDATE if last else FORWARD)
        return self.totals()

    def _forward(
        self, task: Task, micro: Micro, seed: int, autocast: torch.dtype | None
    ) -> tuple[Tensor, Count]:
        with self._running(autocast):
            output = task.forward(self.call, micro, seed)
            return task.reduce(output, self.beside(output, micro), seed)

    def backward(
        self, loss: Tensor, count: Count, micro: Micro, size: int, *, scale: float, last: bool
    ) -> None:
        """Backward of `scale * weight * loss / size`; see the contract."""
        if not loss.requires_grad:
            raise StepError(
                given="the loss of a micro-batch",
                found="it does not depend on any trainable parameter",
                fix="compute it from the model's output, without .detach(), .item() or no_grad()",
            )
        copies = self.world.layout.degree("context")  # of this loss; gradients of all are summed
        seed = torch.full_like(loss, scale * micro.weight / size / copies)
        self._differentiate(loss, seed, last=last)
        self._shown.append((loss.detach(), count, micro.weight))
        if last and not self._unused_checked:
            self._check_unused()

    def begin(self) -> None:
        """Forget the sums of a batch that was skipped; see the contract."""
        self._check_cleared()
        stepped, self._stepped = self._stepped, False
        if not self._pending():
            return
        if any(p.grad is not None for p in self.parameters):
            raise StepError(
                given="batch.backward on a new batch",
                found="the gradients of the batch before it, for which batch.finish was not called",
                fix="batch.finish(model) after each batch, or optimizer.zero_grad() to skip one; to "
                "accumulate, shoal.Loader(…, micro_batches=4)",
            )
        self.discard()
        if stepped:
            raise StepError(
                given="batch.backward on a new batch",
                found="the optimizer has stepped on the batch before it without batch.finish: its "
                "gradients were not those of the mean over the global batch",
                fix="batch.finish(model) before optimizer.step()",
            )

    def _check_cleared(self) -> None:
        """Raise StepError where the gradients of a finished batch were cleared too early or never."""
        finished, self._finished = self._finished, {}
        emptied, self._emptied = self._emptied, False
        self._awaited = False
        kept = [p for p in self.parameters if p.requires_grad and _unchanged(p, finished)]
        fix = "batch.finish(model), optimizer.step(), optimizer.zero_grad(), in this order; to "
        fix += "accumulate, shoal.Loader(…, micro_batches=4)"
        if kept:
            ids = set(map(id, kept))
            names = first([name for name, p in self.module.named_parameters() if id(p) in ids])
            self.discard()
            found = f"the gradients of the batch before it would be added to its own: {names}"
        elif emptied:
            found = "the gradients of the batch before it were cleared between batch.finish and "
            found += "optimizer.step(), which therefore changed nothing"
        else:
            return
        raise StepError(given="batch.backward on a new batch", found=found, fix=fix)

    def note_finish(self) -> None:
        """See the contract."""
        self._finished = self._finished_now()
        self._awaited = bool(self._finished)
        self._emptied = False

    def note_gradients(self) -> None:
        """See the contract."""
        self._noted = self._gradients_now()

    def check_gradients(self) -> None:
        """See the contract."""
        if self._stepped:
            found = "the optimizer has stepped before it, with gradients that were not the mean's"
            fix = "batch.finish(model), then optimizer.step()"
        elif self._noted != self._gradients_now():
            found = (
                "the gradients were changed after the last batch.backward, before they were the mean's"
            )
            fix = "batch.finish(model, clip=1.0) to clip them; change them in other ways after it"
        else:
            return
        self._stepped = False
        raise StepError(given="batch.finish(model)", found=found, fix=fix)

    def _gradients_now(self) -> list[tuple[int, int]]:
        """Which gradients there are, and how often each was changed."""
        return [_state(p.grad) for p in self.parameters if p.grad is not None]

    def _finished_now(self) -> dict[int, tuple[int, int]]:
        return {id(p): _state(p.grad) for p in self.parameters if p.grad is not None}

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: is it on gradients of a batch that is not finished?"""
        if self._pending() and not self._stepped:
            own = {id(p) for p in self.parameters if p.grad is not None}
            groups = optimizer.param_groups
            self._stepped = any(id(p) in own for group in groups for p in group["params"])
        if not self._unused_checked and self.world.size > 1 and self._steps_on_own(optimizer):
            self._report_apart()
        if self._awaited and self._steps_on_own(optimizer):
            self._awaited = False
            given = (p.grad for group in optimizer.param_groups for p in group["params"])
            self._emptied = all(gradient is None for gradient in given)
            # The loop may have clipped them since, and may never clear those of other parameters.
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._finished = {k: v for k, v in self._finished_now().items() if k in own}

    def _report_apart(self) -> None:
        """Say once that an optimizer has stepped on gradients that no rank has summed."""
        if not self._apart and any(p.grad is not None for p in self.parameters):
            self._apart = True
            self.world.print(
                f"shoal: an optimizer has stepped on a {type(self.module).__name__} before any "
                "batch.backward or step(batch): each rank trains on its own gradients. Take batches "
                "from shoal.Loader, and call batch.backward and batch.finish in place of loss.backward"
            )

    def _steps_on_own(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._own for group in optimizer.param_groups for p in group["params"])

    def infer(self, task: Task, micro: Micro, seed: int, *, autocast: torch.dtype | None) -> Any:
        """The output of the module as it stands; the caller has chosen mode and no_grad."""
        with self._running(autocast):
            return task.forward(self.call, micro, seed)

    def beside(self, output: Any, micro: Micro) -> Micro:
        """Moved where the model is on several devices; see the contract."""
        device = None if self._span is None else device_in(output)
        return micro if device is None else micro._replace(value=move(micro.value, device))

    @contextlib.contextmanager
    def _several(self, span: Span, autocast: torch.dtype | None) -> Iterator[None]:
        """Autocast on devices of all types that the model is on; StepError for what they can't do."""
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
                    found=f"between its modules it computes with tensors of several: {error}",
                    fix="place what it adds up on one device, or, in the forward, x.to(y.device)",
                ) from error

    def _running(self, autocast: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
        if self._span is None:
            return mixed(self.world.device, autocast)
        return self._several(self._span, autocast)

    def _differentiate(self, loss: Tensor, seed: Tensor, *, last: bool) -> None:
        torch.autograd.backward([loss], [seed], inputs=self._inputs())

    def _inputs(self) -> list[nn.Parameter] | None:
        # With several models, a loss of one may run through another (a GAN's generator through the
        # discriminator), whose parameters must not learn from it. Naming the leaves costs a little,
        # so it is done only then.
        if len(engines_of(self.world)) == 1:
            return None
        return [p for p in self.parameters if p.requires_grad]  # some may have been frozen since

    def _pending(self) -> bool:
        """Whether there are sums of a batch that was not finished."""
        return bool(self._shown)


def _state(gradient: Tensor) -> tuple[int, int]:
    """Where a gradient is, and how often it was changed."""
    own = share(gradient)
    return own.data_ptr(), version(own)


def _unchanged(parameter: nn.Parameter, before: dict[int, tuple[int, int]]) -> bool:
    gradient = parameter.grad
    return gradient is not None and before.get(id(parameter)) == _state(gradient)


def _noting_steps(engine: weakref.ref[LocalEngine]) -> Callable[..., None]:
    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        found = engine()
        if found is not None:
            found.note_step(optimizer)

    return note


def mixed(device: torch.device, autocast: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """torch's autocast for `autocast`, or nothing for None."""
    return contextlib.nullcontext() if autocast is None else torch.autocast(device.type, autocast)

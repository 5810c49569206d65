"""What engines share whose parameters and gradients live in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.batch import Batch
from shoal.engine import OpenEngine, Totals
from shoal.errors import StepError
from shoal.task import Count, Micro, Task
from shoal.world import World


class LocalEngine(OpenEngine):
    """Runs the user's module here. Alone it is the engine of one process: the specification.

    Subclasses spread gradients over ranks by overriding `backward` and `_sums`. `call` is what runs
    the module's forward: the module itself, or a compiled form of it with the same parameters.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        self.module = module
        self.world = world
        self.call: Callable[..., Any] = module
        _check_kinds(module)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if not self.parameters:
            raise StepError(
                given=f"parallelize({type(module).__name__}, world)",
                found="a model without trainable parameters",
                fix="parameter.requires_grad_(True) for what should learn, before parallelize",
            )
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._shown: list[tuple[Tensor, Count, float]] = []
        self._unused_checked = False

    def compile(self, how: str) -> None:
        """Run the forward compiled by torch.compile ("inductor") or by TorchScript ("script")."""
        if how == "inductor":
            self.call = torch.compile(self.module)
            return
        if self.world.layout.degree("context") > 1:
            raise StepError(
                given="compile='script' with shoal.Context()",
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

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Run the micro-batches one after the other; see the contract."""
        last = len(batch.micros) - 1
        clock = time.perf_counter
        forward = backward = 0.0
        for index, micro in enumerate(batch.micros):
            begun = clock()
            with mixed(self.world.device, autocast):
                output = task.forward(self.call, micro, batch.seed)
                loss, count = task.reduce(output, micro, batch.seed)
            del output  # the graph keeps what backward needs; the rest is memory
            middle = clock()
            self.backward(loss, count, micro, batch.size, scale=scale, last=index == last)
            forward += middle - begun
            backward += clock() - middle
        totals = self.totals()
        return totals._replace(forward=forward, backward=backward)

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
        """Forget the sums of a batch whose gradients were cleared; see the contract."""
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

    def totals(self) -> Totals:
        """The sums of the batch and the norm of its gradients, in one transfer from the device."""
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            self._refuse_others(thawed)
        norm = self._norm()
        loss_sum, count, value = self._sums(norm)
        self._shown.clear()
        return Totals(loss_sum, count, value)

    def multiply(self, factor: float) -> None:
        """Multiply the gradients by `factor`; by 1 is free."""
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)

    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply, step, clear; see the contract."""
        self.multiply(factor)
        optimizer.step()
        self.discard()

    def discard(self) -> None:
        """Drop the gradients, and what was recorded of the batch that they are of."""
        self._shown.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def infer(self, task: Task, micro: Micro, seed: int, *, autocast: torch.dtype | None) -> Any:
        """The output of the module as it stands; the caller has chosen mode and no_grad."""
        with mixed(self.world.device, autocast):
            return task.forward(self.call, micro, seed)

    def _differentiate(self, loss: Tensor, seed: Tensor, *, last: bool) -> None:
        torch.autograd.backward([loss], [seed], inputs=self._inputs())

    def _gradients(self) -> list[Tensor]:
        """What this rank holds of the gradients, as plain tensors."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def _norm(self) -> Tensor:
        return global_norm(self._gradients())

    def _inputs(self) -> list[nn.Parameter] | None:
        # With several models, a loss of one may run through another (a GAN's generator through the
        # discriminator), whose parameters must not learn from it. Naming the leaves costs a little,
        # so it is done only then.
        if len(self.world.engines) == 1:
            return None
        return [p for p in self.parameters if p.requires_grad]  # some may have been frozen since

    def _sums(self, norm: Tensor) -> tuple[float, float, float]:
        shown = self._shown
        if norm.device.type == "cpu" and not any(isinstance(c, Tensor) for _, c, _ in shown):
            loss_sum = sum(loss.item() for loss, _, weight in shown if weight)
            count = sum(float(count) for _, count, weight in shown if weight)
            return loss_sum, count, norm.item()
        zero = norm.new_zeros(())
        losses = sum((loss.to(norm) for loss, _, weight in shown if weight), zero)
        counts = sum((as_scalar(count, norm) for _, count, weight in shown if weight), zero)
        loss_sum, count, value = torch.stack((losses, counts, norm)).tolist()
        return loss_sum, count, value

    def _pending(self) -> bool:
        """Whether there are sums of a batch that was not finished."""
        return bool(self._shown)

    def _refuse_others(self, others: Sequence[Tensor]) -> None:
        ids = {id(p) for p in others}
        names = [name for name, p in self.module.named_parameters() if id(p) in ids]
        for p in others:
            p.grad = None  # nobody else would
        raise StepError(
            given=f"trainable parameters of {type(self.module).__name__}: {first(names)}",
            found="parallelize did not see them as such: they were frozen then, or were added since",
            fix="add layers and requires_grad_(True) before parallelize; to let a layer learn later, "
            "leave it out of the optimizer until then (add_param_group)",
        )

    def _check_unused(self) -> None:
        self._unused_checked = True
        known = {id(p) for p in self.parameters}
        others = [p for p in self.module.parameters() if p.requires_grad and id(p) not in known]
        if others:
            self._refuse_others(others)
        names = [n for n, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        if names:
            self._report_unused(names)

    def _report_unused(self, names: Sequence[str]) -> None:
        self.world.say(f"shoal: parameters that the loss does not use: {', '.join(names)}")


def first(names: Sequence[str], shown: int = 3) -> str:
    """The first few of `names`, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _check_kinds(module: nn.Module) -> None:
    """Refuse parameters that no engine here can sum and take the norm of."""
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]
    if lazy:
        raise StepError(
            given=f"parallelize({type(module).__name__}, world)",
            found=f"parameters without a shape as yet, of lazy layers: {first(lazy)}",
            fix="run the model once before, on a batch or a part of one: model(inputs)",
        )
    if sparse:
        raise StepError(
            given=f"parallelize({type(module).__name__}, world)",
            found=f"layers with sparse gradients: {first(sparse)}",
            fix="nn.Embedding(…, sparse=False)",
        )


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all elements of `gradients`, on the device of the first, at least float32.

    The fused primitives are those of torch.nn.utils.get_total_norm, without its grouping of every
    call by device and dtype, which takes longer than the norm itself for small models.
    """
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(list(gradients))
    first = norms[0]
    if any(norm.dtype != first.dtype or norm.device != first.device for norm in norms):
        dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
        norms = tuple(norm.to(first.device, dtype) for norm in norms)
    elif first.dtype in (torch.float16, torch.bfloat16):
        norms = torch._foreach_norm(list(gradients), 2, torch.float32)  # not rounded to 16 bits
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def mixed(device: torch.device, autocast: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """torch's autocast for `autocast`, or nothing for None."""
    return contextlib.nullcontext() if autocast is None else torch.autocast(device.type, autocast)


def as_scalar(count: Count, like: Tensor) -> Tensor:
    """`count` as a tensor without dimensions, with the dtype and on the device of `like`."""
    if isinstance(count, Tensor):
        return count.detach().reshape(()).to(like)
    return torch.as_tensor(count, dtype=like.dtype, device=like.device)

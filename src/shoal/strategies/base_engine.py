"""What engines share that hold parameters and gradients in this process, whoever runs the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal._torch import foreach
from shoal._torch.modules import parameters as module_parameters
from shoal.data.batch import Count
from shoal.distributed.world import World
from shoal.strategies.contracts import Engine, Totals
from shoal.strategies.device_placement.multi_device import span_of
from shoal.util.errors import StepError


class Kept(NamedTuple):
    """A parameter as it was when the engine was made, and where the module has it."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    device: torch.device
    table: dict[str, nn.Parameter | None]
    key: str

    @property
    def converted(self) -> bool:
        """Whether it has another dtype or another place, or what the module has instead is empty."""
        if self.parameter.dtype is not self.dtype or self.parameter.device != self.device:
            return True
        held = self.table.get(self.key)
        return held is not self.parameter and held is not None and held.is_meta

    @property
    def replaced(self) -> bool:
        """Whether the module has another parameter, or none, in its place."""
        return self.table.get(self.key) is not self.parameter


class HoldingEngine(Engine):
    """Sums of a batch, the norm of its gradients, and what is done to them."""

    parts = False
    """Whether it holds a part of a model, of which nothing need be trainable."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self.module = module
        self.world = world
        self._span = span_of(module)
        _check_kinds(module)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if not self.parts:
            check_learns(module)
        self._kept = [
            Kept(f"{prefix}.{key}".lstrip("."), p, p.dtype, p.device, module_parameters(part), key)
            for prefix, part in module.named_modules()
            for key, p in module_parameters(part).items()
            if p is not None and p.requires_grad
        ]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._shown: list[tuple[Tensor, Count, float]] = []
        """Loss sum, count and weight of the micro-batches of this batch so far."""
        self._unused_checked = False

    def totals(self) -> Totals:
        """The sums of the batch and the norm of its gradients, in one transfer from the device."""
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            self._refuse_others(thawed)
        self._check_converted()
        self._check_replaced()
        norm = self._norm()
        loss_sum, count, value = self._sums(norm)
        self._shown.clear()
        return Totals(loss_sum, count, value)

    def multiply(self, factor: float) -> None:
        """Multiply the gradients by `factor`; by 1 is free."""
        if factor != 1.0:
            for gradients in filter(None, self._by_device(self._gradients())):
                foreach.mul_(gradients, factor)

    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply, step, clear; see the contract."""
        self.multiply(factor)
        try:
            optimizer.step()
        finally:
            self.discard()  # whoever catches an error goes on with the next batch

    def discard(self) -> None:
        """Drop the gradients, and what was recorded of the batch that they are of."""
        self._shown.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        """What this rank holds of the gradients, as plain tensors."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def _by_device(self, gradients: list[Tensor]) -> list[list[Tensor]]:
        """The gradients in lists of one device each, which torch's fused primitives want."""
        if self._span is None:
            return [gradients]
        parts: dict[torch.device, list[Tensor]] = {}
        for gradient in gradients:
            parts.setdefault(gradient.device, []).append(gradient)
        return list(parts.values()) or [[]]

    def _norm(self) -> Tensor:
        norm, *others = [global_norm(gradients) for gradients in self._by_device(self._gradients())]
        for other in others:
            norm = torch.hypot(norm, other.to(norm.device))
        return norm

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

    def _check_converted(self) -> None:
        """Raise StepError if parameters were moved or given another dtype since."""
        if any(kept.converted for kept in self._kept):
            self._refuse_changed([kept for kept in self._kept if kept.converted])

    def _check_replaced(self) -> None:
        """Raise StepError if the module has others in their place; FSDP puts none there just now."""
        gone = [kept for kept in self._kept if kept.replaced]
        if gone:
            there = {id(p) for p in self.module.parameters()}  # under another name, where pruned
            gone = [kept for kept in gone if id(kept.parameter) not in there]
        if gone:
            self._refuse_changed(gone)

    def _refuse_changed(self, changed: Sequence[Kept]) -> NoReturn:
        raise StepError(
            given=f"parameters of a {type(self.module).__name__}: "
            f"{first([kept.name for kept in changed])}",
            found="they were moved, converted or replaced after parallelize; the optimizer, the other "
            "ranks and what sums gradients know them as they were",
            fix="model.double(), model.to(…) and the like before parallelize; to load values, "
            "shoal.load(model, state) in place of load_state_dict(state, assign=True)",
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
        self.world.print(f"shoal: parameters that the loss does not use: {', '.join(names)}")


def first(names: Sequence[str], shown: int = 3) -> str:
    """The first few of `names`, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def check_learns(module: nn.Module) -> None:
    """Raise StepError for a model without trainable parameters."""
    if not any(p.requires_grad for p in module.parameters()):
        raise StepError(
            given=f"parallelize({type(module).__name__}, world)",
            found="a model without trainable parameters",
            fix="parameter.requires_grad_(True) for what should learn, before parallelize",
        )


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
    norms = foreach.norm(gradients)
    first = norms[0]
    if any(norm.dtype != first.dtype or norm.device != first.device for norm in norms):
        dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
        norms = tuple(norm.to(first.device, dtype) for norm in norms)
    elif first.dtype in (torch.float16, torch.bfloat16):
        norms = foreach.norm(gradients, torch.float32)  # not rounded to 16 bits
    norm: Tensor = torch.linalg.vector_norm(torch.stack(tuple(norms)))
    return norm


def as_scalar(count: Count, like: Tensor) -> Tensor:
    """`count` as a tensor without dimensions, with the dtype and on the device of `like`."""
    if isinstance(count, Tensor):
        return count.detach().reshape(()).to(like)
    return torch.as_tensor(count, dtype=like.dtype, device=like.device)

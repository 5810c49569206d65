"""BatchNorm over the global batch, or over groups of its samples, whichever ranks hold them.

`couple` changes the class of BatchNorm layers in place, as FSDP2 does with modules. Their forward
takes statistics over groups of samples while a step runs, and is torch's own otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal._torch.modules import buffers
from shoal.data.coupling.layers import Coupled
from shoal.data.coupling.step import ATTRIBUTE, Coupling, Part, attach, coupling_of
from shoal.distributed.world import World
from shoal.strategies.coupling.statistics import normalize
from shoal.util.arguments import is_integer
from shoal.util.errors import StepError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OWN = nn.BatchNorm1d.forward
_FORWARDS = (_OWN, nn.SyncBatchNorm.forward)
"""The forwards of torch, which call nothing but `F.batch_norm`."""

SEPARATE_STEPS = "ranks take their steps separately"


def coupled_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers that couple samples in a known way, with their names."""
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, (*BATCH_NORMS, Coupled)):
            found[module] = name
    return found


def couple(model: nn.Module, world: World, statistics: int | str) -> bool:
    """Let layers that couple samples do so over `statistics`; return whether ranks exchange sums."""
    if statistics not in ("batch", "rank") and not is_integer(statistics, least=1):
        raise StepError(
            given=f"parallelize(…, statistics={statistics!r})",
            found="it is neither 'batch' nor 'rank' nor a positive number of samples",
            fix="pass statistics=64 for groups of 64 samples, or leave it out for the whole batch",
        )
    layers, coupling = coupled_layers(model), None
    if layers and statistics != "rank":
        coupling = Coupling(world, None if statistics == "batch" else int(statistics), layers)
    for module in layers:
        attach(module, coupling)
        if coupling is not None and isinstance(module, BATCH_NORMS):
            kind: Any = _original(type(module))
            module.__class__ = _taken_over(kind)
    return coupling is not None


def is_covered(module: nn.Module) -> bool:
    """Return whether a layer gives the same results however the batch is split."""
    return coupling_of(module) is not None


def uncovered_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that may differ between ranks, by name."""
    return buffers_of(model, (part for part in model.modules() if not is_covered(part)))


def buffers_of(model: nn.Module, parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers that `parts` of a model have themselves, by name."""
    own = {id(each) for part in parts for each in part.buffers(recurse=False)}
    return {name: each for name, each in model.named_buffers() if id(each) in own}


@contextmanager
def own_classes(model: nn.Module, given: str) -> Iterator[None]:
    """Give the layers their own classes inside the block, for TorchScript, which compiles the class.

    Raises StepError if they exchange sums with other ranks, which the compiled layers would not do.
    """
    taken = [module for module in model.modules() if isinstance(module, _TakenOver)]
    for module in taken:
        coupling = coupling_of(module)
        if coupling is not None and not coupling.alone:
            raise StepError(
                given=f"{given} of a {type(model).__name__} with {coupling.names[module]}",
                found="TorchScript cannot call the functions that exchange the sums of this layer",
                fix="compile='inductor', or shoal.parallelize(…, statistics='rank')",
            )
    kinds: list[Any] = [type(module) for module in taken]
    for module, kind in zip(taken, kinds, strict=True):
        module.__class__ = _original(kind)
    try:
        yield
    finally:
        for module, kind in zip(taken, kinds, strict=True):
            module.__class__ = kind


def refuse_coupled(model: nn.Module, given: str, found: str) -> None:
    """Raise StepError if the layers of `model` exchange sums, which a strategy does not support."""
    names = [name for module, name in coupled_layers(model).items() if is_covered(module)]
    if names:
        raise StepError(
            given=f"{given} around {type(model).__name__} with {names[0] or 'BatchNorm'}",
            found=f"{found}, so ranks cannot exchange the sums of this layer",
            fix="use shoal.parallelize(…, statistics='rank') for the statistics of each micro-batch "
            "of each rank, or GroupNorm or LayerNorm, which treat each sample separately",
        )


class _TakenOver(nn.Module):
    """The part of the class of a layer that has been taken over; its own class comes next."""

    _overrides: bool
    """Whether its own class has another forward than torch's classes."""

    def forward(self: Any, x: Tensor, *arguments: Any, **named: Any) -> Any:
        of_input = self.training or self.running_mean is None
        coupling = coupling_of(self) if of_input else None
        if coupling is None:
            return super().forward(x, *arguments, **named)
        # In compiled code, torch's own forward can be fused; that is not recomputed in backward.
        fused = coupling.alone and torch.compiler.is_compiling()
        if coupling.step.micro is None or fused:
            if self._overrides:
                return super().forward(x, *arguments, **named)
            # SyncBatchNorm's own forward would fail on the CPU.
            return _single(self, x) if _is_trial(x) else _OWN(self, x)
        return _in_groups(self, coupling, x, *arguments, **named)

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle as the original class."""
        state = {name: value for name, value in vars(self).items() if name != ATTRIBUTE}
        return object.__new__, (_original(type(self)),), state


def _is_trial(x: Tensor) -> bool:
    """Return whether a strategy tries the model on one padding sample, for which torch raises."""
    return not torch.is_grad_enabled() and x.numel() == x.shape[1]


def _single(module: Any, x: Tensor) -> Tensor:
    zeros, ones = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return F.batch_norm(x, zeros, ones, module.weight, module.bias, False, 0.0, module.eps)


@cache
def _taken_over(kind: type[Any]) -> type[Any]:
    """Return the class of a layer of class `kind` that has been taken over, with the same name."""
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"_overrides": kind.forward not in _FORWARDS}
    return type(kind.__name__, (_TakenOver, kind), same | own)


def _original(kind: type[Any]) -> type[Any]:
    order = kind.__mro__
    return order[order.index(_TakenOver) + 1] if issubclass(kind, _TakenOver) else kind


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_groups(module: Any, coupling: Coupling, x: Tensor, *arguments: Any, **named: Any) -> Any:
    part = coupling.part(module, len(x))
    kind = _original(type(module))
    if part is None:
        return kind.forward(module, x, *arguments, **named)
    if not module._overrides:
        module._check_input_dim(x)
        return normalize(module, part, x, module.weight, module.bias, module.eps)
    # A subclass with its own forward, such as timm's BatchNormAct2d: the call inside is taken over.
    table, counter = buffers(module), module.num_batches_tracked
    table["num_batches_tracked"] = None
    try:
        with _InGroups(module, part):
            return kind.forward(module, x, *arguments, **named)
    finally:
        table["num_batches_tracked"] = counter


class _InGroups(TorchFunctionMode):
    """Replaces `F.batch_norm` in the forward of a layer, where it uses the statistics of its input."""

    def __init__(self, module: nn.Module, part: Part) -> None:
        super().__init__()
        self._module = module
        self._part = part

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.batch_norm:
            return self._replaced(*args, **kwargs)
        return function(*args, **kwargs)

    def _replaced(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        return normalize(self._module, self._part, x, weight, bias, eps)

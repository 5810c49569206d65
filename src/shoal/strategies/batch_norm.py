"""BatchNorm over the global batch, or over groups of its samples, whichever ranks hold them.

`take_over` changes the class of BatchNorm layers in place, as FSDP2 does with modules. Their forward
takes statistics over groups of samples while a step runs, and is torch's own otherwise. Groups that one
rank has alone are normalized by torch's kernel. For the others, ranks gather the count, mean and sum of
squared deviations of each one's samples, and merge them (Chan et al. 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal._torch.autograd import in_backward
from shoal._torch.modules import buffers
from shoal.data.coupled import ATTRIBUTE, Coupled, Coupling, Part, attach, coupling_of
from shoal.util.errors import StepError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OWN = nn.BatchNorm1d.forward
_FORWARDS = (_OWN, nn.SyncBatchNorm.forward)
"""The forwards of torch, which call nothing but `F.batch_norm`."""

SEPARATE_STEPS = "ranks take their steps separately"

Moments: TypeAlias = list[tuple[Tensor, Tensor]]
"""Mean and unbiased variance of each group of this rank, per channel."""


def coupled_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers that couple samples in a known way, with their names."""
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, (*BATCH_NORMS, Coupled)):
            found[module] = name
    return found


def take_over(layers: dict[nn.Module, str], coupling: Coupling | None) -> None:
    """Let `layers` take statistics over the groups of `coupling`; None restores their behaviour."""
    for module in layers:
        attach(module, coupling)
        if coupling is not None and isinstance(module, BATCH_NORMS):
            kind: Any = _original(type(module))
            module.__class__ = _taken_over(kind)


def is_covered(module: nn.Module) -> bool:
    """Return whether a layer gives the same results however the batch is split."""
    return coupling_of(module) is not None


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
            fix="shoal.parallelize(…, statistics='rank') for the statistics of each micro-batch of "
            "each rank, or GroupNorm or LayerNorm, which treat each sample separately",
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
        return _normalize(module, part, x, module.weight, module.bias, module.eps)
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
        return _normalize(self._module, self._part, x, weight, bias, eps)


def _normalize(
    module: Any, part: Part, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return `x`, normalized by the statistics of its groups, and record them for the module."""
    _check_size(module, part, x)
    if part.groups.shared:
        y, means, variances = _Normalize.apply(x, weight, bias, eps, part)
        moments = list(zip(means.unbind(), variances.unbind(), strict=True))
    else:
        y, moments = _each_alone(x, weight, bias, eps, part)
    if moments and module.running_mean is not None and module.training and not in_backward():
        recorded = part.coupling.step.recorded
        if module not in recorded:
            recorded[module] = _Running(part, module)
        recorded[module].add(part.coupling.step.number(module), part, moments)  # type: ignore[attr-defined]
    return cast(Tensor, y)


def _check_size(module: nn.Module, part: Part, x: Tensor) -> None:
    """Raise StepError, on all ranks, for a group with one value per channel, as torch does."""
    if part.groups.least == 1 and x[:1].numel() <= x.shape[1]:
        raise StepError(
            given=f"{type(module).__name__} {part.coupling.names.get(module, '')}".strip()
            + ": a group of one sample",
            found="the variance of one value per channel is 0",
            fix="shoal.Loader(…, drop_last=True), or another batch_size or statistics=…",
        )


def _each_alone(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, part: Part
) -> tuple[Tensor, Moments]:
    """Normalize groups that this rank has alone with torch's kernel."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    moments: Moments = []
    pieces = []
    stop = 0
    for start, stop in part.segments:
        # With momentum 1, the running statistics become those of the input.
        mean, variance = (torch.zeros(x.shape[1], dtype=dtype, device=x.device) for _ in "mv")
        whole = (start, stop) == (0, len(x))
        segment = x if whole else x[start:stop]
        pieces.append(F.batch_norm(segment, mean, variance, weight, bias, True, 1.0, eps))
        moments.append((mean, variance))
    if stop < len(x):  # padding
        mean, variance = moments[-1] if moments else (x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]))
        pieces.append(F.batch_norm(x[stop:], mean, variance, weight, bias, False, 0.0, eps))
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)), moments


class _Normalize(torch.autograd.Function):
    """Normalization by statistics of groups whose samples several ranks hold. Collective, twice.

    Returns the result, and the means and unbiased variances of the groups of this rank.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        counts, means, squares = _merged(_local_moments(x, part), part)
        weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
        mean, variance = means.to(dtype), (squares / counts).to(dtype)
        pieces = [
            F.batch_norm(x[start:stop], mean[row], variance[row], weight, bias, False, 0.0, eps)
            for row, start, stop in _rows(part, len(x))
        ]
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        unbiased = (squares / (counts - 1)).to(dtype)
        context.save_for_backward(x, weight, mean, variance, counts)
        context.part, context.eps = part, eps
        context.mark_non_differentiable(mean, unbiased)
        return y, mean, unbiased

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, counts = context.saved_tensors
        part, eps = context.part, context.eps
        gradient = torch.zeros_like(x)
        sums = torch.zeros(len(mean), 2, x.shape[1], dtype=torch.float64, device=x.device)
        for row, (start, stop) in enumerate(part.segments):
            if stop > start:  # as if the statistics were constants
                pieces = torch.ops.aten.native_batch_norm_backward(
                    *(gradients[0][start:stop], x[start:stop], weight, mean[row], variance[row]),
                    *(None, None, False, eps, [True, True, True]),
                )
                gradient[start:stop] = pieces[0]
                sums[row] = torch.stack(pieces[:0:-1])
        of_bias, of_weight = sums.sum(0).to(mean.dtype)
        if context.needs_input_grad[0]:
            means = (part.add_up(sums) / counts.unsqueeze(-1)).to(mean.dtype)
            factor = (variance + eps).rsqrt()
            factor = -factor if weight is None else -factor * weight
            for row, (start, stop) in enumerate(part.segments):
                if stop > start:  # through the mean and the variance
                    bias, slope = means[row] * factor[row]
                    gradient[start:stop] += F.batch_norm(
                        x[start:stop], mean[row], variance[row], slope, bias, False, 0.0, eps
                    )
        given = (gradient, of_weight, of_bias)
        wanted = zip(given, context.needs_input_grad, strict=False)
        return (*(each if needed else None for each, needed in wanted), None, None)


def _local_moments(x: Tensor, part: Part) -> Tensor:
    """Return count, mean and sum of squared deviations of this rank's rows of each group."""
    channels = x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    found = torch.zeros(len(part.segments), 2 * channels + 1, dtype=torch.float64, device=x.device)
    for row, (start, stop) in enumerate(part.segments):
        if stop > start:
            zeros, ones = (torch.full((channels,), v, dtype=dtype, device=x.device) for v in (0.0, 1.0))
            segment = x[start:stop]
            mean, variance = torch.batch_norm_update_stats(segment, zeros, ones, 0.0)
            count = segment.numel() // channels
            found[row, 0] = count
            found[row, 1 : channels + 1] = mean
            found[row, channels + 1 :] = variance.double() * count
    return found


def _merged(local: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and sum of squared deviations of each group of this rank, over all ranks.

    The counts have shape (groups, 1), the others (groups, channels). Collective.
    """
    held, group = part.groups.held, part.coupling.step.group
    slots = max(map(len, held))
    sent = local.new_zeros(slots, local.shape[1])
    sent[: len(local)] = local
    gathered = [torch.empty_like(sent) for _ in held]
    dist.all_gather(gathered, sent, group=group)
    counts, means, squares = [], [], []
    for own in part.held:
        parts = torch.stack(
            [
                gathered[rank][slot]
                for rank, groups in enumerate(held)
                for slot, other in enumerate(groups)
                if other.group == own.group and other.stop > other.start
            ]
        )
        count, mean, square = parts.split([1, local.shape[1] // 2, local.shape[1] // 2], dim=1)
        total = count.sum(0)
        # Relative to one of the means, because the sum of large means loses digits.
        middle = mean[0] + (count * (mean - mean[0])).sum(0) / total
        counts.append(total)
        means.append(middle)
        squares.append(square.sum(0) + (count * (mean - middle).square()).sum(0))
    return torch.stack(counts), torch.stack(means), torch.stack(squares)


def _rows(part: Part, rows: int) -> list[tuple[int, int, int]]:
    """Return each segment with the row of its group; padding is of the last group."""
    found = [(row, *segment) for row, segment in enumerate(part.segments) if segment[1] > segment[0]]
    end = part.segments[-1][1]
    return [*found, (len(part.segments) - 1, end, rows)] if end < rows else found


class _Running:
    """The running statistics of a layer after a batch: a weighted sum of those of its groups.

    As in one process, each group moves them by `momentum`, in the order of positions. With n groups,
    the one with number i has the weight momentum · (1 - momentum)^(n - 1 - i).
    """

    def __init__(self, part: Part, module: Any) -> None:
        self.coupling = part.coupling
        self._module = module
        self._groups = part.groups.total
        self._calls: list[Tensor] = []

    def add(self, number: int, part: Part, moments: Moments) -> None:
        """Record the groups that this rank leads, or the only one, for a call of the layer."""
        if number == len(self._calls):
            like = self._module.running_mean
            self._calls.append(torch.zeros(2, len(like), dtype=torch.float64, device=like.device))
        momentum = self._module.momentum
        for held, (mean, variance) in zip(part.held, moments, strict=True):
            if held.leads or not self.coupling.split:
                after = self._groups - 1 - held.group
                weight = 1.0 if momentum is None else momentum * (1.0 - momentum) ** after
                self._calls[number][0].add_(mean, alpha=weight)
                self._calls[number][1].add_(variance, alpha=weight)

    def sums(self) -> Tensor:
        """See Recorded."""
        return torch.cat([sums.flatten() for sums in self._calls])

    def apply(self, total: Tensor) -> None:
        """See Recorded."""
        module, groups = self._module, self._groups
        for sums in total.view(len(self._calls), 2, -1):
            momentum = module.momentum
            counter = module.num_batches_tracked
            if momentum is None:  # the mean over all groups so far
                seen = float(counter)
                keep, weight = seen / (seen + groups), 1.0 / (seen + groups)
            else:
                keep, weight = (1.0 - momentum) ** groups, 1.0
            for buffer, sum_ in zip((module.running_mean, module.running_var), sums, strict=True):
                buffer.copy_(buffer.double() * keep + sum_ * weight)
            if counter is not None:
                counter.add_(groups)

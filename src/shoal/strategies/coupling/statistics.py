"""Normalization by the statistics of groups of samples, and the running statistics after a step.

Groups that one rank has alone are normalized by torch's kernel. For the others, ranks gather the count,
mean and sum of squared deviations of each one's samples, and merge them (Chan et al. 1979).
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal._torch.autograd import in_backward
from shoal.data.coupling.layers import add_up
from shoal.data.coupling.step import Part
from shoal.util.errors import StepError

Moments: TypeAlias = list[tuple[Tensor, Tensor]]
"""Mean and unbiased variance of each group of this rank, per channel."""


def normalize(
    module: Any, part: Part, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return `x`, normalized by the statistics of its groups, and record them for the module."""
    _check_size(module, part, x)
    if part.groups.shared:
        y, means, variances = _Normalize.apply(x, weight, bias, eps, part)
        moments = list(zip(means.unbind(), variances.unbind(), strict=True))
    else:
        y, moments = _each_alone(x, weight, bias, eps, part)
    # All ranks record: a rank may have empty virtual ranks only, and the sums are collective.
    records = bool(moments) or part.coupling.world.virtual_ranks is not None
    if records and module.running_mean is not None and module.training and not in_backward():
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
            fix="use shoal.Loader(…, drop_last=True), or another batch_size or statistics=…",
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
        ones = torch.ones(x.shape[1], dtype=dtype, device=x.device)
        mean, variance = moments[-1] if moments else (torch.zeros_like(ones), ones)
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
        scale, shift = (None if each is None else each.to(dtype) for each in (weight, bias))
        mean, variance = means.to(dtype), (squares / counts).to(dtype)
        pieces = [
            F.batch_norm(x[start:stop], mean[row], variance[row], scale, shift, False, 0.0, eps)
            for row, start, stop in _rows(part, len(x))
        ]
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        unbiased = (squares / (counts - 1)).to(dtype)
        context.save_for_backward(x, weight, bias, mean, variance, counts)
        context.part, context.eps = part, eps
        context.mark_non_differentiable(mean, unbiased)
        return y, mean, unbiased

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, counts = context.saved_tensors
        part, eps = context.part, context.eps
        if torch.is_grad_enabled():  # the gradients will be differentiated
            needed = context.needs_input_grad[:3]
            inputs = [each for each, need in zip((x, weight, bias), needed, strict=True) if need]
            y = _by_operations(x, weight, bias, eps, part, counts.to(mean.dtype))
            found = iter(torch.autograd.grad(y, inputs, gradients[0], create_graph=True))
            return (*(next(found) if need else None for need in needed), None, None)
        weight = None if weight is None else weight.to(mean.dtype)
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


def _by_operations(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, part: Part, counts: Tensor
) -> Tensor:
    """Return what `_Normalize` returns, by operations that can be differentiated twice. Collective."""
    across = [0, *range(2, x.dim())]
    wide = [1, -1] + [1] * (x.dim() - 2)
    segments = [x[start:stop].to(counts.dtype) for start, stop in part.segments]
    means = add_up(torch.stack([each.sum(across) for each in segments]), part) / counts
    centered = [each - mean.view(wide) for each, mean in zip(segments, means, strict=True)]
    squares = torch.stack([each.square().sum(across) for each in centered])
    factors = (add_up(squares, part) / counts + eps).rsqrt()
    end = part.segments[-1][1]
    # Padding is normalized by the statistics of the last group, as if they were constants.
    centered.append(x[end:] - means[-1].detach().view(wide))
    factors = torch.cat([factors, factors[-1:].detach()])
    y = torch.cat([each * factor.view(wide) for each, factor in zip(centered, factors, strict=True)])
    y = y if weight is None else y * weight.view(wide)
    return (y if bias is None else y + bias.view(wide)).to(x.dtype)


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
            # Rounded once, after the merge, as torch rounds the mean of one process.
            inner = list(range(2, x.dim()))
            sums = segment.sum(inner, dtype=dtype) if inner else segment
            exact = sums.double().sum(0) / count
            found[row, 0] = count
            found[row, 1 : channels + 1] = exact
            found[row, channels + 1 :] = (variance.double() - (mean - exact).square()) * count
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

    Virtual ranks have a row each, so that rows are added in the same order on any number of ranks.

    As in one process, each group moves them by `momentum`, in the order of positions. With n groups,
    the one with number i has the weight momentum · (1 - momentum)^(n - 1 - i).
    """

    def __init__(self, part: Part, module: Any) -> None:
        self.coupling = part.coupling
        self._module = module
        self._groups = part.groups.total
        virtual = part.coupling.world.virtual_ranks
        self._rows = 1 if virtual is None else virtual.total
        self._calls: list[Tensor] = []

    def add(self, number: int, part: Part, moments: Moments) -> None:
        """Record the groups that this rank leads, or the only one, for a call of the layer."""
        if number == len(self._calls):
            like = self._module.running_mean
            shape = (self._rows, 2, len(like))
            self._calls.append(torch.zeros(shape, dtype=torch.float64, device=like.device))
        row = self._calls[number][part.row]
        momentum = self._module.momentum
        for held, (mean, variance) in zip(part.held, moments, strict=True):
            if held.leads or not self.coupling.split:
                after = self._groups - 1 - held.group
                weight = 1.0 if momentum is None else momentum * (1.0 - momentum) ** after
                row[0].add_(mean, alpha=weight)
                row[1].add_(variance, alpha=weight)

    def sums(self) -> Tensor:
        """See Recorded."""
        return torch.cat([sums.flatten() for sums in self._calls])

    def apply(self, total: Tensor) -> None:
        """See Recorded."""
        module, groups = self._module, self._groups
        for rows in total.view(len(self._calls), self._rows, 2, -1):
            sums = rows[0]
            for row in rows[1:]:
                sums = sums + row
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

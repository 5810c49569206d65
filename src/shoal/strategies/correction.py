"""The sums of a batch, and the correction of its gradients by them: on the host, or on the device."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from shoal.data.batch import Batch
from shoal.util.arguments import check_number
from shoal.util.errors import StepError

Factor: TypeAlias = "float | Tensor"
"""The factor of the gradients of a step: a number, or a float64 tensor without dimensions."""


class DataPosition(Protocol):
    """The place of a global batch in the data: its Batch, or what is left of it."""

    @property
    def first(self) -> int:
        """Position of its first sample."""
        ...

    @property
    def size(self) -> int:
        """Number of its samples, over all ranks."""
        ...

    @property
    def share(self) -> tuple[int, int]:
        """Positions of this rank's samples."""
        ...


class Totals(NamedTuple):
    """Sums and gradient norm of a global batch, as plain numbers, the same on all ranks.

    `loss_sum` and `counted` are sums over the global batch. `norm` is the L2 norm of the current
    gradients, those of `scale * loss_sum / batch.size`, before the correction by the true count.
    With `local`, sums and norm are those of this rank's local batch, and differ between ranks:
    asynchronous strategies avoid the collective, and each rank decides separately.
    """

    loss_sum: float
    counted: float
    norm: float
    local: bool = False

    def read(self) -> Totals:
        """Return these totals, which are numbers already."""
        return self

    def vector(self) -> Tensor:
        """Return loss sum, count and norm as a float64 vector."""
        return torch.tensor(self[:3], dtype=torch.float64)


class DeviceTotals(NamedTuple):
    """Totals that are still on the device: loss sum, count and norm in one vector."""

    sums: Tensor

    def read(self) -> Totals:
        """Return the numbers. Waits for the device."""
        return Totals(*self.sums.tolist())

    def vector(self) -> Tensor:
        """Return loss sum, count and norm as a float64 vector."""
        return self.sums.double()


AnyTotals: TypeAlias = Totals | DeviceTotals


class Correction(NamedTuple):
    """Correction of the gradients of a step: multiply them by `factor`, or skip if not `finite`.

    `loss` is the mean over the global batch, `norm` that of its gradients before clipping.
    """

    loss: float
    norm: float
    counted: float
    factor: float
    finite: bool


def correct(totals: Totals, *, size: int, scale: float, clip: float | None) -> Correction:
    """Return one factor that corrects, unscales and clips the gradients of a step.

    Backward ran on `scale * loss_sum / size` with `size` known beforehand, and the step minimises
    `loss_sum / count`. So the true gradients, and their norm, are `size / (count * scale)` times the
    current ones. Clipping multiplies by `min(1, clip / norm)` (Pascanu et al. 2013, with torch's 1e-6
    in the denominator). The factor is 0 for a rank that steps separately and had no sample.
    """
    if totals.local and totals.counted == totals.loss_sum == 0:
        return Correction(math.nan, 0.0, 0.0, 0.0, True)
    if not 0 < totals.counted < math.inf:  # false for NaN too
        raise no_count(size, totals.counted)
    correction = size / (totals.counted * scale)
    norm = totals.norm * correction
    loss = totals.loss_sum / totals.counted
    factor = correction
    if clip is not None:
        factor *= min(1.0, clip / (norm + 1e-6))
    finite = math.isfinite(norm) and math.isfinite(loss)
    return Correction(loss, norm, totals.counted, factor, finite)


class DeviceCorrection(NamedTuple):
    """A Correction that is still on the device.

    `skip` is a float32 tensor, 1 if the step must not change anything and else 0. `values` are the mean
    loss, the norm before clipping and the count; a fourth is finite only if the count is one.
    """

    factor: Tensor
    skip: Tensor
    values: Tensor


def correct_on_device(
    sums: Tensor, *, size: int, clip: float | None, before: Tensor | None
) -> DeviceCorrection:
    """Return what `correct` does, with the same bits, without waiting for the device.

    `sums` are the float64 vector of the totals. `before` is the `skip` of the previous step, if it is
    not known yet on the host: after a step that was skipped, the next one is skipped too.
    """
    loss_sum, counted, norm = sums.unbind()
    # Full tensors, since torch divides a number by a tensor as its reciprocal times the number.
    factor = counted.new_full((), size) / counted
    norm = norm * factor
    if clip is not None:
        factor = factor * (norm.new_full((), clip) / (norm + 1e-6)).clamp(max=1.0)
    values = torch.stack((loss_sum / counted, norm, counted, counted.log()))
    skip = ((values * 0).sum() != 0).float()  # 0 * inf and 0 * NaN are NaN
    return DeviceCorrection(factor, skip if before is None else torch.maximum(skip, before), values)


def no_count(size: int, counted: float) -> StepError:
    """Return the error of a global batch of `size` samples whose mean is undefined."""
    return StepError(
        given=f"a global batch of {size} samples",
        found=f"its losses have a count of {counted:g} in total, so the mean is undefined; "
        "the parameters were not changed",
        fix="drop samples without targets from the dataset, or return the number of samples: "
        "(loss_sum, len(batch[1]))",
    )


def not_finite(
    loss: float, norm: float, batch: DataPosition, *, alone: bool = False, where: str = ""
) -> StepError:
    """Return the error of a step with a loss or gradients that are not finite.

    Collective, unless this rank steps `alone`. `where` is the module in which that began, if known. If
    a Batch has values that are not finite, the error names them.
    """
    what, value = ("gradient norm", norm) if math.isfinite(loss) else ("loss", loss)
    start, stop = batch.share
    local = f"{start:,} to {stop - 1:,}" if stop > start else "none of them"
    over = "this rank's local batch" if alone else "all ranks"
    inputs = batch.not_finite(alone=alone) if isinstance(batch, Batch) else ""
    return StepError(
        given=f"the batch at samples {batch.first:,} to {batch.first + batch.size - 1:,} "
        f"(this rank: {local})",
        found=f"a {what} of {value}, over {over}; the parameters were not changed"
        + (f"; the first value that is not finite: {where}" if where else "")
        + (f"; {inputs}" if inputs else ""),
        fix=("replace them in the dataset (torch.nan_to_num); if they belong there, " if inputs else "")
        + "lower the learning rate, clip gradients (clip=1.0), or examine these samples with "
        "torch.autograd.set_detect_anomaly(True)",
    )


def check_clip(clip: float | None) -> float | None:
    """Return `clip`, or raise StepError if it is not a positive number or None."""
    if clip is not None:
        check_number(StepError, "", "clip", clip, above=True)
    return clip

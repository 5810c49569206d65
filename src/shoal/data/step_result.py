"""The result of one optimizer step, which may still be on its way from the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from shoal.util.accelerator import HostCopy


class StepResult(NamedTuple):
    """The result of one optimizer step, the same on all ranks except for the times.

    `step(batch)` and `batch.finish(model)` return it. With `Step(…, result="late")`, the first use
    of `loss`, `norm` or `counted` waits for the device. Under an asynchronous strategy (Hogwild,
    LocalSGD, DiLoCo), `loss`, `norm` and `counted` describe this rank's local batch only. The host's
    clock measures the times: on CUDA they are the time to queue the kernels and to wait for the loss.
    `batch.finish` leaves them at 0, because it does not see the forward and the optimizer step of your
    loop.

    Attributes:
        loss: Mean loss over the global batch, `Σ loss / Σ count`.
        norm: Gradient norm before clipping.
        counted: Divisor of the loss sum: samples or tokens of the global batch.
        skipped: True if fp16 gradients overflowed: the parameters did not change. Default: False.
        forward: Seconds in the forward pass. Default: 0.0.
        backward: Seconds in the backward pass. Default: 0.0.
        update: Seconds in the optimizer step. Default: 0.0.
        communication: Seconds that this rank waited for other ranks; not part of `forward`, `backward`
            and `update`. Default: 0.0.

    Examples:
        >>> result = shoal.StepResult(loss=0.25, norm=1.5, counted=64.0)
        >>> result.loss, result.skipped
        (0.25, False)
    """

    loss: float
    norm: float
    counted: float
    skipped: bool = False
    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    communication: float = 0.0


class LateResult(StepResult):
    """A StepResult whose loss, norm and count are read from the device when they are first used.

    Reading never raises. `settled` becomes true when the Step has compared the values: `finite` or not.
    """

    def __new__(cls, values: HostCopy, *times: float) -> LateResult:
        """Create the result; its items are replaced by those that are read."""
        return super().__new__(cls, math.nan, math.nan, math.nan, False, *times)

    def __init__(self, values: HostCopy, *times: float) -> None:
        self._values = values
        self._times = times
        self._read: StepResult | None = None
        self.settled = False

    @property
    def known(self) -> bool:
        """Whether the values can be used without waiting for the device."""
        return self._read is not None or self._values.ready

    @property
    def finite(self) -> bool:
        """Whether the step could change the parameters."""
        return 0 < self.counted < math.inf and math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def loss(self) -> float:
        """The mean loss over the global batch."""
        return self._whole().loss

    @property
    def norm(self) -> float:
        """The gradient norm before clipping."""
        return self._whole().norm

    @property
    def counted(self) -> float:
        """The divisor of the loss sum."""
        return self._whole().counted

    def _whole(self) -> StepResult:
        if self._read is None:
            loss, norm, counted, _ = self._values.read()
            self._read = StepResult(loss, norm, counted, False, *self._times)
        return self._read

    def _replace(self, **named: Any) -> StepResult:  # type: ignore[override]
        return self._whole()._replace(**named)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._whole())

    def __getitem__(self, index: Any) -> Any:
        return self._whole()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and tuple(self) == tuple(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._whole())

    def __repr__(self) -> str:
        return repr(self._whole())

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, tuple(self)

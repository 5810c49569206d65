"""The loss scale of fp16."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018), with torch.amp.GradScaler's policy.

    GradScaler decides on the device for each optimizer alone; here all ranks decide from the one
    norm that the step computes anyway, so scaling costs no further pass over the gradients.
    """

    value: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good: int = 0

    def adapt(self, *, finite: bool) -> None:
        """Halve after an overflow, double after `interval` steps without one."""
        if not finite:
            self.value, self.good = self.value * self.backoff, 0
        elif self.good + 1 == self.interval:
            self.value, self.good = self.value * self.growth, 0
        else:
            self.good += 1

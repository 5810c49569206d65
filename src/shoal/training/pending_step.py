"""A step whose result is still on the device: which steps can be late, and how one is taken back."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal._torch.optimizers import skips_on_device
from shoal.data.batch import Batch
from shoal.data.step_result import LateResult
from shoal.strategies.contracts import Engine
from shoal.strategies.correction import DeviceCorrection, no_count, not_finite
from shoal.training.several import kind_of
from shoal.training.train_state import TrainState, could_fuse
from shoal.util.accelerator import HostCopy, is_accelerator
from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import StepError


def result_mode(
    given: str | None, engine: Engine, optimizer: Optimizer, *, fp16: bool
) -> Decision[str]:
    """Return "late" or "now" for the results of a Step. Raises StepError where "late" can't be."""
    why_now = _why_now(engine, optimizer, fp16=fp16)
    if given == "late" and why_now:
        raise StepError(
            given="shoal.Step(…, result='late')",
            found=f"each step must wait for its result: {why_now}",
            fix="leave result out; 'late' needs a fused optimizer such as "
            "torch.optim.AdamW(…, fused=True), on one device, without fp16",
        )
    if given is not None:
        return Decision(what="result", value=given, reason=GIVEN)
    if not is_accelerator(engine.world.device):
        return Decision(what="result", value="now", reason="a CPU computes in step with its host")
    if why_now:
        return Decision(what="result", value="now", reason=why_now)
    return Decision(what="result", value="late", reason="the optimizer can skip a step on the device")


def _why_now(engine: Engine, optimizer: Optimizer, *, fp16: bool) -> str:
    """Return why a step must know its result before its update; empty if it need not."""
    kind, device = kind_of(optimizer), engine.world.device
    if fp16:
        return "the loss scale of fp16 depends on it"
    if engine.waits_because:
        return engine.waits_because
    if not skips_on_device(optimizer):
        may = f"{kind}(…, fused=True)" if could_fuse(optimizer) else "torch's fused optimizers"
        return f"{kind} can't skip a step on the device, as {may} can"
    if any(p.device != device for group in optimizer.param_groups for p in group["params"]):
        return f"not all parameters are on {device}"
    if device.type == "mps":
        return "the device has no float64"
    return ""


class _Schedule(NamedTuple):
    """A schedule and what it changes in the optimizer, as they were before a step."""

    state: dict[str, Any]
    groups: list[dict[str, Any]]


class PendingStep:
    """A step that was given to the device and whose loss, norm and count the host does not know yet.

    Holds what it takes to take the step back, apart from parameters and optimizer state, which the
    device leaves as they are.
    """

    def __init__(self, state: TrainState, batch: Batch, decided: DeviceCorrection) -> None:
        self.first, self.size, self.share = batch.first, batch.size, batch.share
        self.skip: Tensor = decided.skip
        self.result: LateResult
        self._values = HostCopy(decided.values)
        self._batch = weakref.ref(batch)  # its tensors need not live for another step
        self._last = state.last
        self._known = len(state.optimizer.state)
        self._schedule = (
            None
            if state.schedule is None
            else _Schedule(
                state.schedule.state_dict(), [_kept(group) for group in state.optimizer.param_groups]
            )
        )

    def result_after(self, *times: float) -> LateResult:
        """Return the result, given the times of the step."""
        self.result = LateResult(self._values, *times)
        return self.result

    def settle(self, state: TrainState, since: Batch | None) -> None:
        """Wait for the values. If they are not finite, undo the step and raise StepError.

        A resumed run then begins with its batch, though the loader has come to `since`.
        """
        self.result.settled = True
        if self.result.finite:
            return
        self._take_back(state)
        if since is not None:
            since.resumes_at = self.first
        if not 0 < self.result.counted < torch.inf:
            error = no_count(self.size, self.result.counted)
        else:
            error = not_finite(self.result.loss, self.result.norm, self)
        late = "seen late (result='late'); a step taken since changed nothing either"
        raise StepError(given=error.given, found=f"{error.found}; {late}", fix=error.fix)

    def _take_back(self, state: TrainState) -> None:
        state.number -= 1
        state.last = self._last
        batch = self._batch()
        if batch is not None:
            batch.processed = False
        for parameter in list(state.optimizer.state)[self._known :]:
            del state.optimizer.state[parameter]  # made by the skipped steps
        if self._schedule is not None and state.schedule is not None:
            state.schedule.load_state_dict(self._schedule.state)
            for group, kept in zip(state.optimizer.param_groups, self._schedule.groups, strict=True):
                for name, value in kept.items():
                    if isinstance(value, Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value


def _kept(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, apart from its parameters."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }

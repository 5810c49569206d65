"""Private names of torch's pipelining."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.pipelining import _backward

from shoal._torch.versions import required


def splits_backward() -> bool:
    """Return whether schedules can run backward in two parts, for inputs and for weights.

    torch 2.11 fails where an input of a stage is not a tensor; 2.13 has a function for such inputs.
    """
    return hasattr(_backward, "_autograd_grad_for_inputs")


def failed_to_split(error: BaseException) -> bool:
    """Return whether an error of a schedule comes from backward in two parts, for which torch has no
    class of errors.
    """
    parts = {_backward.stage_backward_input.__code__, _backward.stage_backward_weight.__code__}
    return any(frame.f_code in parts for frame, _ in traceback.walk_tb(error.__traceback__))


def step_micro_batches(
    schedule: Any, arguments: Sequence[Mapping[str, Any]], targets: Sequence[Any]
) -> None:
    """Run one step of a schedule over micro-batches that are split already.

    The public `step` would concatenate the micro-batches and split them again.
    """
    step = required(schedule, "_step_microbatches", "Pipeline")
    step(None, list(arguments), list(targets), return_outputs=False)

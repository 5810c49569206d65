"""Private names of torch's pipelining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal._torch.versions import required


def step_micro_batches(
    schedule: Any, arguments: Sequence[Mapping[str, Any]], targets: Sequence[Any]
) -> None:
    """Run one step of a schedule over micro-batches that are divided already.

    The public `step` would join the micro-batches and divide them again.
    """
    step = required(schedule, "_step_microbatches", "Pipeline")
    step(None, list(arguments), list(targets), return_outputs=False)

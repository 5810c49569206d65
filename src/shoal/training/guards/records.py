"""The events of guards."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.telemetry.events import Events, Plain
from shoal.training.guards.schedule import CheckSchedule


def record_corruption(
    events: Events, step: int, guard: str, ranks: Sequence[int], tensors: Sequence[str]
) -> None:
    """Record what a guard has found."""
    found: dict[str, Plain] = {
        "step": step,
        "guard": guard,
        "ranks": [*ranks],
        "tensors": [*tensors[:10]],
    }
    events.write("corruption", found)


def record_checks(events: Events, name: str, checked: str, schedule: CheckSchedule) -> None:
    """Record the number of checks and their time, if there were any."""
    summary = schedule.summary()
    if summary:
        events.write("guards", {"name": name, "checked": checked, **summary})

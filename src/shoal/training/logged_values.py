"""Numbers by name, as a Run records them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.telemetry.events import Events
from shoal.telemetry.trackers.protocol import Curves
from shoal.util.accelerator import record, streams
from shoal.util.errors import StepError
from shoal.util.safe_text import shown


class LogQueue:
    """Numbers that were logged, in their order. Those from device tensors follow once they arrive.

    The host does not wait for a device: each tensor is copied in the background, and its number is
    written when the copy has ended, usually at the next tick.
    """

    def __init__(self, events: Events, curves: Curves) -> None:
        self._events = events
        self._curves = curves
        self._waiting: deque[_Logged] = deque()

    def add(self, values: Mapping[str, Any], step: int, position: int) -> None:
        """Add the numbers of one call, with the step and the position of the run.

        Raises StepError unless the values are numbers, keyed by name.
        """
        copies, events = _copied(numbers_of(values))
        self._waiting.append(_Logged(copies, step, position, events))
        self.write(wait=False)

    def write(self, *, wait: bool) -> None:
        """Write the numbers that have arrived; with `wait`, wait for all of them."""
        while self._waiting:
            copies, step, position, events = self._waiting[0]
            if wait:
                for event in events:
                    event.synchronize()
            elif not all(event.query() for event in events):
                return
            self._waiting.popleft()
            numbers = {name: float(value) for name, value in copies.items()}
            self._events.write("log", {"step": step, "position": position, **numbers})
            self._curves.write(numbers, step)


class _Logged(NamedTuple):
    """The numbers of one call, and the events after which those of devices are on the host."""

    numbers: Mapping[str, float | Tensor]
    step: int
    position: int
    events: Sequence[Any]


def _copied(numbers: Mapping[str, float | Tensor]) -> tuple[dict[str, float | Tensor], list[Any]]:
    """Return the numbers with tensors on the host, and the events after which they have arrived."""
    found = {
        n: v.to("cpu", non_blocking=True) if isinstance(v, Tensor) else v for n, v in numbers.items()
    }
    devices = {value.device for value in numbers.values() if isinstance(value, Tensor)}
    events = [event for device in devices if (event := record(device)) is not None]
    return found, events


def plain_values(kind: str, values: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Return the values of `run.note`, as strings if they are not numbers.

    Raises StepError unless they are keyed by name.
    """
    check_names(
        values,
        call=lambda: f"run.note({kind!r}, {shown(values)})",
        fix='run.note("data", {"rows": 100})',
    )
    return {
        name: value if isinstance(value, str | int | float) else shown(value)
        for name, value in values.items()
    }


def numbers_of(
    values: Mapping[str, Any], *, call: str = "world.log({})", fix: str = 'world.log({"loss": 0.5})'
) -> dict[str, float | Tensor]:
    """Return the numbers of a call: tensors of devices with streams, all others as floats.

    Raises StepError for anything else.
    """

    def given() -> str:
        return call.format(shown(values))  # reads the values of tensors

    check_names(values, call=given, fix=fix)
    found: dict[str, float | Tensor] = {}
    for name, value in values.items():
        several = isinstance(value, Tensor) and value.numel() != 1
        try:
            if isinstance(value, str) or several:
                raise TypeError
            if isinstance(value, Tensor) and streams(value.device) and not value.is_complex():
                found[name] = value.detach().reshape(())
            else:
                found[name] = float(value)
        except (TypeError, ValueError):
            what = f"a tensor of {value.numel()} elements" if several else shown(repr(value))
            raise StepError(given=given(), found=f"{name!r} is {what}, not a number", fix=fix) from None
    return found


def check_trackers(trackers: Any) -> None:
    """Raise StepError if trackers are not a sequence of objects that a run can open."""
    several = isinstance(trackers, Sequence) and not isinstance(trackers, str)
    if trackers is None or (several and all(map(_is_tracker, trackers))):
        return
    raise StepError(
        given=f"shoal.Run(…, trackers={trackers!r})",
        found="trackers is a sequence of trackers",
        fix="pass trackers=(shoal.TensorBoard(),), or () for none",
    )


def _is_tracker(given: object) -> bool:
    return hasattr(given, "open") and not isinstance(given, type)


def check_names(values: object, *, call: Callable[[], str], fix: str) -> None:
    """Raise StepError if values are not a dict whose keys are strings."""
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        article = "an" if kind[0] in "aeiou" else "a"
        found = f"{article} {kind}, not a dict of names and values"
        raise StepError(given=call(), found=found, fix=fix)
    for name in values:
        if not isinstance(name, str):
            raise StepError(given=call(), found=f"{name!r} is not a name", fix=fix)

"""The events of a run: its start, each step with the time of its parts, its end."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shoal.data import Loader
from shoal.data.step_result import LateResult
from shoal.telemetry.events import FORMAT, Events, read_events
from shoal.telemetry.step_timer import BACKWARD, COMMUNICATION, FORWARD, UPDATE, Spent, TickTimes
from shoal.training.preemption import StoppedExit
from shoal.util import accelerator
from shoal.util.errors import StepError
from shoal.util.packages import versions

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.data.step_result import StepResult
    from shoal.training.predicted_steps import PlannedSteps
    from shoal.training.run_state import RestorePoint
    from shoal.training.train_state import TrainState


_LAST_BYTES = 16 << 20
"""The end of the file of events that is read: some 150,000 steps."""


class _LateRow(NamedTuple):
    """The event of a step whose loss, norm and count are not known yet."""

    name: str
    step: int
    before: tuple[Any, ...]
    spent: Spent
    result: LateResult
    load: Any


class RunEvents:
    """Writes the events of a run's start, steps and end; several Steps have names."""

    def __init__(
        self,
        events: Events,
        steps: Mapping[str, TrainState],
        loader: Loader,
        planned: PlannedSteps | None = None,
    ) -> None:
        self._events = events
        self._planned = planned
        self._steps = steps
        self._loader = loader
        self._first = next(iter(steps))
        self._timeline = loader.world.timeline
        self.rewind()

    def rewind(self) -> None:
        """Count earlier steps as recorded, and the time until the next batch as outside a step."""
        self._recorded = self.numbers()
        self._late: list[_LateRow] = []
        begun = self._timeline.pause()
        self._events.begin(begun)
        self._division = TickTimes(begun)

    @property
    def moved(self) -> bool:
        """Whether a step has been taken since the last tick."""
        return self._recorded != self.numbers()

    def start(self, began: float, config: Mapping[str, Any]) -> None:
        """Record the placement, versions and options of this rank. Collective."""
        world = self._loader.world
        step = next(iter(self._steps.values()))
        found, balance = versions(), self._loader.balance
        started: dict[str, Any] = {} if balance is None else {"samples": list(balance.shares)}
        self._events.write(
            "start",
            {
                "format": FORMAT,
                "began": began,
                "rank": world.rank,
                "data_rank": world.data_rank,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "node": world.placement.node,
                "cores": world.placement.cores,
                "size": world.size,
                "layout": str(world.layout),
                "launcher": world.placement.launcher,
                "attempt": world.placement.attempt,
                "device": str(world.device),
                "device_name": _device_name(world.device),
                "python": found["python"],
                "torch": torch.__version__,
                "shoal": found["shoal"],
                "step": step.number,
                "strategy": step.engine.strategy,
                "precision": step.precision,
                "parameters": sum(each.elements() for each in self._steps.values()),
                "batch_size": self._loader.batch_size,
                "epoch_size": self._loader.epoch_size,
                "goal": self._loader.goal,
                "workers": self._loader.workers,
                "config": dict(config),
                **started,
            },
        )
        if self._planned is not None:
            self._planned.begin(self._events)

    def check_steps(self) -> None:
        """Raise StepError if no step has been taken, though the Loader has yielded a batch."""
        if all(each.last is None and not each.may_skip for each in self._steps.values()):
            raise StepError(
                given="run.tick() after a batch",
                found="no Step of this Run has processed a batch, and batch.finish(model) was not "
                "called",
                fix="call step(batch) with the Step of the Run, or batch.finish(model) with its "
                "model, and then run.tick()",
            )

    def tick(self, now: float) -> bool:
        """Record the steps taken since the last tick; return whether the first Step took one."""
        self.write_settled()
        recorded, steps = self._recorded, self._steps
        taken = [name for name, step in steps.items() if step.number != recorded[name]]
        if not taken:
            return False
        batch, spent = self._loader.batch, self._timeline.take()
        charged = None if len(steps) == 1 else self._charged(spent, taken)
        for name in taken:
            number, result = steps[name].number, steps[name].last
            recorded[name] = number
            if batch is None or result is None:  # of a state that was loaded
                continue
            each = spent if charged is None else charged[name]
            where = (number, batch.first, batch.size, batch.ranges, now)
            if isinstance(result, LateResult) and not result.settled:
                self._late.append(_LateRow(name, number, where, each, result, self._loader.load))
            else:
                self._events.step(name, (*where, each, *result[:3], self._loader.load))
        self._write_changes()
        moved = taken[0] == self._first
        if moved and self._planned is not None:
            self._planned.step(recorded[self._first], spent)
        return moved

    def replay(self, position: int) -> None:
        """Split batches from `position` on as an earlier attempt has recorded. Collective."""
        world = self._loader.world
        if self._loader.measures_speed:
            found = _recorded_splits(self._events.path, position) if world.is_rank_zero else None
            self._loader.replay(*world.broadcast(found))

    def restored(self, point: RestorePoint) -> None:
        """Record and print where the run continues."""
        self._events.write(
            "restore",
            {
                "step": point.step,
                "position": point.position,
                "path": str(point.path),
                "left_out": [[each.start, each.stop] for each in self._loader.left_out],
            },
        )
        self._loader.world.print(
            f"resumed at sample {point.position:,} "
            f"(step {point.step:,}, epoch {point.epoch}) from {point.path}"
        )

    def tell_no_tick(self, directory: Path, first: Mapping[str, int], *, saved: bool) -> None:
        """Print that nothing was recorded, if steps were taken since `first` without a tick."""
        steps = max(now - first[name] for name, now in self.numbers().items())
        if steps > 0:
            lost = "" if saved else ", and no checkpoint was saved"
            self._loader.world.print(
                f"shoal: {steps:,} step(s) in {directory} without run.tick(): nothing was "
                f"recorded{lost}; call run.tick(every=100) after each step"
            )

    def _write_changes(self) -> None:
        """Record on rank 0 how batches are split since the last tick, if that has changed."""
        balance = self._loader.balance
        for change in [] if balance is None else balance.take_changes():
            if self._loader.world.is_rank_zero:
                values: dict[str, Any] = {"step": self._steps[self._first].number}
                values |= {"position": change.position, "samples": list(change.shares)}
                self._events.write("shares", values | {"predicted": change.gain})

    def write_settled(self) -> None:
        """Record the late steps whose results have been looked at; drop those that were taken back."""
        if not self._late:
            return
        late, self._late = self._late, [row for row in self._late if not row.result.settled]
        # A device's clock is known up to the last result that was waited for, and not up to the tick.
        follows = not self._timeline.hosts and len(self._steps) == 1
        for row in late:
            if not row.result.settled:
                continue
            if not row.result.finite:
                self._recorded[row.name] = row.step - 1
                continue
            spent = self._timeline.take() if follows else row.spent
            self._events.step(row.name, (*row.before, spent, *row.result[:3], row.load))

    def end(self, error: BaseException | None) -> None:
        """Record the end of the run, with the error if there is one."""
        for row in self._late:  # after an error, some may never be known
            row.result.settled = row.result.known
        self.write_settled()
        line = None if self._planned is None else self._planned.end(self._events)
        if line is not None:
            self._loader.world.print(line)
        step = next(iter(self._steps.values())).number
        if error is None or isinstance(error, StoppedExit):
            self._events.write("end", {"step": step, "reason": "closed"})
        else:
            kind = type(error).__name__
            self._events.write("end", {"step": step, "reason": "error", "error": kind})

    def numbers(self) -> dict[str, int]:
        """Return the number of steps taken, by the name of the Step."""
        return {name: step.number for name, step in self._steps.items()}

    def _charged(self, spent: Spent, taken: list[str]) -> dict[str, Spent]:
        results = {name: self._steps[name].last for name in taken}
        return self._division.charge(
            spent, {name: _own(each) if each else {} for name, each in results.items()}
        )


def _own(result: StepResult) -> dict[int, int]:
    """Return the nanoseconds of a step by part."""
    seconds = {
        FORWARD: result.forward,
        BACKWARD: result.backward,
        COMMUNICATION: result.communication,
        UPDATE: result.update,
    }
    return {part: round(each * 1e9) for part, each in seconds.items()}


def _device_name(device: torch.device) -> str:
    return accelerator.name(device) or platform.processor() or platform.machine()


def _recorded_splits(path: Path, position: int) -> tuple[dict[int, list[int]], int]:
    """Return how an earlier attempt split its batches from `position` on.

    These are the numbers of samples of each rank, by the first position of each batch. Also returns the
    position that earlier attempts have reached.
    """
    splits: dict[int, list[int]] = {}
    reached = position
    for event in read_events(path, last=_LAST_BYTES):
        if event["event"] == "step":
            first, size = event.get("first"), event.get("size")
            if type(first) is int and type(size) is int:
                reached = max(reached, first + size)
        elif event["event"] == "shares" and type(first := event.get("position")) is int:
            samples = event.get("samples")
            if first >= position and isinstance(samples, list):
                splits[first] = [number for number in samples if type(number) is int]
    return splits, reached

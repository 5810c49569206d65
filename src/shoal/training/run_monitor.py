"""Monitoring of a Run: network traffic, memory, power, the FLOPs of one step, tokens of experts."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data import Loader
from shoal.distributed.watchdog.world_watchdog import CHECKED_STEPS
from shoal.distributed.world import World
from shoal.telemetry.collective_stats import CollectiveStats
from shoal.telemetry.events import Events
from shoal.telemetry.profiler.window import Window
from shoal.telemetry.usage.flops import FlopCounting, peak_here
from shoal.telemetry.usage.sampler import PeriodicTask, Usage, UsageSampler, noting
from shoal.training.expert_counts import ExpertCounts
from shoal.training.trace_recorder import Recorder

if TYPE_CHECKING:
    from shoal.training.train_state import TrainState

WINDOW_SECONDS = 10.0
LOOK_SECONDS = 0.1
REQUEST_SECONDS = 2.0
_COUNTED_TICK = CHECKED_STEPS + 2
"""The tick before the step whose FLOPs are counted: the first steps do additional work."""


class RunMonitor:
    """Samples the usage of a rank in a separate thread; `tick` writes the samples as events.

    torch's profiler records the steps of `profile`. A failure is reported once and ends that part of
    the monitoring, never the run.
    """

    def __init__(
        self,
        world: World,
        directory: Path,
        steps: Mapping[str, TrainState],
        loader: Loader,
        events: Events,
        profile: Window | None,
    ) -> None:
        self._world = world
        self._recorder = Recorder(world, directory, profile)
        self._experts = ExpertCounts(steps, events)
        self._steps = steps
        self._first = next(iter(steps.values()))
        self._loader = loader
        self._events = events
        self._sampler: UsageSampler | None = None
        self._ticks = 0
        self._counted: dict[str, tuple[int, FlopCounting]] = {}

    def begin(self) -> None:
        """Start sampling. Earlier records do not count."""
        jobs = [
            PeriodicTask(
                name="the usage of this process",
                seconds=WINDOW_SECONDS,
                run=noting("usage", Usage(self._world.device).fields),
                ends=True,
            ),
            PeriodicTask(
                name="the request for a timeline",
                seconds=REQUEST_SECONDS,
                run=self._recorder.requests.look,
            ),
        ]
        if self._world.group is not None:
            traffic = CollectiveStats()
            jobs += [
                PeriodicTask(
                    name="the traffic of this rank",
                    seconds=WINDOW_SECONDS,
                    run=noting("collectives", traffic.window),
                    ends=True,
                ),
                PeriodicTask(
                    name="the time of collectives", seconds=LOOK_SECONDS, run=traffic.look, jitter=True
                ),
            ]
        # The thread has no reference to this or to the model, so it ends with a Run that is not closed.
        first = weakref.ref(self._first)

        def number() -> int:
            step = first()
            return 0 if step is None else step.number

        self._sampler = UsageSampler(jobs, step=number, say=warnings.warn)
        weakref.finalize(self, self._sampler.let_go)

    def tick(self) -> None:
        """Write the samples; count the FLOPs of one step. Collective."""
        self._ticks += 1
        if self._sampler is not None:
            self._write(self._sampler)
        if self._ticks == _COUNTED_TICK:
            for name, step in self._steps.items():
                self._counted[name] = step.number, FlopCounting()
                if not step.compiled:
                    step.counting = self._counted[name][1]
        elif self._counted:
            self._conclude()
        self._experts.tick()
        self._recorder.tick(self._first.number)

    def end(self, *, failed: bool) -> None:
        """Take the last samples, write them, and end the thread; after a failure, of the host only."""
        self._recorder.end()
        if self._ticks and not failed:
            self._experts.end()
        for step in self._steps.values():
            step.counting = nullcontext()
        if self._sampler is not None:
            self._sampler.stop()
            self._write(self._sampler)
            self._sampler = None

    def _write(self, sampler: UsageSampler) -> None:
        for kind, fields in sampler.taken():
            self._events.write(kind, fields)

    def _conclude(self) -> None:
        """Write the FLOPs of each Step that has run since, summed over all ranks."""
        batch = self._loader.batch
        for name, (number, counting) in list(self._counted.items()):
            step = self._steps[name]
            if step.number == number or batch is None:
                continue
            del self._counted[name]
            step.counting = nullcontext()
            of_all = self._world.gather((counting.flops, self._why_not(step, counting)))
            why_not = next((reason for flops, reason in of_all if flops is None), None)
            fields: dict[str, Any] = {"name": name, "step": step.number}
            if why_not is None:
                # Each tensor-parallel rank counts the FLOPs of the complete layers.
                degree = self._world.layout.degree("tensor")
                fields["per_sample"] = sum(flops for flops, _ in of_all) / degree / batch.size
                fields["how"] = "counted in one step, by the formulas of torch's FlopCounterMode"
            else:
                fields["how"] = f"not counted: {why_not}"
            peak = peak_here(self._world.device, step.dtype)
            if peak.value is not None:
                fields["peak"] = peak.value
            self._events.write("flops", fields | {"peak_reason": peak.reason})

    def _why_not(self, step: TrainState, counting: FlopCounting) -> str:
        if step.compiled:
            return "the operations of compiled code can't be counted"
        return counting.failed or "a custom training loop does not compute in a Step"

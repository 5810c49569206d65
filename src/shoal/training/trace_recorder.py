"""A window of steps recorded by torch's profiler on each rank, into one file per rank."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from shoal.distributed.world import World
from shoal.telemetry.clock_offset import ClockOffset, measure_offset
from shoal.telemetry.profiler.window import FOLDER, FORMAT, MARK, Requests, Window, trace_path
from shoal.telemetry.step_timer import OTHER
from shoal.util.clock import CLOCK
from shoal.util.regular_file import appearing


@dataclass
class _Recording:
    """A running record: the starts of steps by this rank's clock, and its offset from rank 0's."""

    window: Window
    profiler: profile
    name: str
    """A name that is the same on all ranks and different for each record."""
    begins: list[tuple[int, int]] = field(default_factory=list)
    mark: record_function | None = None
    offsets: list[ClockOffset] = field(default_factory=list)


class Recorder:
    """Records the steps of `wanted`, and of requests in the run's directory; `tick` follows each step.

    A failure is reported and ends the record, never the run.
    """

    def __init__(
        self,
        world: World,
        directory: Path,
        wanted: Window | None,
        *,
        clock: Callable[[], int] = CLOCK.now_ns,
    ) -> None:
        self._world = world
        self._folder = directory / FOLDER
        self._wanted = wanted
        self._clock = clock
        self._step = 0
        self._running: _Recording | None = None
        store = None if world.group is None else world.store("shoal/traces")
        self.requests = Requests(self._folder, store=store, rank=world.rank, size=world.size)

    def tick(self, step: int) -> None:
        """Start, continue or end a record, after step number `step`. Collective."""
        if step == self._step:
            return
        self._step = step
        asked = self.requests.due(step)
        running, wanted = self._running, self._wanted
        if running is not None:
            self._mark(running, step)
            if step >= running.window.last:
                self._finish(running)
        elif wanted is not None and step >= wanted.first - 1:
            self._wanted = None
            self._start(wanted, step)
        elif asked is not None and asked[1]:
            self._start(asked[0], step)
        elif asked is not None:
            self._world.print(
                f"shoal: steps {asked[0]} are not recorded: not all ranks saw the request in time; "
                "request later steps"
            )

    def end(self) -> None:
        """Drop a running record because the run ends before the window."""
        recording, self._running = self._running, None
        if recording is not None:
            self._close(recording)
            recording.profiler.stop()

    def _start(self, window: Window, step: int) -> None:
        if step >= window.last:  # the run was resumed after the window
            return
        own = getattr(ProfilerActivity, self._world.device.type.upper(), ProfilerActivity.CPU)
        devices = {ProfilerActivity.CPU, own}
        with self._as_other():  # the profiler takes seconds to start
            profiler = profile(activities=devices, acc_events=True)
            error = _started(profiler)
            failed = next(filter(None, self._world.gather(error)), None)
            if failed is not None:
                if error is None:
                    profiler.stop()
                self._world.print(f"shoal: steps {window} are not recorded: {failed}")
                return
            name = self._world.broadcast(secrets.token_hex(8))
            recording = self._running = _Recording(window, profiler, name)
            self._compare(recording, "begin")
        self._open(recording, step + 1)

    @contextmanager
    def _as_other(self) -> Iterator[None]:
        """Count the block as "other" time, not as part of the update; other ranks may wait for it."""
        with self._world.preparing(), self._world.timeline.during(OTHER):
            yield

    def _mark(self, recording: _Recording, step: int) -> None:
        self._close(recording)
        if step < recording.window.last:
            self._open(recording, step + 1)

    def _open(self, recording: _Recording, step: int) -> None:
        recording.mark = record_function(f"{MARK}{step}")
        recording.begins.append((step, self._clock()))
        recording.mark.__enter__()

    def _close(self, recording: _Recording) -> None:
        if recording.mark is not None:
            recording.mark.__exit__(None, None, None)
            recording.mark = None

    def _compare(self, recording: _Recording, when: str) -> None:
        if self._world.group is None:
            recording.offsets.append(ClockOffset(self._clock(), 0, 0))
            return
        store = self._world.store(f"shoal/traces/{recording.name}/{when}")
        found = measure_offset(store, self._world.rank, self._world.size, self._clock)
        if found is not None:
            recording.offsets.append(found)

    def _finish(self, recording: _Recording) -> None:
        self._running = None
        with self._as_other():  # writing a large record takes long
            self._compare(recording, "end")
            # Before it stops: torch leaves out later metadata.
            recording.profiler.add_metadata_json("shoal", json.dumps(self._described(recording)))
            recording.profiler.stop()
            path = trace_path(self._folder, self._world.rank, recording.window)
            try:
                with appearing(path) as part:
                    recording.profiler.export_chrome_trace(str(part))
                self._forget_others(recording.window)
            except OSError as error:
                self._world.print(
                    f"shoal: the trace of steps {recording.window} was not saved: {error}"
                )

    def _forget_others(self, window: Window) -> None:
        """Remove the records of these steps from ranks of an earlier, larger world."""
        if self._world.is_rank_zero:
            here = {trace_path(self._folder, rank, window) for rank in range(self._world.size)}
            for path in {*self._folder.glob(trace_path(self._folder, "*", window).name)} - here:
                path.unlink(missing_ok=True)

    def _described(self, recording: _Recording) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "rank": self._world.rank,
            "size": self._world.size,
            "host": socket.gethostname(),
            "begins": recording.begins,
            "offsets": recording.offsets,
        }


def _started(profiler: profile) -> str | None:
    """Start a profiler; return the reason if it did not start: a process can have only one."""
    try:
        profiler.start()
    except RuntimeError as error:
        return str(error)
    return None

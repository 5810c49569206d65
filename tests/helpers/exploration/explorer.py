"""Runs the real code of several ranks in every order of its steps, deaths and time-outs.

Each task is a thread that runs only when the explorer schedules it, and stops before each operation on
shared state. A schedule is the list of choices: the task to continue, a rank to kill, or a time-out.
The search is breadth-first, so the first failure has the shortest schedule. Each state is reached by
running its schedule from the start. Two schedules reach the same state if the shared state is equal and
each task has made the same observations since it began.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

STUCK_SECONDS = 300.0
QUIET_SECONDS = 30.0
"""Seconds that pass at once where every task waits for time to pass, unless timers are exact."""

Schedule = tuple[str, ...]


class KilledTask(BaseException):
    """Unwinds a task whose rank was killed, or whose execution is over."""


class BrokenPropertyError(AssertionError):
    """A property that does not hold in a state."""


class Task:
    """One thread of a rank. It runs until its next operation on shared state, then waits."""

    def __init__(self, name: str, rank: int, body: Callable[[], None]) -> None:
        self.name, self.rank = name, rank
        self.ready: Callable[[], bool] = lambda: True
        self.history: list[Hashable] = []
        self.next = ""
        self.ended = False
        self.error: BaseException | None = None
        self.killed = False
        self.reads: dict[str, Hashable] = {}
        self.sleeps = False
        self.until = math.inf
        self.loop_start = 0
        self._body = body
        # Locks that the other side releases, which are faster than semaphores.
        self._mine, self._theirs = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._theirs.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._mine.acquire()
        try:
            if not self.killed:
                self._body()
        except KilledTask:
            pass
        except Exception as error:
            self.error = error
        self.ended = True
        self._theirs.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Give control to the explorer until it continues this task."""
        if not self.killed:
            self.ready = ready
            self._theirs.release()
            self._mine.acquire()
        if self.killed:
            raise KilledTask

    def step(self) -> None:
        """Continue the task until its next operation."""
        self._mine.release()
        if not self._theirs.acquire(timeout=STUCK_SECONDS):
            raise RuntimeError(f"{self.name} does not stop at an operation")

    def kill(self) -> None:
        """End the task where it is."""
        if not self.ended:
            self.killed = True
            self.step()


@dataclass
class Execution:
    """The state of one execution: tasks, shared values, the clock, and what is left of the bounds."""

    kills: int
    jumps: tuple[float, ...]
    exact_timers: bool = False
    tasks: list[Task] = field(default_factory=list)
    shared: dict[str, Hashable] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    mortal: set[int] = field(default_factory=set)
    now: float = 0.0
    outside: Callable[[], Hashable] = lambda: None
    """Returns the state that is not in `shared`, such as files."""
    running: Task | None = None

    def spawn(self, name: str, rank: int, body: Callable[[], None]) -> Task:
        """Add a task; it stops before its first operation."""
        task = Task(name, rank, body)
        self.tasks.append(task)
        self._run(task, task.step)
        return task

    @property
    def current(self) -> Task:
        """The task that runs now."""
        if self.running is None:
            raise RuntimeError("an operation on shared state outside of a task")
        return self.running

    def operate(self, label: str, operation: Callable[[], Any]) -> Any:
        """Wait to be scheduled, then do an operation on shared state and remember its result."""
        task = self.current
        task.next = label
        task.wait(lambda: True)
        result = operation()
        task.history.append((label, result if isinstance(result, Hashable) else repr(result)))
        return result

    def read(self, key: str) -> Hashable:
        """Read a shared value inside `operate`; a task that polls it wakes when it changes."""
        value = self.shared.get(key)
        self.current.reads[key] = value
        return value

    def observe(self, what: Hashable) -> None:
        """Remember what the running task has seen without an operation of its own."""
        self.current.history.append(what)

    def block(self, label: str, ready: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait until a condition on the shared state holds, or for a time; return whether it holds."""
        task, until = self.current, self.now + seconds
        task.next = label
        task.sleeps, task.until = until < math.inf, until
        task.wait(lambda: ready() or self.now >= until)
        task.sleeps = False
        task.history.append((label, ready()))
        return ready()

    def end_rank(self, rank: int) -> None:
        """End the other tasks of the running task's rank, then the running one: its process exits."""
        own = self.current
        for task in self.tasks:
            if task.rank == rank and task is not own:
                self._run(task, task.kill)
        raise KilledTask

    def sleep(self, seconds: float) -> None:
        """Wait until a value that was read since the last sleep has changed, or until a time-out."""
        task, until, seen = self.current, self.now + seconds, dict(self.current.reads)
        task.next = "sleep"
        segment = task.history[task.loop_start :]
        before = task.loop_start - len(segment) - 1
        if before >= 0 and task.history[before : task.loop_start - 1] == segment:
            del task.history[task.loop_start :]  # one more round of a loop that saw the same
        else:
            task.history.append(("sleep",))
            task.loop_start = len(task.history)
        task.reads.clear()
        task.sleeps, task.until = True, until
        task.wait(lambda: self.now >= until or any(self.shared.get(k) != v for k, v in seen.items()))
        task.sleeps = False

    def choices(self) -> list[str]:
        """Return what can happen next."""
        live = [task for task in self.tasks if not task.ended]
        found = [task.name for task in live if task.ready()]
        # Time passes when all wait for it, and a bounded number of times before that.
        if (self.jumps and live) or (not found and any(task.sleeps for task in live)):
            found.append("time-out")
        if live and self.kills:
            found += [f"kill {rank}" for rank in sorted(self.mortal - self.dead)]
        return found

    def choose(self, choice: str) -> None:
        """Let one choice happen."""
        if choice.startswith("kill "):
            rank = int(choice.removeprefix("kill "))
            self.kills -= 1
            self.dead.add(rank)
            for task in self.tasks:
                if task.rank == rank:
                    self._run(task, task.kill)
        elif choice == "time-out":
            ready = any(task.ready() for task in self.tasks if not task.ended)
            timers = [task.until for task in self.tasks if task.sleeps and not task.ended]
            quiet = max(0.0, min(timers) - self.now) if self.exact_timers and timers else QUIET_SECONDS
            self.now += self.jumps[0] if ready else quiet
            self.jumps = self.jumps[1:] if ready else self.jumps
        else:
            task = next(each for each in self.tasks if each.name == choice)
            self._run(task, task.step)

    def _run(self, task: Task, action: Callable[[], None]) -> None:
        former, self.running = self.running, task
        action()
        self.running = former

    def close(self) -> None:
        """End all tasks."""
        for task in self.tasks:
            self._run(task, task.kill)

    def key(self) -> int:
        """Return a hash of the state."""
        tasks = tuple(
            (task.name, task.ended, task.next, not task.ended and task.ready(), tuple(task.history))
            for task in self.tasks
        )
        values = tuple(sorted(self.shared.items(), key=lambda item: item[0]))
        state = (tasks, values, self.outside(), frozenset(self.dead))
        return hash((state, self.now, self.kills, self.jumps))


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A world to explore: `begin` spawns its tasks and returns the check of each state.

    The check receives True where nothing can happen any more. It raises BrokenPropertyError, as the
    explorer does if a task raises, or waits at the end and is not `endless`.
    """

    begin: Callable[[Execution], Callable[[bool], None]]
    kills: int = 0
    jumps: tuple[float, ...] = ()
    endless: tuple[str, ...] = ()
    exact_timers: bool = False
    """Whether time passes only to the next timer: for code with few and long waits."""


@dataclass(frozen=True, kw_only=True)
class Exploration:
    """The result: the number of states, and the shortest failing schedule, if any."""

    states: int
    complete: bool
    failure: str = ""
    schedule: Schedule = ()

    def __str__(self) -> str:
        reach = "all" if self.complete else "the first"
        said = f"explored {reach} {self.states:,} states"
        return f"{said}: {self.failure}\n  " + "\n  ".join(self.schedule) if self.failure else said


def explore(protocol: Protocol, *, states: int) -> Exploration:
    """Visit every state, shortest schedules first, up to a number of states."""
    seen: set[int] = set()
    queue: deque[Schedule] = deque([()])
    while queue and len(seen) < states:
        schedule = queue.popleft()
        execution = Execution(protocol.kills, protocol.jumps, protocol.exact_timers)
        try:
            check = protocol.begin(execution)
            for choice in schedule:
                execution.choose(choice)
            key = execution.key()
            if key in seen:
                continue
            seen.add(key)
            choices = execution.choices()
            at_end = not any(choice for choice in choices if not choice.startswith("kill "))
            check(at_end)
            for task in execution.tasks:
                if task.error is not None:
                    raise BrokenPropertyError(f"{task.name}: {task.error!r}")
                if at_end and not task.ended and task.name not in protocol.endless:
                    raise BrokenPropertyError(f"{task.name} waits forever")
        except BrokenPropertyError as error:
            return Exploration(states=len(seen), complete=False, failure=str(error), schedule=schedule)
        finally:
            with suppress(RuntimeError):
                execution.close()
        queue.extend((*schedule, choice) for choice in choices)
    return Exploration(states=len(seen), complete=not queue)

"""Parts of torch and Python as shared state of an explored world: store, clock, threads, attributes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any

from helpers.exploration.explorer import Execution, Task


class SharedStore:
    """The operations of a store that Shoal's protocols use; each is one atomic step."""

    def __init__(self, world: Execution, prefix: str = "") -> None:
        self._world = world
        self._prefix = prefix

    def clone(self) -> SharedStore:
        return self

    def set(self, key: str, value: str) -> None:
        self._world.operate(f"set {key}", lambda: self._put(key, value))

    def get(self, key: str) -> bytes:
        return str(self._world.operate(f"get {key}", lambda: self._read(key))).encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self._world.operate("multi_get", lambda: tuple(map(self._read, keys)))
        return [str(value).encode() for value in values]

    def check(self, keys: Sequence[str]) -> bool:
        def look() -> bool:
            return all(self._read(key) is not None for key in keys)

        return bool(self._world.operate(f"check {' '.join(keys)}", look))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        shared = self._world.shared
        self._world.block(f"wait {keys}", lambda: all(self._prefix + key in shared for key in keys))

    def add(self, key: str, amount: int) -> int:
        def count() -> int:
            value = int(str(self._world.shared.get(self._prefix + key) or 0)) + amount
            self._put(key, str(value))
            return value

        return int(self._world.operate(f"add {key}", count))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        def swap() -> str:
            if (self._world.shared.get(self._prefix + key) or "") == expected:
                self._put(key, desired)
            return str(self._world.shared.get(self._prefix + key) or expected)

        return str(self._world.operate(f"compare_set {key}", swap)).encode()

    def _read(self, key: str) -> Hashable:
        return self._world.read(self._prefix + key)

    def _put(self, key: str, value: Any) -> None:
        self._world.shared[self._prefix + key] = value


class SharedClock:
    """The clock of code that is explored."""

    def __init__(self, world: Execution) -> None:
        self._world = world
        self.sleep = world.sleep

    def now(self) -> float:
        return self._world.now

    wall = now


class SharedThreading:
    """Takes the place of the module `threading`: threads are tasks of the rank that starts them."""

    def __init__(self, world: Execution) -> None:
        self._world = world

    def Thread(  # noqa: N802
        self, *, target: Callable[..., None], args: tuple[Any, ...] = (), daemon: bool
    ) -> SharedThread:
        return SharedThread(self._world, target, args)

    def Event(self) -> SharedEvent:  # noqa: N802
        return SharedEvent(self._world)

    def current_thread(self) -> Task:
        return self._world.current

    def main_thread(self) -> None:
        """No task is the main thread, which would handle signals."""


class SharedThread:
    """A thread of a rank."""

    def __init__(self, world: Execution, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._world, self._target, self._args = world, target, args

    def start(self) -> None:
        rank = self._world.current.rank
        name = f"rank {rank}{self._target.__name__.replace('_', ' ')}"
        self._task = self._world.spawn(name, rank, lambda: self._target(*self._args))

    def join(self, timeout: float) -> None:
        self._world.block(f"join {self._task.name}", lambda: self._task.ended, timeout)


class SharedEvent:
    """An event that tasks of one rank wait for."""

    def __init__(self, world: Execution) -> None:
        self._world = world
        self._set = False

    def set(self) -> None:
        self._set = True

    def wait(self) -> None:
        self._world.block("wait for an event", lambda: self._set)


class SharedQueue:
    """Takes the place of SimpleQueue."""

    def __init__(self, world: Execution) -> None:
        self._world = world
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        self._world.block("get from a queue", lambda: bool(self._items))
        item = self._items.pop(0)
        self._world.observe(repr(item))
        return item


class SharedAttribute:
    """An attribute that several tasks of a rank use.

    With `steps`, each access is a step of its own, before which other tasks may run. Otherwise a read
    only shows in the state: it belongs to the step before it.
    """

    def __init__(self, world: Execution, name: str, rank: Callable[[Any], int], *, steps: bool) -> None:
        self._world, self._name, self._rank, self._steps = world, name, rank, steps

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        key = f"rank {self._rank(owner)} {self._name}"
        if self._steps:
            return self._world.operate(f"read {key}", lambda: self._world.shared[key])
        self._world.observe((key, self._world.shared[key]))
        return self._world.shared[key]

    def __set__(self, owner: Any, value: Hashable) -> None:
        key = f"rank {self._rank(owner)} {self._name}"
        if self._steps and key in self._world.shared:
            self._world.operate(f"write {key}", lambda: self._world.shared.update({key: value}))
        else:
            self._world.shared[key] = value

"""The numbers of attempts, in every order of the steps of several attempts at one run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.exploration.explorer import BrokenPropertyError, Execution, Protocol, explore
from helpers.exploration.mutants import load_variant
from helpers.exploration.shared_directory import SharedPath, SharedRemotePath, shared_os
from helpers.exploration.shared_store import SharedClock
from shoal.checkpoint import fencing
from shoal.util.errors import CheckpointError


def attempts(
    old: str = "",
    new: str = "",
    *,
    count: int = 2,
    checks: int = 2,
    remote: bool = False,
    earlier: int = 0,
    kills: int = 0,
    removed: bool = False,
) -> Protocol:
    """Attempts that start at any time, take a number and check it before each change.

    With `removed`, someone removes the directory at any time, once.
    """
    module = load_variant(fencing, old, new)
    path_type = SharedRemotePath if remote else SharedPath

    def begin(world: Execution) -> Callable[[bool], None]:
        replace_modules(module, world)
        world.mortal |= set(range(count))
        world.shared.update({f"{number}.json": "earlier" for number in range(1, earlier + 1)})
        started: set[int] = set()
        taken: dict[int, int] = {}
        problems: list[str] = []
        before: dict[str, set[int]] = {}
        world.outside = lambda: str((taken, started, before))

        def is_taken_over(rank: int) -> bool:
            if before:
                return rank in before["taken"] and not set(taken) <= before["started"]
            return any(number > taken[rank] for number in taken.values())

        def attempt(rank: int) -> None:
            world.operate("start", lambda: started.add(rank))
            fence: Any = module.Fence(path_type(world))
            fence.number = taken[rank] = fence.take()
            for _ in range(checks):
                over = world.operate("change", partial(is_taken_over, rank))
                try:
                    fence.check()
                except CheckpointError:
                    if not before and max(map(number_in, world.shared)) <= fence.number:
                        problems.append(f"attempt {fence.number} was stopped without a later one")
                    return
                if over and is_taken_over(rank):  # or the directory has been removed since
                    problems.append(f"attempt {fence.number} continued after it was taken over")

        def remove() -> None:
            def wipe() -> None:
                world.shared.clear()
                before.update(started=set(started), taken=set(taken))

            world.operate("remove the directory", wipe)

        for rank in range(count):
            world.spawn(f"attempt {rank}", rank, partial(attempt, rank))
        if removed:
            world.spawn("user", count, remove)

        def check(at_end: bool) -> None:
            if len(set(taken.values())) < len(taken) and not before:
                raise BrokenPropertyError(f"two attempts have the same number: {taken}")
            if problems:
                raise BrokenPropertyError(problems[0])

        return check

    return Protocol(begin=begin, kills=kills)


def replace_modules(module: Any, world: Execution) -> None:
    """Let a variant of the fence run in an explored world."""
    module.CLOCK = SharedClock(world)
    module.os = shared_os(world)
    module.secrets = SimpleNamespace(token_hex=lambda _: str(world.current.rank))
    module.Path = SharedPath
    module.RemotePath = SharedRemotePath
    module._read = lambda path: read_text(path)


def read_text(path: SharedPath) -> str:
    try:
        return path.read().decode()
    except FileNotFoundError:
        return ""


def number_in(name: str) -> int:
    return int(name.removesuffix(".json").partition("-")[0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("bounds", "states", "least"),
    [
        ({"checks": 1}, 20_000, 300),
        pytest.param({"checks": 1, "kills": 1, "earlier": 10}, 20_000, 4_000, marks=pytest.mark.long),
        pytest.param({"checks": 1, "removed": True}, 20_000, 100, marks=pytest.mark.long),
        # Two attempts may see each other's number, and then each take the next one, without end.
        pytest.param({"checks": 1, "remote": True}, 3_000, 1000, marks=pytest.mark.long),
        pytest.param({"count": 3, "checks": 1}, 200_000, 1000, marks=pytest.mark.long),
    ],
)
def test_the_latest_attempt_has_the_run(bounds: dict[str, Any], states: int, least: int) -> None:
    found = explore(attempts(**bounds), states=states)
    print(found)
    assert found.complete or bounds.get("remote"), found
    assert not found.failure, found
    assert found.states >= least


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new", "bounds"),
    [
        # The number is read twice: it may be another attempt's the second time.
        ("        return number\n\n    def mark", "        return self.newest()\n\n    def mark", {}),
        # A file that exists is taken over.
        ("os.O_CREAT | os.O_EXCL", "os.O_CREAT", {}),
        # An attempt may continue next to a later one.
        ("newest > self.number or", "newest > self.number + 1 or", {}),
        # In an object store, the first to look keeps a number that two have written.
        ("].count(number) == 1:", "].count(number) >= 1:", {"remote": True}),
        # A directory that was removed and created again looks like this attempt's.
        ('_read(self._own) not in (self._mine, "")', "False", {"removed": True}),
        # The current attempt counts as an earlier one.
        ("self._taken()[:-_KEPT]", "self._taken()", {}),
    ],
)
def test_a_defect_is_found(old: str, new: str, bounds: dict[str, Any]) -> None:
    found = explore(attempts(old, new, checks=1, **bounds), states=20_000)
    print(found)
    assert found.failure

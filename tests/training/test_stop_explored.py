"""The agreement to stop, in every order of its steps, with deaths and time-outs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.exploration.explorer import BrokenPropertyError, Execution, Protocol, explore
from helpers.exploration.mutants import load_variant
from helpers.exploration.shared_store import (
    SharedAttribute,
    SharedClock,
    SharedQueue,
    SharedStore,
    SharedThreading,
)
from shoal.training import preemption
from shoal.util.errors import LaunchError


@dataclass(frozen=True)
class StoppingWorld:
    """The part of a World that the agreement uses."""

    execution: Execution
    rank: int
    size: int
    membership: Any

    def broadcast(self, value: str) -> str:
        return "world"

    def store(self, prefix: str) -> SharedStore:
        return SharedStore(self.execution)


def stopping(
    old: str = "",
    new: str = "",
    *,
    size: int = 2,
    steps: int = 2,
    asked: Sequence[int] = (0,),
    kills: int = 0,
    survivors: bool = False,
    fine: bool = False,
    late: bool = False,
) -> Protocol:
    """Ranks that train for a few steps. Each rank of `asked` receives a signal before its first step.

    Its threads may run at any time after that. With `late`, the signal comes at any time. With
    `survivors`, the others continue without a rank that has ended. With `fine`, the threads of a rank
    may also run between two accesses to its count of ticks.
    """
    module = load_variant(preemption, old, new)
    handler_type: Any = module.PreemptionHandler

    def begin(world: Execution) -> Callable[[bool], None]:
        replace_modules(module, world, fine)
        world.mortal |= set(range(size))
        stopped: dict[int, int] = {}
        ended: dict[int, str] = {}
        handlers: dict[int, Any] = {}

        def gone(ranks: Sequence[int]) -> set[int]:
            world.observe(("gone", frozenset(world.dead)))
            return set(ranks) & world.dead

        def together(step: str, rank: int) -> bool:
            """A collective of all ranks; False if one of them is dead and may not be lost."""
            world.shared[f"{step}/{rank}"] = True

            def absent() -> set[int]:
                return {other for other in range(size) if f"{step}/{other}" not in world.shared}

            world.block(step, lambda: absent() <= world.dead)
            return survivors or not absent()

        def train(rank: int) -> None:
            known = SimpleNamespace(members=range(size), gone=gone) if survivors else None
            member = SimpleNamespace(survivors=known)
            handler = handler_type(StoppingWorld(world, rank, size, member), SharedClock(world))
            handler.start()
            handlers[rank] = handler
            if rank in asked and not late:
                handler.request("SIGTERM")
            try:
                for step in range(1, steps + 1):
                    if not together(f"step {step}", rank):
                        ended[rank] = "a collective failed"
                        break
                    if handler.due() is not None:
                        stopped[rank] = step
                        break
            except LaunchError as error:
                ended[rank] = error.found
            handler.stop()

        def signal(rank: int) -> None:
            world.block("signal", lambda: rank in handlers)
            handlers[rank].request("SIGTERM")

        for rank in range(size):
            world.spawn(f"rank {rank}", rank, partial(train, rank))
        for rank in asked if late else ():
            world.spawn(f"signal {rank}", rank, partial(signal, rank))
        return partial(check_stop, world, stopped, ended, size, steps, survivors)

    return Protocol(begin=begin, kills=kills)


def replace_modules(module: Any, world: Execution, fine: bool) -> None:
    """Let a variant of the agreement run in an explored world."""
    module.threading = SharedThreading(world)
    module.SimpleQueue = lambda: SharedQueue(world)
    module.atexit = SimpleNamespace(register=lambda _: None, unregister=lambda _: None)
    for name in ("_ticks", "_asked", "_reason", "_stopped", "_error", "_answered"):
        shared = SharedAttribute(
            world, name, lambda one: int(one._rank), steps=fine and name in ("_ticks", "_asked")
        )
        setattr(module.PreemptionHandler, name, shared)


def check_stop(
    world: Execution,
    stopped: dict[int, int],
    ended: dict[int, str],
    size: int,
    steps: int,
    survivors: bool,
    at_end: bool,
) -> None:
    if len(set(stopped.values())) > 1:
        raise BrokenPropertyError(f"ranks stopped after different steps: {stopped}")
    for rank, found in ended.items():
        if survivors or not world.dead:
            raise BrokenPropertyError(f"rank {rank} failed: {found}")
    if not at_end:
        return
    living = set(range(size)) - world.dead - set(ended)
    last = str(world.shared.get("last") or "")
    if stopped and not living <= set(stopped):
        raise BrokenPropertyError(f"only some ranks stopped: {stopped}")
    if last and int(last) <= steps and any(stopped.get(rank) != int(last) for rank in living):
        raise BrokenPropertyError(f"the ranks agreed on step {last}, and stopped after {stopped}")


@pytest.mark.full
@pytest.mark.parametrize(
    ("bounds", "states", "least"),
    [
        ({}, 300, 300),
        pytest.param({}, 200_000, 15_000, marks=pytest.mark.long),
        pytest.param({"late": True}, 200_000, 15_000, marks=pytest.mark.long),
        pytest.param({"asked": (0, 1)}, 200_000, 15_000, marks=pytest.mark.long),
        pytest.param({"steps": 1}, 200_000, 15_000, marks=pytest.mark.long),
        pytest.param({"fine": True}, 50_000, 15_000, marks=pytest.mark.long),
        pytest.param({"kills": 1}, 50_000, 15_000, marks=pytest.mark.long),
        pytest.param({"kills": 1, "survivors": True}, 50_000, 15_000, marks=pytest.mark.long),
        pytest.param({"size": 3}, 50_000, 15_000, marks=pytest.mark.long),
    ],
)
def test_all_ranks_stop_after_the_same_step(bounds: dict[str, Any], states: int, least: int) -> None:
    found = explore(stopping(**bounds), states=states)
    print(found)
    assert not found.failure, found
    assert found.states >= least


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Each request counts, not only the first, and wakes only some of the ranks.
        (
            'if store.compare_set("reason", "", text).decode() == text:\n'
            "                for rank in range(self._size):",
            'if store.compare_set("reason", "", text).decode():\n'
            "                for rank in range(self._rank):",
        ),
        # The first vote decides.
        ('if store.add("answers", 1) == self._size:', 'if store.add("answers", 1):'),
        # The ranks stop after the step that the slowest one has begun.
        pytest.param("max(map(int, posts)) + 1", "min(map(int, posts)) + 1", marks=pytest.mark.long),
        # One step too few: the fastest rank may have passed it.
        pytest.param("max(map(int, posts)) + 1", "max(map(int, posts))", marks=pytest.mark.long),
        # A rank that has ended counts as one that agrees.
        pytest.param("if all(posts) else", "if any(posts) else", marks=pytest.mark.long),
    ],
)
def test_a_defect_is_found(old: str, new: str) -> None:
    found = explore(stopping(old, new, steps=1 if "any(" in new else 2), states=20_000)
    print(found)
    assert found.failure

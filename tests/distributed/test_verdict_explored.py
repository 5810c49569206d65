"""The verdict over a hang, in every order of the messages between ranks, with deaths."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.exploration.explorer import BrokenPropertyError, Execution, Protocol, explore
from helpers.exploration.mutants import load_variant
from helpers.exploration.shared_store import SharedAttribute, SharedClock
from shoal.distributed.failure import Failure
from shoal.distributed.watchdog import diagnosis, side_channel, watch
from shoal.distributed.watchdog.abort import EXIT_CODE
from shoal.distributed.watchdog.diagnosis import WaitLimits
from shoal.telemetry.flight_recorder import Collective

ROUNDS = 6
"""Times that a rank judges its wait, after which it waits forever."""
SUM = Collective(group="world", number=3, operation="all_reduce", tensors="float32[4]", done=False)
GATHER = Collective(group="world", number=3, operation="all_gather", tensors="float32[4]", done=False)

Places = Mapping[int, str]
"""Of each rank: it "waits", waits in the "wrong" collective, is "elsewhere", or is "stopped"."""


def hang(
    old: str = "",
    new: str = "",
    module: Any = watch,
    *,
    places: Places,
    kills: int = 0,
    arrives: bool = False,
) -> Protocol:
    """Ranks that hang in one collective. With `arrives`, the rank that is elsewhere may still come."""
    watches: Any = load_variant(watch, *((old, new) if module is watch else ()))
    words = load_variant(diagnosis, *((old, new) if module is diagnosis else ()))
    names = {name: getattr(words, name) for name in ("RankReport", "SilentRank")}
    vars(watches).update(names, diagnosis=words)

    def begin(world: Execution) -> Callable[[bool], None]:
        here = Hang(world, watches, places)
        waiting = [rank for rank in places if places[rank] in ("waits", "wrong")]
        world.mortal |= set(waiting)
        for rank in waiting:
            world.spawn(f"rank {rank}", rank, partial(here.judge, rank))
        if arrives:
            world.spawn("elsewhere", len(places), here.arrive)
        return here.check

    return Protocol(begin=begin, kills=kills, exact_timers=True)


class Hang:
    """The ranks of one execution: their watches, whom they blame, and who has exited."""

    def __init__(self, world: Execution, watches: Any, places: Places) -> None:
        self.world, self.watches, self.places = world, watches, places
        self.arrived: list[int] = []
        self.exited: set[int] = set()
        self.blamed: list[tuple[int, int]] = []
        self.unended: list[int] = []
        watches.asyncio = SimpleNamespace(create_task=self.create_task, sleep=self.sleep)
        replace_abort(watches, world, self.told, self.leave)
        for name in ("_left", "_decided", "_ending"):
            shared = SharedAttribute(world, name, lambda one: int(one._rank), steps=False)
            setattr(watches.Watch, name, shared)
        self.peers = {rank: self.make(rank) for rank in places}

    def make(self, rank: int) -> Any:
        """The watch of a rank, whose messages are steps of the exploration."""
        made = object.__new__(self.watches.Watch)
        made._rank, made._size, made.limit = rank, len(self.places), 1.0
        made._clock = SharedClock(self.world)
        made._limits = WaitLimits(step=1.0, prepare=1.0)
        made._peers = [
            side_channel.PeerAddress(host=f"host{r}", pid=r, born=0.0, address="", port=0)
            for r in self.places
        ]
        made._left, made._decided, made._ending = -1e9, False, None
        made._counts = lambda: len(self.arrived)
        made._still_waits = lambda before: len(self.arrived) == before
        made._see, made._ask = partial(self.see, rank), self.ask
        made._put_into_words = lambda decided, found: Failure(
            rank=decided.rank, code=EXIT_CODE, where=decided.where, when=0.0
        )
        return made

    def see(self, rank: int) -> Any:
        call = GATHER if self.places[rank] == "wrong" else SUM
        return self.watches.RankReport(
            rank=rank,
            host=f"host{rank}",
            place="train.py:7",
            function="main",
            waits=None if self.places[rank] == "elsewhere" or self.arrived else call,
            limit=1.0,
            groups={"world": list(self.places)},
        )

    async def ask(self, ranks: Sequence[int], question: dict[str, Any]) -> list[Any]:
        said = "end" if "end" in question else "judge"
        return [
            self.world.operate(f"{said} {rank}", partial(self.deliver, rank, question))
            for rank in ranks
        ]

    def deliver(self, rank: int, question: dict[str, Any]) -> Any:
        if rank in self.world.dead or rank in self.exited:
            return ConnectionResetError()
        return TimeoutError() if self.places[rank] == "stopped" else self.peers[rank]._reply(question)

    async def sleep(self, seconds: float) -> None:
        self.world.sleep(seconds)

    def create_task(self, ending: Any) -> bool:
        rank = ending.cr_frame.f_locals["self"]._rank
        name = f"rank {rank} ends {len(self.world.tasks)}"
        self.world.spawn(name, rank, partial(complete, ending))
        return True

    def told(self, rank: int, report: Failure) -> bool:
        self.blamed.append((rank, report.rank))
        self.world.shared[f"blamed {len(self.blamed)}"] = (rank, report.rank)
        return True

    def leave(self, rank: int, strangers: object) -> None:
        self.exited.add(rank)
        self.world.shared[f"exited {rank}"] = True
        self.world.end_rank(rank)

    def judge(self, rank: int) -> None:
        """Judge the wait of a rank until it ends."""
        for _ in range(ROUNDS):
            if self.arrived:
                return
            complete(self.peers[rank]._judge(2.0))
            self.world.sleep(1.0)
        self.unended.append(rank)

    def arrive(self) -> None:
        self.world.operate("arrive", lambda: self.arrived.append(1))
        self.world.shared["arrived"] = True

    def check(self, at_end: bool) -> None:
        guilty = {rank for rank, place in self.places.items() if place != "waits"}
        for rank, blame in self.blamed:
            if blame not in guilty | self.world.dead | self.exited:
                raise BrokenPropertyError(f"rank {rank} blames rank {blame}, which only waits")
        if len({blame for _, blame in self.blamed}) > 1 and not self.world.dead:
            raise BrokenPropertyError(f"ranks blame different ranks: {self.blamed}")
        if self.unended:
            raise BrokenPropertyError(f"rank {self.unended[0]} waits forever")


def replace_abort(
    module: Any,
    world: Execution,
    told: Callable[[int, Failure], bool],
    leave: Callable[[int, object], None],
) -> None:
    """Note the reports, and end the tasks of a rank in place of its process."""
    module.abort = SimpleNamespace(
        tell_launcher=lambda report: told(world.current.rank, report),
        tell_people=lambda *_: None,
        launched=lambda: True,
        exit_process=lambda strangers: leave(world.current.rank, strangers),
    )


def complete(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine whose waits are steps of its task."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something else")


ELSEWHERE = {0: "waits", 1: "waits", 2: "elsewhere"}
WRONG = {0: "waits", 1: "waits", 2: "wrong"}
STOPPED = {0: "waits", 1: "waits", 2: "stopped"}


@pytest.mark.parametrize(
    ("bounds", "least"),
    [
        ({"places": ELSEWHERE}, 100),
        pytest.param({"places": WRONG}, 50, marks=pytest.mark.long),
        pytest.param({"places": STOPPED}, 50, marks=pytest.mark.long),
        pytest.param({"places": ELSEWHERE, "kills": 1}, 50, marks=pytest.mark.long),
        pytest.param({"places": ELSEWHERE, "arrives": True}, 50, marks=pytest.mark.full),
    ],
)
def test_ranks_blame_the_rank_that_caused_the_hang(bounds: dict[str, Any], least: int) -> None:
    found = explore(hang(**bounds), states=100_000)
    print(found)
    assert found.complete, found
    assert not found.failure, found
    assert found.states >= least


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "old", "new", "bounds"),
    [
        # A rank that waits like all others counts as one that is awaited.
        (
            diagnosis,
            "if isinstance(one, RankReport) and one.waits is not None:\n        return False",
            "if False:\n        return False",
            {"places": ELSEWHERE},
        ),
        # A rank leaves the verdict to a lower one for good, which may have ended since.
        (
            watch,
            "self._left = self._clock.now() if lower",
            "self._left = 1e9 if lower",
            {"places": ELSEWHERE, "kills": 1},
        ),
        # The verdict counts although the wait has ended.
        (
            watch,
            "if self._ending is not None or not self._still_waits(counts):",
            "if self._ending is not None:",
            {"places": ELSEWHERE, "arrives": True},
        ),
        # The vote of a rank that has ended counts.
        (
            watch,
            "return SilentRank(rank=rank, host=peer.host, pid=peer.pid, ended=ended, cut=cut)",
            "return self._see()",
            {"places": STOPPED, "kills": 1},
        ),
    ],
)
def test_a_defect_is_found(module: Any, old: str, new: str, bounds: dict[str, Any]) -> None:
    found = explore(hang(old, new, module, **bounds), states=100_000)
    print(found)
    assert found.failure

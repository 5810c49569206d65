"""Stopping without a training: threads of one process are ranks, and share a store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import shoal.training.preemption
from helpers.checkpoint_files import NO_LOSSES
from helpers.commands import wait_for
from shoal.distributed.cluster_env import REQUEUE
from shoal.training.preemption import SIGNALS, Kind, PreemptionHandler, StoppedExit, StopReason
from shoal.util.errors import LaunchError


@dataclass
class Shared:
    """What ranks of a world share; `broadcast` gives all the first value."""

    store: Any = None
    name: str = ""


@dataclass
class Part:
    """A world as one thread of several sees it."""

    shared: Shared
    rank: int
    size: int
    membership: Any = NO_LOSSES

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: str) -> str:
        self.shared.name = self.shared.name or value
        return self.shared.name

    def store(self, prefix: str) -> Any:
        return PrefixStore(prefix, self.shared.store)


@pytest.fixture(scope="module")
def server() -> Any:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def stoppings(server: Any) -> Iterator[Callable[[int], list[PreemptionHandler]]]:
    """As many as asked for, started outside the main thread, so without handlers."""
    made: list[PreemptionHandler] = []

    def make(size: int) -> list[PreemptionHandler]:
        shared = Shared(server)
        made[:] = [PreemptionHandler(Part(shared, rank, size)) for rank in range(size)]  # type: ignore[arg-type]
        with ThreadPoolExecutor(1) as pool:
            for each in made:
                pool.submit(each.start).result()
        return made

    yield make
    for each in made:
        each.stop()


def run(stopping: PreemptionHandler, ticks: int, pace: threading.Semaphore | None = None) -> int | None:
    """Tick up to `ticks` times, each when `pace` allows; the tick that was the last, if told so."""
    for tick in range(1, ticks + 1):
        if pace is not None:
            pace.acquire()
        time.sleep(1e-4)  # as a step does, let the other threads run
        if stopping.due() is not None:
            return tick
    return None


@pytest.mark.parametrize("ahead", [0, 1, 7])
def test_all_stop_in_the_same_tick_however_far_apart(
    ahead: int, stoppings: Callable[[int], list[PreemptionHandler]]
) -> None:
    """Rank 0 is `ahead` ticks ahead of the others when one of those asks."""
    several = stoppings(3)
    paces = [threading.Semaphore(0) for _ in several]
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(run, each, 100, pace) for each, pace in zip(several, paces, strict=True)]
        paces[0].release(ahead + 1)
        wait_for(lambda: several[0]._ticks == ahead + 1)
        for pace in paces[1:]:
            pace.release()
        wait_for(lambda: [each._ticks for each in several[1:]] == [1, 1])
        several[1].request("SIGTERM")
        wait_for(lambda: all(each._settled.is_set() for each in several))
        for pace in paces:
            pace.release(100)
        assert [end.result(100) for end in ends] == [ahead + 2] * 3


def test_the_first_request_counts(stoppings: Callable[[int], list[PreemptionHandler]]) -> None:
    several = stoppings(2)
    several[1].request("no space left", kind="failed")
    wait_for(lambda: all(each._settled.is_set() for each in several))
    several[0].request("SIGTERM")
    reasons = [each.due() for each in several]
    assert reasons == [StopReason(kind="failed", what="no space left", rank=1)] * 2
    assert str(reasons[0]) == "no space left on rank 1"


def test_codes() -> None:
    kinds: tuple[Kind, ...] = ("preempted", "interrupted")
    codes = [StoppedExit(StopReason(kind=kind, what="x", rank=0)).code for kind in kinds]
    assert codes == [REQUEUE, 130]
    assert not issubclass(StoppedExit, Exception)


def test_nobody_stops_when_one_has_left(stoppings: Callable[[int], list[PreemptionHandler]]) -> None:
    """At the end of a training one rank closes its Run first: the others end as it did."""
    several = stoppings(3)
    for _ in range(5):
        assert several[0].due() is None
    several[0].stop()
    several[0].stop()
    assert several[1].due() is None
    several[1].request("SIGTERM")
    with ThreadPoolExecutor(2) as pool:
        assert [pool.submit(run, each, 5).result(100) for each in several[1:]] == [None, None]


def test_a_rank_that_is_dead_is_named(
    stoppings: Callable[[int], list[PreemptionHandler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.training.preemption, "ANSWER_SECONDS", 0.3)
    several = stoppings(3)
    monkeypatch.setattr(several[2], "_answer", lambda *_: None)
    both = threading.Barrier(2)  # the time begins when the living have answered, however slow they are
    for each in several[:2]:
        monkeypatch.setattr(each, "_answer", answering_together(each._answer, both))
    several[0].request("SIGTERM")
    for each in several[:2]:
        with pytest.raises(LaunchError, match=r"rank 2 of 3 did not answer") as caught:
            each.due()
        assert "SIGTERM on rank 0" in caught.value.given


def answering_together(answer: Callable[..., None], both: threading.Barrier) -> Callable[..., None]:
    def answering(*given: Any) -> None:
        answer(*given)
        both.wait(60)

    return answering


def test_stopping_does_not_wait_for_the_dead(
    stoppings: Callable[[int], list[PreemptionHandler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.training.preemption, "ANSWER_SECONDS", 3600.0)
    several = stoppings(2)
    several[1]._answered = True  # it will never answer
    several[0].request("SIGTERM")
    wait_for(lambda: several[0]._answered)
    threads = list(several[0]._threads)
    several[0].stop()
    wait_for(lambda: not any(thread.is_alive() for thread in threads))


class Gone:
    """A store whose rank was killed."""

    def check(self, *_: object) -> bool:
        raise RuntimeError("Connection was likely closed")

    clone = compare_set = set = add = check


def test_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks afterwards learns so, and nobody waits."""
    monkeypatch.setattr(Part, "store", lambda *_, **__: Gone())
    stopping = PreemptionHandler(Part(Shared(), 1, 2))  # type: ignore[arg-type]
    stopping.start()
    assert stopping.due() is None
    stopping.request("SIGTERM")
    with pytest.raises(LaunchError, match="can't be reached any more: Connection was likely closed"):
        stopping.due()
    stopping.stop()


def alone() -> PreemptionHandler:
    made = PreemptionHandler(Part(Shared(), 0, 1))  # type: ignore[arg-type]
    made.start()
    return made


def test_a_world_of_one_stops_in_this_tick_without_a_store() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    unasked = alone()
    assert all(signal.getsignal(number) != before[number] for number in SIGNALS)
    unasked.stop()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    stopping = alone()
    assert stopping.due() is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stopping.due() == StopReason(kind="preempted", what="SIGUSR1", rank=0)
    assert stopping._threads == []
    stopping.stop()


def test_a_second_signal_does_not_cut_the_end_short() -> None:
    before = signal.getsignal(signal.SIGINT)
    stopping = alone()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.due() is not None
    stopping.stop()
    os.kill(os.getpid(), signal.SIGTERM)  # would end the tests
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    stopping = alone()
    os.kill(os.getpid(), signal.SIGINT)
    assert "Ctrl-C again" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert stopping.due() == StopReason(kind="interrupted", what="SIGINT", rank=0)
    stopping.stop()


def test_handlers_of_the_user_are_called_and_ignored_signals_stay_ignored() -> None:
    seen: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    signal.signal(signal.SIGTERM, own)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    stopping = alone()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [signal.SIGTERM]
    assert stopping.due() is not None
    stopping.stop()


def test_no_handlers_outside_the_main_thread() -> None:
    """As in a notebook's thread: signals do what they did, requests are served."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(alone).result()
        assert {number: signal.getsignal(number) for number in SIGNALS} == before
        stopping.request("a rank")
        assert pool.submit(stopping.due).result() is not None
        pool.submit(stopping.stop).result()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 7), (signal.SIGINT, 7)]
)
def test_a_forked_process_does_not_act_on_the_handlers(number: signal.Signals, code: int) -> None:
    """It can be ended, and what all processes of a job are sent is the rank's affair."""
    stopping = alone()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        stopping.stop()
        os._exit(7 if not stopping._asked else 8)
    os.read(ready[0], 1)
    os.kill(child, number)
    os.write(go[1], b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    assert stopping.due() is None
    stopping.stop()

"""The restarts of one machine, after every sequence of failures and preemptions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.exploration.mutants import load_variant
from shoal.distributed.cluster_env import REQUEUE
from shoal.distributed.failure import Failure
from shoal.launcher import elastic_agent, failure_history, launcher
from shoal.launcher.failure_history import PASSES_WITHIN

FAILED, PREEMPTED, AT_STEP, PASSING = 1, REQUEUE, 2, 3
LENGTH = 4
"""Attempts that do not end well; the next one does. One fewer if faults may pass."""


class ScriptedWorkers:
    """Ranks that end with the exit codes of a list, one per attempt."""

    def __init__(self, codes: Sequence[int]) -> None:
        self._codes = list(codes)

    def wait(self, grace: float | None) -> list[Failure]:
        code = self._codes.pop(0) if self._codes else 0
        step = 7 if code in (AT_STEP, PASSING) else None
        passing = "EIO" if code == PASSING else ""
        where = "host, train.py:3"
        found = Failure(rank=0, code=code, when=0.0, where=where, step=step, passing=passing)
        return [found] if code else []

    def left(self) -> list[Any]:
        return []

    def values(self) -> list[bytes]:
        return []


class ScriptedOrders:
    """The launcher's end of the agent's orders; its waits for faults to pass take no time."""

    def __init__(self, module: Any, codes: Sequence[int], restarts: int, preemptions: int) -> None:
        self.attempts: list[int] = []
        self.waits: list[int] = []
        module.CLOCK = SimpleNamespace(now=lambda: 0.0, sleep=self.waits.append)
        made: Any = object.__new__(module.Launcher)
        made._workers = ScriptedWorkers(codes)
        made._processes = made._size = 1
        made._restarts, made._preemptions, made._grace = restarts, preemptions, None
        made._failed = made._preempted = 0
        made._history, made._begun = module.FailureHistory(), 0.0
        made._told = False
        made._stop_and_tell = lambda *_: False
        self.launcher = made

    def send_bytes(self, data: bytes) -> None:
        order, value = json.loads(data)
        if order == "start":
            self.attempts.append(int(value[0]["TORCHELASTIC_RESTART_COUNT"]))
            self._answer: object = [1]
        else:
            self._answer = self.launcher._watch(None)

    def recv_bytes(self) -> bytes:
        return json.dumps(self._answer).encode()


def attempts(codes: Sequence[int], restarts: int, preemptions: int) -> int:
    """One more, as long as neither number is used up and no failure at a known step has come twice."""
    for count in range(1, len(codes) + 1):
        failures = [code for code in codes[:count] if code != PREEMPTED]
        over = len(failures) > restarts or count - len(failures) > preemptions
        if over or failures[-2:] == [AT_STEP, AT_STEP]:
            return count
    return len(codes) + 1


def wrong_end(agents: Any, launchers: Any, restarts: int, preemptions: int) -> str:
    """The first sequence after which too many or too few attempts were started, or of which the waits
    are too long.
    """
    sequences = 0
    kinds = (FAILED, PREEMPTED, AT_STEP)
    passing = itertools.product((PASSING, *kinds), repeat=LENGTH - 1)
    for codes in itertools.chain(passing, itertools.product(kinds, repeat=LENGTH)):
        orders = ScriptedOrders(launchers, codes, restarts, preemptions)
        agents.supervise(cast(Any, orders), processes=1, restarts=restarts, port=0)
        sequences += 1
        wanted = attempts(codes, restarts, preemptions)
        if orders.attempts != list(range(wanted)):
            return f"{codes}: attempts {orders.attempts}, not {list(range(wanted))}"
        wait = sum(orders.waits)
        lasts = restarts and set(codes) == {PASSING}
        if wait > PASSES_WITHIN or (lasts and wait < PASSES_WITHIN):
            return f"{codes}: it waited {orders.waits}"
    print(f"{sequences} sequences, {restarts} restarts, {preemptions} preemptions")
    return ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("restarts", "preemptions"),
    [
        (1, 1),
        *(
            pytest.param(*each, marks=pytest.mark.full if each == (2, 2) else pytest.mark.long)
            for each in itertools.product(range(3), repeat=2)
            if each != (1, 1)
        ),
    ],
)
def test_failures_and_preemptions_have_their_own_numbers(restarts: int, preemptions: int) -> None:
    assert not wrong_end(elastic_agent, load_variant(launcher), restarts, preemptions)


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        # A preemption uses up a restart.
        (elastic_agent, "            self.grant_restart()\n", ""),
        # Attempts after a preemption have the number of the attempt before.
        (elastic_agent, "            self._preemptions += 1\n", ""),
        # One preemption more than allowed.
        (launcher, "self._preempted < self._preemptions", "self._preempted <= self._preemptions"),
        # Failures that another one has separated count as twice in a row.
        (failure_history, "self, signature=failure", "self, signature=self.signature or failure"),
        # Restarts continue after the same failure.
        (elastic_agent, '        elif ended == "final":\n            self.end_restarts()\n', ""),
        # Each wait for a fault that may pass begins a new total.
        (failure_history, "rest = PASSES_WITHIN - waited", "rest = PASSES_WITHIN"),
        # A fault that may pass is started again at once.
        (launcher, "        CLOCK.sleep(history.wait)\n", ""),
        # A failure counts as a preemption.
        (launcher, "if preempted(failures):\n            return", "if failures:\n            return"),
    ],
)
def test_a_defect_is_found(module: Any, old: str, new: str) -> None:
    changed = load_variant(module, old, new)
    agents = changed if module is elastic_agent else elastic_agent
    launchers: Any = changed if module is launcher else load_variant(launcher)
    if module is failure_history:
        launchers.FailureHistory = changed.FailureHistory
    found = wrong_end(agents, launchers, 3, 2)
    print(found)
    assert found

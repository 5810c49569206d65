"""A rank that leaves while the others still need it is the one that is named."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from helpers.commands import GONE_WITHIN, wait_for
from helpers.scripts import Script

pytestmark = pytest.mark.processes

HOST = socket.gethostname()

BEGIN = """
import os, sys, threading
import torch, shoal

def loss(output, batch):
    return output.sum(), len(output)

def data_and_step(world):
    model = shoal.parallelize(torch.nn.Linear(2, 2), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    return shoal.Loader((torch.ones(99, 2),), world, batch_size=9), step
"""

IN_A_RUN = """
with shoal.init() as world:  # with
    data, step = data_and_step(world)
    with shoal.Run("run", step, data) as run:
        for batch in data.epochs(3):
            if world.rank == WHO and step.number == 6:
                LEAVE  # leaves
            step(batch)  # needs
            run.tick()
"""

KILL = "os.kill(os.getpid(), 9)"

WITHOUT_WITH = """
world = shoal.init()
data, step = data_and_step(world)
for batch in data.epochs(3):
    if world.rank == WHO and step.number == 6:
        LEAVE  # leaves
    step(batch)  # needs
"""


@pytest.fixture
def leave(start: Callable[..., Script]) -> Callable[..., Script]:
    """Three ranks of a script, one of which leaves early."""

    def begin(body: str, how: str, who: int = 1, launcher: str = "shoal run") -> Script:
        return start((BEGIN + body).replace("WHO", str(who)).replace("LEAVE", how), launcher, size=3)

    return begin


Leave = Callable[..., Script]


def full(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("body", "who", "how", "place"),
    [
        full(IN_A_RUN, 1, "sys.exit(0)", "# leaves"),
        long(IN_A_RUN, 0, "sys.exit()", "# leaves"),
        long(WITHOUT_WITH, 1, "sys.exit(0)", "# leaves"),
        long(IN_A_RUN, 1, "break", "# with"),
        full(WITHOUT_WITH, 0, "break", ""),
        long(IN_A_RUN, 0, "os._exit(0)", "pid"),
        full(IN_A_RUN, 1, "os._exit(0)", "pid"),
    ],
)
def test_a_rank_that_ends_early_is_named_with_its_exit_code_and_line(
    leave: Leave, body: str, who: int, how: str, place: str
) -> None:
    """And who still needed it."""
    run = leave(body, how, who)
    ended = run.end()
    *_, given, found, fix, last = ended.err.splitlines()
    where = HOST + (f", {run.at(place)}" if place.startswith("#") else "")
    if place == "pid":
        (pid,) = re.findall(rf"^where: rank {who} of 3 on {HOST}, pid (\d+)\b", last)
        where = f"{HOST}, pid {pid}"
    else:
        assert "Traceback (most recent call last):" in ended.err  # of the rank that needed it
    assert ended.code == 1
    assert given == f"given: rank {who} of 3, which ended with exit code 0 on {where}"
    assert re.match(rf"found: rank [012] still needed it, on {HOST}, {run.at('# needs')}: ", found)
    assert f"rank {who} still" not in found
    assert fix.startswith("fix:   let all ranks take the same number of steps")
    step = "(, after step [0-9]+)?"  # unknown after a kill
    assert re.fullmatch(
        rf"where: rank {who} of 3 on {re.escape(where)}{step} \(the other 2 were stopped\)", last
    )
    wait_for(lambda: not run.members(), GONE_WITHIN)


@pytest.mark.full
def test_a_rank_that_leaves_its_world_and_lives_on_is_named(leave: Leave) -> None:
    """Its model keeps its connections open, so that the others get no error."""
    run = leave(IN_A_RUN + "threading.Event().wait()\n", "break")
    ended = run.end()
    assert ended.code == 124
    *_, given, found, fix, last = ended.err.splitlines()
    assert given == "given: a wait for a rank that has left"
    said = f"found: rank 1 of 3 on {HOST} has ended or left its world (its connection closed); ranks 0 "
    assert found.startswith(said)
    assert f" at {run.at('# needs')}" in found
    assert "let all ranks take the same number of steps" in fix
    where = f"where: rank 1 of 3 on {HOST}, {re.escape(run.at('# with'))}"
    assert re.fullmatch(rf"{where}(, after step [0-9]+)? \(the other 2 were stopped\)", last)
    wait_for(lambda: not run.members(), GONE_WITHIN)


@pytest.mark.parametrize(
    ("body", "who", "how"),
    [
        full(IN_A_RUN, 1, "sys.exit(0)"),
        long(IN_A_RUN, 0, "sys.exit(0)"),
        long(WITHOUT_WITH, 1, "break"),
        long(WITHOUT_WITH, 1, "os._exit(0)"),
        *(
            long(
                IN_A_RUN.replace("step(batch)  # needs", f"{call}  # needs\n            step(batch)"),
                1,
                KILL,
            )
            for call in (
                "world.barrier()",
                "world.gather(1)",
                "shoal.evaluate(step, (torch.ones(9, 2),))",
            )
        ),
    ],
)
def test_without_a_launcher_of_ours_the_other_ranks_name_it(
    leave: Leave, body: str, who: int, how: str
) -> None:
    run = leave(body, how, who, "hand")
    ended = run.end()
    line = r"rank (\d) of 3 on (\S+) has ended or left its world \(its connection closed\), while (.*)"
    said = re.findall(line, ended.err)
    assert {(int(rank), host) for rank, host, _ in said} == {(who, HOST)}, ended.err
    places = {text.partition(": see that")[0].rpartition(" at ")[2] for _, _, text in said}
    assert places == {run.at("# needs")}
    assert "see that rank's own error" in ended.err
    if "with shoal.init" in body:  # no error of torch is left
        assert f"given: rank {who} of 3 on {HOST}, which rank " in ended.err
        assert "pair.cc" not in ended.err


IN_A_SAVE = """
from shoal.checkpoint import Files
write = Files.write

def write_or_leave(*args):
    if world.rank == WHO and step.number >= 4:
        LEAVE
    write(*args)

Files.write = write_or_leave
with shoal.init() as world:
    data, step = data_and_step(world)
    with shoal.Run("run", step, data, trackers=()) as run:
        for batch in data.epochs(3):
            step(batch)
            run.tick(every=4)
"""


@pytest.mark.parametrize(
    ("who", "launcher"), [full(1, "shoal run"), full(1, "hand"), long(0, "shoal run"), long(0, "hand")]
)
def test_a_rank_that_is_killed_in_a_save_is_named_first(leave: Leave, who: int, launcher: str) -> None:
    ended = leave(IN_A_SAVE, KILL, who, launcher).end()
    said = ended.out + ended.err
    assert "pair.cc" not in said  # of Gloo
    assert "training continues" not in said
    gone = f"rank {who} of 3 on {HOST} has ended or left its world (its connection closed), while rank "
    if who:  # rank 0 tells of saves
        unsaved = "the checkpoint of step 4 may be incomplete"
        assert f"shoal: {gone}0 was in the save of a checkpoint; {unsaved}" in said
    if launcher == "hand":
        # By an error, or by the report of a hang if the connection of a rank to it stays open.
        assert set(re.findall(r"found: (rank \d of 3 on \S+) has ended", said)) == {
            gone[: gone.index(" has")]
        }
    else:
        assert f"\nrank {who} was killed by SIGKILL (signal 9)" in f"\n{ended.err}"


@pytest.mark.long
def test_a_rank_that_ends_well_is_not_blamed_for_an_error_of_another(leave: Leave) -> None:
    """Rank 2 has an error of its own after all have left their worlds."""
    own = "if world.rank == 2:\n    raise RuntimeError('Connection refused')  # own\n"
    run = leave(IN_A_RUN + own, "pass", who=9)
    ended = run.end()
    assert ended.code == 1
    last = ended.err.splitlines()[-1]
    assert last == f"where: rank 2 of 3 on {HOST}, {run.at('# own')} (the other 2 were stopped)"
    assert "still needed" not in ended.err

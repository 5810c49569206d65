"""A rank that leaves while the others still need it is the one that is named."""

from __future__ import annotations

import re
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import GONE_WITHIN, Command, Ended, wait_for
from helpers.ranks import free_port

pytestmark = pytest.mark.processes

HOST = socket.gethostname()

BEGIN = """
import os, sys
import torch, shoal

def loss(output, batch):
    return output.sum(), len(output)

def data_and_step(world):
    model = shoal.parallelize(torch.nn.Linear(2, 2), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    return shoal.Loader((torch.ones(99, 2),), world, batch_size=9), step
"""

IN_A_RUN = """
with shoal.init() as world:
    data, step = data_and_step(world)
    with shoal.Run("run", step, data) as run:
        for batch in data.epochs(3):
            if world.rank == WHO and step.number == 6:
                LEAVE  # leaves
            step(batch)  # needs
            run.tick()
"""

WITHOUT_WITH = """
world = shoal.init()
data, step = data_and_step(world)
for batch in data.epochs(3):
    if world.rank == WHO and step.number == 6:
        LEAVE  # leaves
    step(batch)  # needs
"""

AND_STAYS = """
import threading
with shoal.init() as world:  # with
    data, step = data_and_step(world)
    for batch in data.epochs(3):
        if world.rank == WHO and step.number == 6:
            LEAVE  # leaves
        step(batch)  # needs
threading.Event().wait()
"""


class Leaving(Command):
    """Three ranks of a script, one of which leaves early."""

    def __init__(self, folder: Path, body: str, launcher: str, *, who: int, leave: str) -> None:
        self.script = folder / "script.py"
        text = textwrap.dedent(BEGIN + body).replace("WHO", str(who)).replace("LEAVE", leave)
        self.script.write_text(text)
        by_hand = (
            f"export WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}\n"
            f"for rank in 0 1 2; do RANK=$rank LOCAL_RANK=$rank {sys.executable} script.py & done\nwait"
        )
        commands = {
            "shoal run": [sys.executable, "-m", "shoal", "run", "-n", "3", "script.py"],
            "hand": ["sh", "-c", by_hand],
        }
        super().__init__(commands[launcher], folder)

    def at(self, marked: str) -> str:
        """The line of the script that ends with a comment, as reports name it."""
        lines = self.script.read_text().splitlines()
        (number,) = (n for n, line in enumerate(lines, start=1) if line.endswith(f"# {marked}"))
        return f"{self.script}:{number}"


Start = Callable[..., Leaving]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    commands: list[Leaving] = []

    def begin(body: str, launcher: str = "shoal run", *, who: int = 1, leave: str) -> Leaving:
        commands.append(Leaving(tmp_path, body, launcher, who=who, leave=leave))
        return commands[-1]

    yield begin
    for command in commands:
        command.clean_up()


def check_report(run: Leaving, ended: Ended, who: int, *, did: str, where: str) -> None:
    """The report of the launcher names who left, how and where, and who still needed it."""
    *_, given, found, fix, last = ended.err.splitlines()
    assert ended.code == 1
    assert given == f"given: rank {who} of 3, which {did} on {where}"
    assert re.match(rf"found: rank [012] still needed it, on {HOST}, {run.at('needs')}: ", found)
    assert f"rank {who} still" not in found
    assert fix.startswith("fix:   let all ranks take the same number of steps")
    step = "(, after step [0-9]+)?"  # unknown after a kill
    assert re.fullmatch(
        rf"where: rank {who} of 3 on {re.escape(where)}{step} \(the other 2 were stopped\)", last
    )
    wait_for(lambda: not run.members(), GONE_WITHIN)


def full(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("body", "who", "leave", "place"),
    [
        full(IN_A_RUN, 1, "sys.exit(0)", "leaves"),
        long(IN_A_RUN, 0, "sys.exit()", "leaves"),
        long(WITHOUT_WITH, 1, "sys.exit(0)", "leaves"),
        long(IN_A_RUN, 1, "break", "init() as world:"),
        full(WITHOUT_WITH, 0, "break", ""),
    ],
)
def test_a_rank_that_ends_early_is_named_with_its_exit_code_and_line(
    start: Start, body: str, who: int, leave: str, place: str
) -> None:
    body = body.replace("init() as world:", "init() as world:  # init() as world:")
    run = start(body, who=who, leave=leave)
    ended = run.end()
    where = f"{HOST}, {run.at(place)}" if place else HOST
    check_report(run, ended, who, did="ended with exit code 0", where=where)
    assert "Traceback (most recent call last):" in ended.err  # of the rank that needed it


@pytest.mark.parametrize("who", [long(0), full(1)])
def test_a_rank_that_ends_without_a_word_is_named_by_its_process(start: Start, who: int) -> None:
    run = start(IN_A_RUN, who=who, leave="os._exit(0)")
    ended = run.end()
    (pid,) = re.findall(rf"^where: rank {who} of 3 on {HOST}, pid (\d+)\b", ended.err, re.MULTILINE)
    check_report(run, ended, who, did="ended with exit code 0", where=f"{HOST}, pid {pid}")


@pytest.mark.long
def test_a_rank_that_leaves_its_world_and_lives_on_is_named(start: Start) -> None:
    """Its model keeps its connections open, so that the others get no error."""
    run = start(AND_STAYS, leave="break")
    ended = run.end()
    assert ended.code == 124
    *_, given, found, fix, last = ended.err.splitlines()
    assert given == "given: a wait for a rank that has left"
    said = f"found: rank 1 of 3 on {HOST} has ended or left its world (its connection closed); ranks 0 "
    assert found.startswith(said)
    assert f" at {run.at('needs')}" in found
    assert "let all ranks take the same number of steps" in fix
    assert last == f"where: rank 1 of 3 on {HOST}, {run.at('with')} (the other 2 were stopped)"
    wait_for(lambda: not run.members(), GONE_WITHIN)


@pytest.mark.parametrize(
    ("body", "who", "leave"),
    [
        full(IN_A_RUN, 1, "sys.exit(0)"),
        long(IN_A_RUN, 0, "sys.exit(0)"),
        long(WITHOUT_WITH, 1, "break"),
        long(WITHOUT_WITH, 1, "os._exit(0)"),
    ],
)
def test_without_a_launcher_of_ours_the_other_ranks_name_it(
    start: Start, body: str, who: int, leave: str
) -> None:
    run = start(body, "hand", who=who, leave=leave)
    ended = run.end()
    line = r"rank (\d) of 3 on (\S+) has ended or left its world \(its connection closed\), while (.*)"
    said = re.findall(line, ended.err)
    assert {(int(rank), host) for rank, host, _ in said} == {(who, HOST)}, ended.err
    assert all(f"{run.at('needs')}: see its own error" in text for _, _, text in said)


@pytest.mark.long
def test_a_rank_that_ends_well_is_not_blamed_for_an_error_of_another(start: Start) -> None:
    """Rank 2 has an error of its own after all have left their worlds."""
    body = IN_A_RUN + "if world.rank == 2:\n    raise ConnectionError('Connection refused')  # own\n"
    run = start(body, who=9, leave="pass")
    ended = run.end()
    assert ended.code == 1
    *_, last = ended.err.splitlines()
    assert last == f"where: rank 2 of 3 on {HOST}, {run.at('own')} (the other 2 were stopped)"
    assert "still needed" not in ended.err

"""`shoal run --nodes`: launchers of one machine as its nodes; they come, go, fail and are killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helpers.clocks import WrongClock
from helpers.commands import Command, Ended, wait_for
from helpers.ranks import free_port
from shoal.telemetry import events
from shoal.tools.report.coverage import coverage

pytestmark = pytest.mark.processes

HERE = socket.gethostname()

TRAIN = """
import os, sys, time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import shoal

here = Path(__file__).parent


def hold(world, name):
    (here / f"{name}-{world.rank}").write_text(str(os.getpid()))
    while True:
        time.sleep(1)


with shoal.init(seed=0) as world:
    torch.manual_seed(0)
    inputs = torch.randn(41, 6, dtype=torch.float64)
    targets = torch.randint(0, 3, (41,))
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = shoal.parallelize(net, world, None)
    task = shoal.Task(lambda out, b: (F.cross_entropy(out, b[1], reduction="sum"), len(b[1])))
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), task, clip=1.0)
    data = shoal.Loader((inputs, targets), world, batch_size=12)
    with shoal.Run(here / "run", step, data) as run:
        run.restore()
        second = (here / "fewer-0").exists()
        for batch in data.epochs(5):
            step(batch)
            run.tick(every=3)
            if world.size == MOST and step.number == 5 and not second:
                hold(world, "all")
            if world.size == MOST - 1 and step.number == 10:
                hold(world, "fewer")
        run.save()
"""

TALK = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist

here = Path(__file__).parent
dist.init_process_group("gloo", init_method="env://")
rank, size, one = dist.get_rank(), dist.get_world_size(), torch.ones(1)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.all_reduce(one)
assert one.item() == size

def talk(until=None):
    (here / f"talk-{attempt}-{size}-{rank}").write_text(str(os.getpid()))
    stop = torch.zeros(1)
    while not stop.item():
        stop.fill_(float(until is not None and until.exists()))
        dist.all_reduce(stop)

"""

UNTIL_STOP = f"""{TALK}
talk(here / "stop")
"""


class Nodes:
    """Launchers of one run; each is a node."""

    def __init__(self, folder: Path, start_command: Callable[..., Command]) -> None:
        self.folder = folder
        self.port = free_port()
        self.started: list[Command] = []
        self._start_command = start_command

    def start(
        self, script: str, *options: str, nodes: str = "2", processes: int = 1, name: str = "script.py"
    ) -> Command:
        (self.folder / name).write_text(textwrap.dedent(script))
        address = ["--rendezvous", f"127.0.0.1:{self.port}"]
        command = [sys.executable, "-m", "shoal", "run", "--nodes", nodes, *address]
        command += ["-n", str(processes), *options, name]
        self.started.append(self._start_command(command))
        return self.started[-1]

    def start_two(self, script: str, *options: str, nodes: str = "2") -> tuple[Command, Command]:
        return self.start(script, *options, nodes=nodes), self.start(script, *options, nodes=nodes)

    def ranks(self, pattern: str) -> dict[str, list[str]]:
        """What ranks wrote into files with such names, by name."""
        found = {path.name: path.read_text().split() for path in self.folder.glob(pattern)}
        return {name: words for name, words in found.items() if words}

    def wait_for(self, pattern: str, count: int) -> None:
        def there() -> bool:
            for each in self.started:
                if each.process.poll() not in (None, 0, -signal.SIGKILL, 128 + signal.SIGTERM):
                    raise AssertionError(each.end())
            return len(self.ranks(pattern)) >= count  # more, where one was missed for a while

        wait_for(there)

    def stop(self) -> list[Ended]:
        """Let ranks that wait for it come to their end, and all launchers."""
        (self.folder / "stop").touch()
        ended = [each.end() for each in self.started]
        assert {each.code for each in ended} == {0}, ended
        return ended

    def holder(self) -> tuple[Command, Command]:
        """Of two launchers, the one whose agent listens at the rendezvous, and the other."""
        for each, other in (self.started, self.started[::-1]):
            for pid in each.members():
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if connection.status == "LISTEN" and connection.laddr.port == self.port:
                        return each, other
        raise AssertionError("nobody listens")


@pytest.fixture
def nodes(tmp_path: Path, start_command: Callable[..., Command]) -> Nodes:
    return Nodes(tmp_path, start_command)


def alone(folder: Path) -> dict[int, float]:
    """The losses of one process that nobody disturbs, by step."""
    folder.mkdir()
    (folder / "script.py").write_text(f"MOST = 99\n{textwrap.dedent(TRAIN)}")
    subprocess.run([sys.executable, "script.py"], cwd=folder, check=True, capture_output=True)
    return losses(folder / "run")


def losses(directory: Path) -> dict[int, float]:
    taken = events.steps_by_rank(directory / "events")
    return {number: next(iter(ranks.values()))["loss"] for (_, number), ranks in taken.items()}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["None", "shoal.DiLoCo(sync_every=2)"])
def test_from_four_ranks_to_three_and_back(strategy: str, nodes: Nodes, tmp_path: Path) -> None:
    """A node is killed, another one comes: no sample is lost or repeated."""
    most = 4
    script = f"MOST = {most}\n{TRAIN}".replace("world, None)", f"world, {strategy})")

    def start(processes: int = 1) -> Command:
        # They don't look for a signal while they are held, so can't save.
        return nodes.start(script, "--grace", "1", nodes="2:3", processes=processes)

    two = start(2)
    wait_for(lambda: listening(nodes.port))
    one, gone = start(), start()
    nodes.wait_for("all-*", most)
    gone.process.kill()
    nodes.wait_for("fewer-*", most - 1)
    assert gone.members() == []
    new = start()
    ended = [each.end() for each in (two, one, new)]
    assert {each.code for each in ended} == {0}, ended
    for each in ended[:-1]:
        assert f"{HERE} (process {gone.process.pid}) left: restarting" in each.err
        assert f"{HERE} (process {new.process.pid}) joined: restarting" in each.err

    taken = events.steps_by_rank(nodes.folder / "run" / "events")
    sizes = [len(ranks) for _, ranks in sorted(taken.items())]
    assert sizes == [most] * 3 + [most - 1] * 6 + [most] * 11
    seen = coverage(nodes.folder / "run")
    assert (seen.exact, seen.end) == (True, 5 * 41)
    found = losses(tmp_path / "run")
    if strategy == "None":
        assert found == pytest.approx(alone(tmp_path / "alone"), rel=0, abs=1e-9)
    else:
        assert sorted(found) == list(range(1, 21))
        assert sum(found[n] for n in range(18, 21)) < sum(found[n] for n in range(1, 4))


STEADY = (
    TRAIN.split("        run.restore()", maxsplit=1)[0]
    + """
        run.restore()
        for batch in data.epochs(10**6):
            step(batch)
            stop = (here / "stop").exists() and world.size == 2
            (here / f"at-{world.size}-{world.rank}").write_text(str(step.number))
            time.sleep(0.05)  # so many events are enough
            run.tick()
            if any(world.gather(stop)):
                break
        run.save()
"""
)


@pytest.mark.long
def test_ranks_save_before_a_node_joins(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(STEADY, nodes="1:2")
    nodes.wait_for("at-1-*", 1)
    second = nodes.start(STEADY, nodes="1:2")
    nodes.wait_for("at-2-*", 2)
    ended = nodes.stop()
    assert f"(process {second.process.pid}) joined: restarting" in ended[0].err
    found = re.search(r"saved step ([\d,]+) in", ended[0].out + ended[0].err)
    assert found is not None, ended[0]
    (last,) = nodes.ranks("at-1-0")["at-1-0"]
    assert int(found[1].replace(",", "")) == int(last)
    assert "resumed at sample" in ended[0].out + ended[1].out
    assert coverage(tmp_path / "run").exact


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


FAIL = f"""{TALK}
times = len(list(here.glob("died-*")))
if times < 2:
    if rank != 1 - times:
        talk()
    dist.all_reduce(one)  # with the first of the others' talk: they have counted, and can be seen
    (here / f"died-{{rank}}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
talk(here / "stop")
"""


@pytest.mark.full
def test_a_killed_rank_restarts_all_nodes(nodes: Nodes) -> None:
    """One on each node, one after the other: each is told once, where it was."""
    nodes.start_two(FAIL, "--restarts", "2")
    # Of each attempt those who lived, and in the last one both.
    nodes.wait_for("talk-*-2-*", 4)
    for each in nodes.stop():
        assert each.err.count("where: rank ") == 1
        assert len(re.findall(r"^first failure: rank \d on .*: killed by SIGKILL", each.err, re.M)) == 1
        assert re.findall(r"restart (\d) of 2", each.err) == ["1", "2"]


@pytest.mark.full
def test_without_restarts_all_nodes_end_with_the_culprits_code(nodes: Nodes) -> None:
    both = nodes.start_two(f"{TALK}\nif rank == 1: sys.exit(7)\ntalk()")
    ended = [each.end() for each in both]
    assert [each.code for each in ended] == [7, 7]
    assert sum("first failure: rank 1 on" in each.err for each in ended) == 1
    assert [each.members() for each in both] == [[], []]


def refused(ended: Ended, found: str) -> None:
    assert ended.code == 2, ended
    assert found in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.full
def test_a_node_that_never_comes(nodes: Nodes) -> None:
    node = nodes.start("", "--wait", "2", nodes="2:4")
    assert node.process.stderr is not None
    assert "waits at 127.0.0.1:" in node.process.stderr.readline()
    refused(node.end(), f"after 2 s too few nodes have joined: {HERE} (process {node.process.pid})")
    assert node.members() == []


@pytest.mark.full
def test_nodes_that_run_something_else_are_refused(nodes: Nodes) -> None:
    nodes.start("print(1)")
    wait_for(lambda: listening(nodes.port))
    (nodes.folder / "elsewhere").mkdir()
    other = nodes.start("print(2)", name="elsewhere/../script.py")
    refused(other.end(), "content of the script")


@pytest.mark.long
def test_something_else_listens_there(nodes: Nodes) -> None:
    """It takes the connection and stays silent: torch's own time limit would not end that."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nodes.port = silent.getsockname()[1]
        ended = nodes.start("", "--wait", "3").end()
    refused(ended, f"here, port {nodes.port}: Address already in use")


@pytest.mark.long
def test_a_node_is_told_to_end_and_the_other_goes_on(nodes: Nodes) -> None:
    nodes.start_two(UNTIL_STOP, "--silence", "600", nodes="1:2")
    nodes.wait_for("talk-*-2-*", 2)
    _, go = nodes.holder()
    alone = len(nodes.ranks("talk-*-1-*"))  # one that was first, before the other came
    go.process.terminate()
    assert go.end().code == 143
    # Its silence is not waited for, which would take longer than this does: it has said that it goes.
    nodes.wait_for("talk-*-1-*", alone + 1)
    nodes.started.remove(go)
    (ended,) = nodes.stop()
    assert f"(process {go.process.pid}) left: restarting" in ended.err


@pytest.mark.full
@pytest.mark.parametrize("seconds", [3600, -3600])
def test_the_clocks_of_two_nodes_may_differ(
    seconds: int, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's rendezvous compares them, so that each node takes the other one for dead."""
    nodes.start(UNTIL_STOP)
    for name, value in WrongClock(nodes.folder, seconds).variables.items():
        monkeypatch.setenv(name, value)
    nodes.start(UNTIL_STOP)
    nodes.wait_for("talk-0-2-*", 2)
    assert not any("left" in each.err for each in nodes.stop())


SAVES = """
import signal, time
from pathlib import Path

import torch

import shoal

here, told = Path(__file__).parent, []
signal.signal(signal.SIGTERM, lambda *given: told.append(1))  # the Run's own calls it
with shoal.init(seed=0) as world:
    model = shoal.parallelize(torch.nn.Linear(3, 1), world)
    task = shoal.Task(lambda out, b: (out.square().sum(), len(out)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    data = shoal.Loader((torch.ones(8, 3),), world, batch_size=2)
    with shoal.Run(here / "run", step, data) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick()
            if run.step == 2:
                (here / f"waits-{world.rank}").write_text("here")
                while not told:
                    time.sleep(0.05)
                (here / f"told-{world.rank}").write_text("here")
                while not (here / "go").exists():
                    time.sleep(0.05)
"""


@pytest.mark.full
def test_nodes_that_get_a_signal_one_after_the_other_have_saved(nodes: Nodes) -> None:
    """As if a cluster took both: the second signal comes while the ranks save because of the first."""
    nodes.start_two(SAVES)
    nodes.wait_for("waits-*", 2)
    host, other = nodes.holder()
    host.process.send_signal(signal.SIGTERM)
    nodes.wait_for("told-*", 2)
    other.process.send_signal(signal.SIGTERM)
    other.process.send_signal(signal.SIGTERM)  # as schedulers repeat it
    (nodes.folder / "go").touch()
    assert [each.end().code for each in (host, other)] == [75, 75]
    assert (nodes.folder / "run/checkpoints/step-3").is_dir()


@pytest.mark.full
@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_without_the_node_that_holds_the_rendezvous_all_end(
    nodes: Nodes, signum: signal.Signals
) -> None:
    both = nodes.start_two(UNTIL_STOP, nodes="1:2")
    nodes.wait_for("talk-*-2-*", 2)
    host, other = nodes.holder()
    host.process.send_signal(signum)
    ended = other.end()
    if signum == signal.SIGKILL:
        refused(ended, "which hosts the rendezvous, can't be reached")
    else:
        assert host.end().code == 143
        assert ended.code == 143
        assert "received a signal to end and hosts the rendezvous: all nodes end" in ended.err
    wait_for(lambda: not [pid for each in both for pid in each.members()])


@pytest.mark.full
@pytest.mark.parametrize(
    ("host_ends", "found"),
    [
        (True, "which hosts the rendezvous, can't be reached"),
        pytest.param(False, "after 30 s too few nodes have joined", marks=pytest.mark.long),
    ],
)
def test_nodes_that_wait_for_a_fault_to_pass_know_when_the_others_end(
    nodes: Nodes, host_ends: bool, found: str
) -> None:
    """At once, and not after 300 s, if it is the host; others have the usual time to come back."""
    options = ["--restarts", "1" if host_ends else "10", "--silence", "2", "--wait", "30"]
    both = nodes.start_two("raise OSError(5, 'away')", *options)
    for each in both:
        assert each.process.stderr is not None
        assert any("EIO may pass (" in line for line in each.process.stderr)
    gone, stays = nodes.holder() if host_ends else nodes.holder()[::-1]
    gone.process.terminate()
    assert gone.end().code == 143
    refused(stays.end(), found)


AWAY = """
import torch, shoal

with shoal.init() as world:
    model = shoal.parallelize(torch.nn.Linear(4, 1), world)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)), inputs=lambda b: b)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    loader = shoal.Loader(torch.ones(32, 4), world, batch_size=8)
    with shoal.Run("run", step, loader, trackers=()) as run:
        for batch in loader.epochs(1):
            step(batch)
            run.tick(every=2)
            if world.rank == 0 and step.number == 3:
                raise OSError(5, "away")
"""


@pytest.mark.full
def test_a_signal_to_nodes_that_wait_for_a_fault_to_pass_asks_for_a_new_start(nodes: Nodes) -> None:
    """Also on the node whose ranks have not failed themselves."""
    both = nodes.start_two(AWAY, "--restarts", "1")
    for each in both:
        assert each.process.stderr is not None
        assert any("EIO may pass (" in line for line in each.process.stderr)
    for each in nodes.holder()[::-1]:
        each.process.send_signal(signal.SIGUSR1)
        assert each.end().code == 75


@pytest.mark.long
def test_a_node_that_stood_still_is_left_behind_and_comes_back(nodes: Nodes) -> None:
    """Its processes are stopped, as when a machine is cut off or suspended, and go on later."""
    nodes.start_two(UNTIL_STOP, "--silence", "8", nodes="1:2")
    nodes.wait_for("talk-*-2-*", 2)
    _, other = nodes.holder()
    stopped, alone = other.members(), len(nodes.ranks("talk-*-1-*"))  # one that was first, before
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    nodes.wait_for("talk-*-1-*", alone + 1)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    nodes.wait_for("talk-*-2-*", 4)  # both again, by a later attempt than the first one of two nodes
    nodes.stop()


@pytest.mark.full
def test_a_late_node_takes_part_or_hears_that_the_run_is_over(nodes: Nodes) -> None:
    """At most two: the third waits until the run ends, and ends with it."""
    for _ in range(3):
        nodes.start(UNTIL_STOP, nodes="1:2")
    nodes.wait_for("talk-*-2-*", 2)
    assert sum("joined too late" in each.err for each in nodes.stop()) <= 1

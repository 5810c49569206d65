"""Networks as they are found on clusters: what works unset, and what is refused, when and how."""

from __future__ import annotations

import ast
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cluster.network import Network
from helpers.cluster.slurm import Cluster, missing
from helpers.commands import GONE_WITHIN, wait_for
from helpers.job_variables import variables

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.timeout(400)]

# What no firewall of a job's nodes should keep out, and the ports in which ranks meet.
EPHEMERAL, MEETING = "32768-60999", "10001-20000"

LOOK = """
import os
import shoal, torch

with shoal.init() as world:
    total = world.all_reduce(torch.ones(()))
    (chosen,) = [choice for choice in world.decisions if choice.what == "interface"]
    said = (int(total), chosen.value, os.environ["GLOO_SOCKET_IFNAME"], chosen.reason)
    for one in world.gather(said):
        world.print(one)
assert os.environ.get("GLOO_SOCKET_IFNAME", "") == os.environ.get("GIVEN", "")
"""

TRAIN = """
import sys
from pathlib import Path
import torch, shoal

def loss(output, batch):
    return output.square().sum(), len(output)

with shoal.init(timeout=float(sys.argv[1])) as world:
    model = shoal.parallelize(torch.nn.Linear(3, 1), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    data = shoal.Loader((torch.ones(1000, 3),), world, batch_size=8)
    for batch in data.epochs(10**6):
        step(batch)
        if step.number == 5:
            Path(f"trained-{world.rank}").touch()
"""


@pytest.fixture(autouse=True)
def idle_again(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.name_hosts()
    cluster.run(["scancel", "--signal=KILL", "--user=root"])
    cluster.wait_idle()


def look(
    cluster: Cluster, folder: Path, **variables: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    """What rank 0 on node01 and rank 1 on node02 say, and how long it took."""
    (folder / "look.py").write_text(LOOK)
    command = ["srun", "-wnode01,node02", "-n2", "--kill-on-bad-exit=1", sys.executable, "look.py"]
    begun = time.monotonic()
    done = cluster.run(command, folder=folder, variables=variables)
    return done, time.monotonic() - begun


SOON = 300.0
"""Half of the time for which ranks would look for each other."""


@pytest.mark.parametrize(
    ("own", "version"), [("127.0.1.1", 4), pytest.param("127.0.1.1", 6, marks=pytest.mark.long)]
)
def test_nothing_is_set_where_a_hosts_own_name_is_its_loopback(
    own: str, version: int, cluster: Cluster, tmp_path: Path
) -> None:
    """Debian's habit; the names of all others are addresses of IP version 4 or 6."""
    cluster.name_hosts(own=own, version=version)
    done, _ = look(cluster, tmp_path)
    assert done.returncode == 0, done.stderr
    why = "all 2 ranks have reached node01 (rank 0) through it"
    assert done.stdout.splitlines() == [repr((2, "eth0", "eth0", why))] * 2
    assert done.stderr.count("; GLOO_SOCKET_IFNAME=eth0\n") == 1


def ranks_of_hosts(
    hosts: dict[str, str], ranks: str, command: list[str], folder: Path, *, mtu: int = 0
) -> list[str]:
    """What ranks of env:// say, by themselves on hosts of a network; the last one's MTU may be less."""
    address = next(iter(hosts.values())).partition("/")[0]
    known = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": address, "MASTER_PORT": "5000"}
    each = [{**known, "RANK": str(rank)} for rank in range(len(ranks))]
    return processes_of_hosts(hosts, ranks, command, folder, each, mtu=mtu)


def processes_of_hosts(
    hosts: dict[str, str],
    places: str,
    command: list[str],
    folder: Path,
    variables: list[dict[str, str]],
    *,
    mtu: int = 0,
) -> list[str]:
    """What processes on hosts of a network say, each with variables of its own."""
    if missing():
        pytest.skip(missing())
    network = Network(f"n{secrets.token_hex(3)}", {host: (one,) for host, one in hosts.items()})
    started: list[subprocess.Popen[str]] = []
    try:
        network.create()
        if mtu:
            network.shrink(places[-1], mtu)
        for host, env in zip(places, variables, strict=True):
            given = [f"{name}={value}" for name, value in {**env, "COLUMNS": "1000"}.items()]
            inside = ["ip", "netns", "exec", network.space(host), "env", *given]
            begin = [*inside, sys.executable, *command]
            started.append(subprocess.Popen(begin, cwd=folder, stdout=subprocess.PIPE, text=True))
        return [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
        network.remove()


@pytest.mark.parametrize("name", ["SkyPilot", "Kubeflow Trainer"])
def test_one_command_on_two_hosts_of_a_cloud(name: str, tmp_path: Path) -> None:
    place = "world.placement.node, world.placement.local_rank, world.placement.local_size"
    (tmp_path / "look.py").write_text(LOOK.replace("said = (", f"said = ({place}, "))
    env = [variables(name, index, tmp_path, first="10.79.0.1", here="") for index in (1, 0)]
    hosts = {"a": "10.79.0.1/24", "b": "10.79.0.2/24"}
    said = processes_of_hosts(hosts, "ba", ["-m", "shoal", "run", "look.py"], tmp_path, env)
    places = [ast.literal_eval(line)[:5] for line in said[1].splitlines()]
    assert places == [(node, local, 2, 4, "eth0") for node in (0, 1) for local in (0, 1)]
    assert said[0] == ""


def test_four_variables_on_hosts_that_have_no_address_but_of_version_6(tmp_path: Path) -> None:
    """What `env://` reads is enough: ranks tell each other which machines they are on."""
    place = "world.placement.node, world.placement.local_rank, world.placement.local_size"
    (tmp_path / "look.py").write_text(LOOK.replace("said = (", f"said = ({place}, "))
    hosts = {"a": "fd79::1/64", "b": "fd79::2/64"}
    said = ranks_of_hosts(hosts, "aba", ["look.py"], tmp_path)
    places = [ast.literal_eval(line)[:5] for line in said[0].splitlines()]
    assert places == [(0, 0, 2, 3, "eth0"), (1, 0, 1, 3, "eth0"), (0, 1, 2, 3, "eth0")]
    assert said[1:] == ["", ""]


def test_packets_of_full_size_that_are_lost_are_named(tmp_path: Path) -> None:
    """An MTU hole: ranks connect, and the first large message hangs. By the doctor, too."""
    hosts = {"a": "10.78.0.1/24", "b": "10.78.0.2/24"}
    doctor = ["-m", "shoal", "doctor", "--limit", "2", "--wait", "60"]
    said = ranks_of_hosts(hosts, "ab", doctor, tmp_path, mtu=1000)[0]
    assert "(rank 1) did not reach" in said
    assert "full-size packets are lost: a switch or a tunnel" in said


@pytest.mark.long
def test_an_interface_that_was_chosen_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    done, _ = look(cluster, tmp_path, GLOO_SOCKET_IFNAME="eth0", GIVEN="eth0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("given: GLOO_SOCKET_IFNAME=eth0") == 2
    assert "; GLOO_SOCKET_IFNAME" not in done.stderr


@pytest.mark.parametrize(
    ("interface", "ports", "said"),
    [
        pytest.param(
            *(
                "eth9",
                "",
                r"found: node01 has no interface eth9 .*; it has lo .*, eth0 \(10\.77\.0\.11",
            ),
            marks=pytest.mark.long,
        ),
        ("lo", "", r"found: lo: node02 \(rank 1\) did not reach node01 \(rank 0\) through it: 127\."),
        pytest.param(
            *("", EPHEMERAL, r"eth0: node02 \(rank 1\) did not reach node01 \(rank 0\) .*timed out"),
            marks=pytest.mark.long,
        ),
        ("", MEETING, r"found: node02 can't reach node01: no reply in \d+ s; .*timed out"),
    ],
)
def test_wrong_interfaces_and_ports_that_are_dropped_are_named(
    interface: str, ports: str, said: str, cluster: Cluster, tmp_path: Path
) -> None:
    if ports:
        cluster.network.drop("node01", ports, source="node02")
    try:
        done, seconds = look(cluster, tmp_path, GLOO_SOCKET_IFNAME=interface)
    finally:
        if ports:
            cluster.network.accept("node01", ports, source="node02")
    assert done.returncode != 0
    assert re.search(said, done.stderr), done.stderr
    assert "fix:" in done.stderr
    assert seconds < SOON


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """In the middle of it: ranks 0 and 1 on node01 and 2 on node02, which wait for 5 s at most."""
    (tmp_path / "train.py").write_text(TRAIN)
    script = [str(tmp_path / "train.py"), "5"]
    command = ["srun", "-wnode01,node02", "-n3", "-o", "log", sys.executable, *script]
    with cluster.start(command, folder=tmp_path) as process:
        wait_for(lambda: len(list(tmp_path.glob("trained-*"))) == 3)
        yield process
        process.kill()


def left(cluster: Cluster, folder: Path) -> list[str]:
    """The nodes on which processes of a script in a folder are left."""
    return [node for node in cluster.nodes for _ in cluster.running(node, f"{folder}/train.py")]


@pytest.mark.long
def test_a_cut_link_is_noticed_by_both_of_its_ends(
    cluster: Cluster, tmp_path: Path, training: subprocess.Popen[str]
) -> None:
    assert left(cluster, tmp_path) == ["node01", "node01", "node02"]
    begun = time.monotonic()
    cluster.network.cut("node02")
    wait_for(lambda: not left(cluster, tmp_path))
    seconds = time.monotonic() - begun
    cluster.network.mend("node02")
    assert training.poll() is None  # Slurm did not end it
    said = (tmp_path / "log").read_text()
    assert "found: node02 can't be reached from node01 (rank 2 of 3): a link is cut" in said
    # Rank 1 may wait in another collective of the same step.
    assert re.search(r"(ranks 0 and 1 have|rank 0 has) waited \d+ s in all_reduce", said)
    assert seconds > 5


def test_a_killed_rank_ends_all(
    cluster: Cluster, tmp_path: Path, training: subprocess.Popen[str]
) -> None:
    (doomed,) = cluster.running("node02", f"{tmp_path}/train.py")
    doomed.kill()
    said, _ = training.communicate(timeout=GONE_WITHIN)
    assert training.returncode != 0
    assert "node02: task 2: Killed" in said
    assert not left(cluster, tmp_path)

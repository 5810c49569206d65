"""`shoal doctor` on hosts whose cable is cut while it runs, or between which no rank can come."""

from __future__ import annotations

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
from helpers.commands import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.system,
    pytest.mark.realtime,
    pytest.mark.timeout(400),
]

OUTAGE = 4.0
"""Twice the shortest one that counts."""

# Its first check lasts until the test creates a file; each rank writes its outages to another.
HELD = """
import os, sys, time
from pathlib import Path
from shoal.tools.doctor.checks import host, links

look, begin = host.describe_memory, links.LinkProbes.__enter__
def held():
    Path("here-" + os.environ["RANK"]).touch()
    while not Path("go").exists():
        time.sleep(0.01)
    return look()

def seen(links):
    import threading
    def tell():
        while True:
            file = Path("outages-" + os.environ["RANK"])
            file.with_suffix(".new").write_text(repr(links.look()))
            file.with_suffix(".new").replace(file)  # a reader never sees half of it
            time.sleep(0.05)
    found = begin(links)
    threading.Thread(target=tell, daemon=True).start()
    return found

host.describe_memory, links.LinkProbes.__enter__ = held, seen
sys.argv = ["shoal", "doctor", "--quick", "--limit", sys.argv[1]]
from shoal.cli.main import main
main()
"""


@pytest.fixture
def network() -> Iterator[Network]:
    if missing():
        pytest.skip(missing())
    hosts = {"a": ("10.79.0.1/24",), "b": ("10.79.0.2/24",)}
    found = Network(f"n{secrets.token_hex(3)}", hosts)
    try:
        found.create()
        yield found
    finally:
        found.remove()


@pytest.fixture
def ranks(
    network: Network, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[list[subprocess.Popen[str]]]:
    """The doctor on both hosts, in the middle of a check that takes at most `request.param` seconds."""
    started = []
    try:
        for rank, host in enumerate(network.hosts):
            known = ["WORLD_SIZE=2", "MASTER_ADDR=10.79.0.1", "MASTER_PORT=5000", f"RANK={rank}"]
            command = ["ip", "netns", "exec", network.space(host), "unshare", "--uts", "sh", "-c"]
            command += ['hostname "$0" && exec "$@"', host, "env", "COLUMNS=1000", *known]
            command += [sys.executable, "-c", HELD, str(request.param)]
            started.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
        wait_for(lambda: len(list(tmp_path.glob("here-*"))) == 2)
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def findings(said: str) -> dict[str, str]:
    """The state and the text of each line that is not ok, by what was looked at."""
    return {found[1]: found[2] for found in re.finditer(r"^FAILURE +(\w+) +(.*)$", said, re.MULTILINE)}


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_dead_link_is_named_and_not_the_rank_behind_it(
    network: Network, ranks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    network.cut("b")
    (tmp_path / "go").touch()
    found = findings(ranks[0].communicate(timeout=200)[0])
    assert "ranks" not in found
    assert re.match(
        r"a can't reach b: \d+ calls to 10\.79\.0\.2, port \d+, by eth0 had no reply for "
        r"\d+ s \(the last answer came at \d\d:\d\d:\d\d; .*\), and it is still down",
        found["connection"],
    ), found


@pytest.mark.parametrize("ranks", [60], indirect=True)
def test_a_link_that_was_dead_for_a_while_is_reported(
    network: Network, ranks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    begun = time.monotonic()
    network.cut("b")
    wait_for(lambda: time.monotonic() - begun > OUTAGE)
    network.mend("b")
    wait_for(lambda: "'over': True" in (tmp_path / "outages-0").read_text())
    # b counts the outage too if one of its calls lasted long enough: its next call ends it.
    wait_for(lambda: "'over': False" not in (tmp_path / "outages-1").read_text())
    (tmp_path / "go").touch()
    said = ranks[0].communicate(timeout=200)[0]
    found = findings(said)
    assert re.match(r"[ab] could not reach [ab]: \d+ calls to 10\.79\.", found["connection"]), said
    seconds = re.search(r"no reply for (\d+) s", found["connection"])
    assert seconds is not None
    assert int(seconds[1]) >= OUTAGE
    assert found["connection"].rstrip().endswith("; then it came back")
    assert "ranks" not in found


@pytest.mark.long
def test_a_machine_that_does_not_answer_is_named_where_ranks_do_not_meet(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Slurm says which machines there are; its own messages still arrive."""
    network, between = cluster.network, (("node01", "node02"), ("node02", "node01"))
    command = ["srun", "-wnode01,node02", "-n2", sys.executable, "-m", "shoal", "doctor"]
    for one, other in between:
        network.drop(one, "1-65534", source=other)
    try:
        done = cluster.run(
            [*command, "--quick", "--limit", "1", "--wait", "20"],
            folder=tmp_path,
            variables={"COLUMNS": "1000"},
        )
    finally:
        for one, other in between:
            network.accept(one, "1-65534", source=other)
        cluster.run(["scancel", "--signal=KILL", "--user=root"])
        cluster.wait_idle()
    found = findings(done.stdout)
    assert re.search(
        r"node02 does not answer node01: \d+ calls to node02, port \d+, by eth0 had no reply "
        r"for \d+ s \(none came since \d\d:\d\d:\d\d; timed out\); missing: rank 1",
        found["ranks"],
    ), (done.stdout, done.stderr)

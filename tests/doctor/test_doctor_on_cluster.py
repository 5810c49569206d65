"""`srun shoal doctor` on nodes of a cluster: one narrow link is named; and disks that are full."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster, missing
from shoal.doctor.checks import filesystem
from shoal.doctor.findings import RankFacts, Severity

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.system,
    pytest.mark.realtime,
    pytest.mark.timeout(400),
]


@pytest.fixture(autouse=True)
def idle_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("cluster")
        cluster.run(["scancel", "--signal=KILL", "--user=root"])
        cluster.wait_idle()


def test_a_narrow_link_between_two_of_three_nodes_is_named(cluster: Cluster, tmp_path: Path) -> None:
    # All links have a limit, so that tests that run at the same time hardly change their rates.
    network, nodes = cluster.network, ("node01", "node02", "node03")
    between = tuple(permutations(nodes, 2))
    for one, other in between:
        network.narrow(one, other, "400mbit" if "node02" in (one, other) else "40mbit")
    command = ["srun", "-N3", "-wnode01,node02,node03", sys.executable, "-m", "shoal", "doctor"]
    try:
        done = cluster.run(
            [*command, "--run", str(tmp_path / "run"), "--strict"],
            folder=tmp_path,
            variables={"COLUMNS": "300"},
        )
    finally:
        for one, other in between:
            network.narrow(one, other, None)
    assert done.returncode == 1, done.stderr
    links = [line for line in done.stdout.splitlines() if line.startswith("FAILURE   links")]
    assert [line.partition("(")[2].partition(")")[0] for line in links] == [
        "node01 and node03",
        "node03 and node01",
    ]
    assert "all ranks saw what rank 0 wrote" in done.stdout
    assert "of rank 0's on every host" in done.stdout


def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    if missing():
        pytest.skip(missing())
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        (tmp_path / "full").write_bytes(bytes(2**20 - 4096))
        full = [one.state for one in filesystem.check_directories([seen(tmp_path)])]
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        (read_only,) = filesystem.check_directories([seen(tmp_path)])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert Severity.FAILURE in full
    assert read_only.state is Severity.FAILURE
    assert read_only.found.endswith("(tmpfs) can't be written: Read-only file system")


def seen(folder: Path) -> RankFacts[filesystem.Directory]:
    return RankFacts(rank=0, host="a", facts=filesystem.try_directory(folder))

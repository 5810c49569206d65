"""`shoal run SCRIPT` in jobs whose environment names their nodes."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.commands import Command
from helpers.job_variables import ON_EACH, variables
from helpers.ranks import free_port
from shoal.distributed.cluster_env.job_environments import JobNodes
from shoal.launcher import nodes as module
from shoal.launcher.nodes import choose_nodes, choose_numbers, choose_processes, listen, way_to
from shoal.util import accelerator
from shoal.util.errors import LaunchError

JOB = JobNodes(
    name="SkyPilot", nodes="2", index=1, host="first", port=29400, processes=8, reason="SkyPilot: …"
)
TRAIN = """
import os
import shoal

with shoal.init(device="cpu") as world:
    total = world.all_reduce(__import__("torch").ones(()))
    place = world.placement
    print("rank", world.rank, "of", int(total), "on", place.node, "attempt", place.attempt, flush=True)
"""


def test_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_numbers(None, JOB) == "2"
    assert choose_numbers("1:2", JOB) == "1:2"
    assert choose_numbers("3", None) == "3"
    assert choose_processes(JOB) == 8
    monkeypatch.setattr(accelerator, "count", lambda: 4)
    assert choose_processes(replace(JOB, processes=0)) == 4
    monkeypatch.setattr(accelerator, "count", lambda: 0)
    assert choose_processes(replace(JOB, processes=0)) == 1
    chosen = choose_nodes("2", "other:500", None, {}, there=JOB)
    assert chosen is not None
    assert (chosen.host, chosen.port, chosen.index) == ("other", 500, 1)
    for given, found in (("4", "would wait for more"), ("1", "some would train apart")):
        with pytest.raises(LaunchError, match=found):
            choose_numbers(given, JOB)


def test_a_name_that_comes_late_or_is_unknown_for_a_moment_is_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = iter([False, False, True, False, True])
    resolve = socket.getaddrinfo

    def late(host: str, *args: object, **options: object) -> object:
        if host == "pod-0.job" and not next(known):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    chosen = choose_nodes("2", None, None, {}, there=replace(JOB, host="pod-0.job"))
    assert chosen is not None
    server = listen(chosen.host, 0, unknown=chosen.unknown)
    assert not isinstance(server, str)
    server.close()
    assert way_to(chosen) == "127.0.0.1"
    assert capsys.readouterr().err.count("waiting up to 600 s until the name pod-0.job") == 2
    known = iter([False] * 10**6)
    with pytest.raises(LaunchError, match="can't be resolved"):
        way_to(replace(chosen, unknown=1.0))


def test_a_name_that_cannot_exist_is_not_awaited() -> None:
    with pytest.raises(LaunchError, match=r"can't be resolved .*label empty"):
        listen("pod..job", 500, unknown=600.0)


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("SkyPilot", "AWS Batch") else pytest.mark.full)
        for name in ON_EACH
    ],
)
def test_one_command_on_each_node(
    name: str, tmp_path: Path, start_command: Callable[..., Command]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    # An address of its own for each environment, whose ports are the same.
    first = f"127.8.0.{1 + list(ON_EACH).index(name)}"
    if name == "AWS Batch":
        first = socket.gethostbyname(socket.gethostname())
    started = {}
    for index in (1, 0):  # the order does not matter
        here = (first, "127.9.9.9")[index]
        env = variables(name, index, tmp_path, first=first, here=here)
        given = [f"{key}={value}" for key, value in env.items()]
        command = [sys.executable, "-m", "shoal", "run", "train.py"]
        started[index] = start_command(["env", *given, *command])
    processes = 2 if any("PROC_PER" in key or "GPUS" in key for key in ON_EACH[name]) else 1
    attempt = 2 if name == "AWS Batch" else 0
    for index, launcher in started.items():
        ended = launcher.end()
        assert ended.code == 0, ended
        ranks = range(index * processes, (index + 1) * processes)
        expected = [f"rank {rank} of {2 * processes} on {index} attempt {attempt}" for rank in ranks]
        assert sorted(ended.out.splitlines()) == expected
        assert f"shoal run: {name}: " in ended.err


@pytest.mark.processes
def test_a_job_of_one_node_says_nothing_about_other_nodes(
    tmp_path: Path, start_command: Callable[..., Command]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    rendezvous = f"127.8.1.1:{free_port()}"
    command = [sys.executable, "-m", "shoal", "run", "--nodes", "2", "--rendezvous", rendezvous]
    command = ["env", "SKYPILOT_NUM_NODES=1", *command, "-n", "1", "train.py"]
    for ended in [each.end() for each in (start_command(command), start_command(command))]:
        assert ended.code == 0, ended
        assert " of 2 on " in ended.out

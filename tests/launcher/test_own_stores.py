"""Scripts under `shoal run` that form process groups in their own way."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from helpers.commands import Command
from helpers.ranks import free_port

pytestmark = pytest.mark.processes

Start = Callable[..., Command]

SPAWN = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    dist.init_process_group("gloo", rank=rank, world_size=size)
    one = torch.ones(1)
    dist.all_reduce(one)
    print("rank", rank, "of", int(one), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, args=(2, sys.argv[1]), nprocs=2)
"""

SETUP = """
import os, sys
import torch, torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if sys.argv[1] == "env":
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[2]
    dist.init_process_group("gloo", rank=rank, world_size=size)
else:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=size)
one = torch.ones(1)
dist.all_reduce(one)
print("rank", rank, "of", int(one), flush=True)
dist.destroy_process_group()
"""

# A script that runs another in a process of its own, which takes over its rank.
WRAPPER = """
import subprocess, sys
code = '''
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print("rank", dist.get_rank(), "of", int(one), flush=True)
dist.destroy_process_group()
'''
sys.exit(subprocess.run([sys.executable, "-c", code]).returncode)
"""


@pytest.mark.parametrize(
    ("script", "processes", "arguments"),
    [
        pytest.param(SPAWN, 1, ["PORT"], id="mp.spawn"),
        pytest.param(SETUP, 2, ["env", "PORT"], id="own MASTER_PORT"),
        pytest.param(SETUP, 2, ["tcp", "PORT"], id="own init_method"),
        pytest.param(WRAPPER, 2, [], id="subprocess"),
    ],
)
def test_two_ranks_meet(script: str, processes: int, arguments: list[str], start_run: Start) -> None:
    port = str(free_port())
    given = [port if each == "PORT" else each for each in arguments]
    ended = start_run(script, "-n", str(processes), "script.py", *given).end()
    assert ended.code == 0, ended
    assert sorted(ended.out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_port_is_one_of_the_range(
    processes: int, start_run: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_PORTS", "15001-15400")
    script = 'import os; print(os.environ["MASTER_PORT"], flush=True)'
    ended = start_run(script, "-n", str(processes), "script.py").end()
    assert ended.code == 0, ended
    (port,) = set(ended.out.split())
    assert 15001 <= int(port) <= 15400


@pytest.mark.parametrize("free", [0, 1])
def test_every_port_of_the_range_is_tried(
    free: int, start_run: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, count = 15500 + 100 * free, 30  # another range for each of the two, which may run at once
    monkeypatch.setenv("SHOAL_PORTS", f"{first}-{first + count - 1}")
    with ExitStack() as busy:
        for port in range(first, first + count - free):
            busy.enter_context(socket.create_server(("127.0.0.1", port)))
        ended = start_run("pass", "-n", "1", "script.py").end()
    if free:
        assert ended.code == 0, ended
    else:
        assert ended.code == 2
        assert f"none of {count} ports is free; the last one tried is port " in ended.err
        assert "export SHOAL_PORTS=" in ended.err
        assert "Traceback" not in ended.err
        assert "agent" not in ended.err

"""Ranks that are started with the variables of `env://` alone, on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.ranks import free_port

pytestmark = pytest.mark.processes

SCRIPT = """
import torch, shoal

with shoal.init() as world:
    place = world.placement
    assert world.all_reduce(torch.ones(())).item() == world.size
    said = (world.rank, place.local_rank, place.local_size, place.node, place.nodes, place.launcher)
    for one in world.gather(said):
        world.print(one)
"""


@contextmanager
def started(folder: Path, *ranks: Mapping[str, object]) -> Iterator[list[subprocess.Popen[str]]]:
    (folder / "script.py").write_text(SCRIPT)
    port, size = str(free_port()), str(len(ranks))
    known = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=folder,
            env={**os.environ, **known, **{name: str(value) for name, value in own.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in ranks
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.full
def test_four_variables_make_a_world(tmp_path: Path) -> None:
    with started(tmp_path, {"RANK": 0}, {"RANK": 1}) as (first, second):
        said, errors = first.communicate(timeout=200)
        assert second.wait(timeout=200) == 0
    assert said.splitlines() == ["(0, 0, 2, 0, 1, 'env://')", "(1, 1, 2, 0, 1, 'env://')"], errors


@pytest.mark.full
def test_local_ranks_that_are_the_same_raise_on_all_ranks(tmp_path: Path) -> None:
    own = [{"RANK": rank, "LOCAL_RANK": 0} for rank in range(2)]
    with started(tmp_path, *own) as processes:
        for process in processes:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 1
            assert "found: ranks 0, 1 are on the same machine, and their local ranks are 0, 0" in errors
            assert "fix:   unset LOCAL_RANK" in errors

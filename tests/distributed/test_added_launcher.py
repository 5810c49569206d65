"""`shoal.add_launcher`: a made-up launcher starts ranks that train; its variables are checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.ranks import free_port
from helpers.scripts import AGREEING, Script, trained, trained_alone
from shoal.distributed.cluster_env import ADDED
from shoal.distributed.env_vars import launcher_variables, placement
from shoal.distributed.placement import Placement
from shoal.util.errors import LaunchError

ACME = """
import os, subprocess, sys

size, port, *command = sys.argv[1:]
ranks = []
for rank in range(int(size)):
    variables = {"ACME_INDEX": str(rank), "ACME_TASKS": size, "ACME_PORT": port}
    variables |= {"ACME_HOSTS": "127.0.0.1,127.0.0.1", "ACME_SLOT": str(rank)}
    ranks.append(subprocess.Popen(command, env={**os.environ, **variables}))
sys.exit(max(rank.wait() for rank in ranks))
"""

ADD = """
import shoal

shoal.add_launcher(
    "acme",
    rank="ACME_INDEX",
    size="ACME_TASKS",
    address=lambda env: env["ACME_HOSTS"].split(",")[0],
    port="ACME_PORT",
    LOCAL
)
"""

SHOWN = """
        (chosen,) = [choice for choice in world.decisions if choice.what == "launcher"]
        world.print(chosen.value, chosen.reason, world.placement.local_rank, world.placement.local_size)
"""


@pytest.fixture(autouse=True)
def no_launchers() -> Iterator[None]:
    before = list(ADDED)
    ADDED.clear()
    yield
    ADDED[:] = before


@pytest.mark.processes
@pytest.mark.parametrize("local", ["", pytest.param("local_rank='ACME_SLOT'", marks=pytest.mark.long)])
def test_ranks_of_a_launcher_that_was_made_up_train(
    local: str, start: Callable[..., Script], tmp_path: Path
) -> None:
    script = ADD.replace("LOCAL", local) + AGREEING.replace(
        "        inputs =", f"{SHOWN}        inputs ="
    )
    ranks = [sys.executable, "-c", ACME, "2", str(free_port()), sys.executable]
    ended = start(script, ranks, "2", "0", "run").end()
    assert ended.code == 0, ended.err
    assert trained(ended.out) == [trained_alone(tmp_path)]
    assert "acme ACME_INDEX=0; checked after torchrun and shoal run, which it may start" in ended.out
    assert ", and before all others 0 2\n" in ended.out
    assert "shoal: world size 2 on 1 node, launched by acme; " in ended.err


def add(**changes: Any) -> None:
    shoal.add_launcher(
        **{
            "name": "acme",
            "rank": "ACME_INDEX",
            "size": "ACME_TASKS",
            "address": "ACME_HOST",
            "port": lambda env: 10001 + int(env["ACME_JOB"]) % 10000,
            "local_rank": "ACME_SLOT",
            **changes,
        }
    )


ENV = {"ACME_INDEX": "1", "ACME_TASKS": "4", "ACME_HOST": "n1", "ACME_JOB": "7", "ACME_SLOT": "1"}


def read(env: Mapping[str, str]) -> Placement:
    return placement({"HOME": "/nowhere", **env}, cpus=8, commands=list)


def test_what_is_read_and_why() -> None:
    add(rank="REPLACED")
    add()
    found = read({**ENV, "OMPI_COMM_WORLD_RANK": "3"})
    assert (found.rank, found.size, found.local_rank, found.launcher) == (1, 4, 1, "acme")
    assert (found.address, found.port) == ("n1", 10008)
    assert found.unsettled == ("local_size", "node", "nodes")
    reasons = {choice.what: choice.reason for choice in found.choices}
    assert (reasons["address"], reasons["port"]) == ("acme: ACME_HOST=n1", "acme: port=10008")
    (launcher,) = [choice for choice in found.choices if choice.what == "launcher"]
    assert launcher.rejected["Open MPI, PRRTE"].endswith("is set too, but acme is checked earlier")
    assert launcher.rejected["torchrun, shoal run"].endswith("not set")
    assert list(launcher_variables())[:2] == ["torchrun, shoal run", "acme"]
    assert read({}).launcher == "none"
    alone = read({**ENV, "ACME_INDEX": "0", "ACME_TASKS": "1", "ACME_SLOT": "0"})
    assert (alone.size, alone.unsettled) == (1, ())
    own = read({**ENV, "MASTER_ADDR": "ib0", "MASTER_PORT": "4000"})
    assert (own.address, own.port) == ("ib0", 4000)
    assert "MASTER_ADDR=ib0, MASTER_PORT=4000" in own.reason


def test_its_agents_may_be_torchruns() -> None:
    add()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    worker = dict(zip(names, ("5", "1", "8", "2", "n1", "29500"), strict=True))
    assert read({**ENV, **worker, "TORCHELASTIC_RUN_ID": "x"}).rank == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ACME_TASKS": ""}, "ACME_TASKS not set"),
        ({"ACME_JOB": "x"}, "the function raised ValueError"),
        ({"ACME_INDEX": "one"}, "ACME_INDEX=one\nfound: rank is not an integer from 0"),
        ({"ACME_TASKS": "0"}, "ACME_TASKS=0\nfound: size is not an integer from 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000\nfound: port is not an integer from 1 to 65535"),
        ({"ACME_INDEX": "4"}, "found: rank 4 does not fit world size 4"),
        ({"ACME_SLOT": "4"}, "found: local size less one 4 does not fit world size 4"),
        ({"RANK": "2"}, "which contradicts RANK"),
        ({"LOCAL_RANK": "0"}, "which contradicts LOCAL_RANK"),
        ({"ACME_INDEX": "0", "ACME_TASKS": "1", "PMI_SIZE": "2"}, "each would be a separate world"),
    ],
)
def test_variables_that_are_missing_or_contradict(changes: dict[str, str], said: str) -> None:
    add()
    with pytest.raises(LaunchError) as error:
        read({**ENV, **changes})
    assert said in str(error.value)


def test_ranks_that_it_does_not_number_on_a_node_may_be_numbered_by_hand() -> None:
    add(local_rank="")
    assert read({**ENV, "LOCAL_RANK": "1"}).unsettled[0] == "local_rank"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "srun"}, "a launcher that Shoal knows"),
        ({"name": "Hydra"}, "a launcher that Shoal knows"),
        ({"name": "none"}, "a launcher that Shoal knows"),
        ({"name": ""}, "not a name"),
        ({"rank": len}, "rank is not the name of a variable\n"),
        ({"size": 4}, "size is not the name of a variable or a function"),
        ({"port": ""}, 'pass port="ACME_PORT"'),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError) as error:
        add(**changes)
    assert said in str(error.value)
    assert ADDED == []

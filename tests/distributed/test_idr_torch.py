"""Variables that scripts with `idr_torch` expect: after `shoal.init`, and together with that module."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import shoal
from helpers import mpirun
from helpers.cluster.slurm import Cluster
from helpers.ranks import free_port
from helpers.scripts import Script

NAMES = ("MASTER_ADDR", "MASTER_PORT", "SLURM_CPUS_PER_TASK")

NESTED = """
import os, subprocess, sys
import torch, torch.distributed as dist, shoal
from torch.distributed import rpc

GROUP = "import torch.distributed as dist; dist.init_process_group('gloo'); "
GROUP += "print('child', dist.get_rank(), dist.get_world_size(), flush=True)"
names = ("MASTER_ADDR", "MASTER_PORT", "SLURM_CPUS_PER_TASK")

def variables():
    return [os.environ.get(name) for name in names]

def own(port):
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    return {name: str(value) for name, value in values.items()}

before = variables()
with shoal.init() as world:
    rank = world.rank
    world.agree(variables(), "the variables")
    world.print("inside", variables())
    # For a rendezvous of the script's own, as with idr_torch.
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
    assert rpc.rpc_sync("rank1", max, args=(2, 3)) == 3
    rpc.shutdown()
    child = subprocess.run([sys.executable, "-c", GROUP], env={**os.environ, **own(sys.argv[1])})
    assert child.returncode == 0
assert variables() == before
os.environ.update(own(sys.argv[2]))
dist.init_process_group("gloo", init_method="env://")
assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
dist.barrier()
dist.destroy_process_group()
with shoal.init() as world:
    world.print("again", variables())
assert variables() == ["127.0.0.1", sys.argv[2], None]
"""


@pytest.mark.processes
@pytest.mark.system
@pytest.mark.parametrize(
    "program", [mpirun.PROGRAMS[0], pytest.param(mpirun.PROGRAMS[1], marks=pytest.mark.long)]
)
def test_nested_and_later_groups_have_their_own(
    program: str, tmp_path: Path, start: Callable[..., Script]
) -> None:
    ports = [str(free_port()) for _ in range(2)]
    ended = start(NESTED, mpirun.command(program, 2, tmp_path), *ports).end()
    assert ended.code == 0, ended.err
    *children, last = (line for line in ended.out.splitlines() if not line.startswith("inside"))
    assert sorted(children) == ["child 0 2", "child 1 2"]
    assert last == f"again ['127.0.0.1', '{ports[1]}', None]"
    (inside,) = (line for line in ended.out.splitlines() if line.startswith("inside"))
    address, port, cores = json.loads(
        inside.removeprefix("inside ").replace("'", '"').replace("None", "null")
    )
    assert (address, cores) == ("127.0.0.1", None)
    assert 10001 <= int(port) <= 20000


def test_a_world_of_one_sets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with shoal.init(device="cpu"):
        assert not any(name in os.environ for name in NAMES)


BESIDE = """
import os, sys
import torch, shoal

NAMES = ("MASTER_ADDR", "MASTER_PORT", "SLURM_CPUS_PER_TASK")
if "before" in sys.argv:
    import idr_torch
    assert idr_torch.size == 4  # it sets its variables when it is used
given = {name: os.environ[name] for name in NAMES if name in os.environ}
with shoal.init() as world:
    inside = {name: os.environ[name] for name in NAMES}
    world.agree([inside[name] for name in NAMES[:2]], "MASTER_ADDR and MASTER_PORT")
    assert given.items() <= inside.items()
    assert int(inside["SLURM_CPUS_PER_TASK"]) == world.placement.cores
    import idr_torch
    place = world.placement
    assert place.launcher == "srun", place
    assert (idr_torch.rank, idr_torch.size) == (world.rank, world.size)
    assert (idr_torch.local_rank, idr_torch.cpus_per_task) == (place.local_rank, place.cores)
    assert world.all_reduce(torch.ones(1)).item() == world.size == 4
    world.print("trained", place.nodes, "nodes")
left = {"MASTER_ADDR", "MASTER_PORT"} | given.keys()  # those of idr_torch stay
assert {name for name in NAMES if name in os.environ} == left, os.environ
"""


@pytest.mark.cluster
@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("step", "when", "variables"),
    [
        ("-N2 --ntasks-per-node=2", "after", {}),
        ("-N2 --ntasks-per-node=2 -m cyclic", "before", {}),
        ("-N2 --ntasks-per-node=2 -c1", "after", {"MASTER_PORT": "12399"}),
    ],
)
def test_both_in_one_script(
    step: str, when: str, variables: dict[str, str], cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(BESIDE)
    command = ["srun", *step.split(), sys.executable, "script.py", when]
    done = cluster.run(command, folder=tmp_path, variables=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained 2 nodes\n"

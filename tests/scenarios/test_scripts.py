"""Rows of the sources that are ways to start: plain scripts beside converted ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import practice_models as p
from helpers.ranks import free_port

pytestmark = pytest.mark.full

TWO = [sys.executable, "-m", "shoal", "run", "-n", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]

# Plain scripts end at once: a thread of Gloo's that DDP keeps may ask for the interpreter while Python
# ends, and abort the process. `World.close` and `shoal run` see to that for the converted ones.
SPAWNED = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from helpers import practice_models as p

def run(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    state = p.plain_ddp()
    if rank == 0:
        torch.save(state, "model.pt")
    dist.destroy_process_group()
    os._exit(0)

if __name__ == "__main__":
    mp.spawn(run, args=(2, sys.argv[1]), nprocs=2, join=True)
"""

FROM_ENVIRONMENT = """
import json, os, pathlib
import torch, torch.distributed as dist
from helpers import practice_models as p

dist.init_process_group("gloo", init_method="env://")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total, op=dist.ReduceOp.SUM)
facts = [rank, int(os.environ["LOCAL_RANK"]), size, dist.get_backend(), total.item()]
pathlib.Path(f"facts{rank}.json").write_text(json.dumps(facts))
state = p.plain_ddp()
if rank == 0:
    torch.save(state, "model.pt")
dist.destroy_process_group()
os._exit(0)
"""

CONVERTED = """
import json, pathlib
import torch, torch.distributed as dist, shoal
from helpers import practice_models as p

with shoal.init() as world:
    total = world.all_reduce(torch.tensor([world.rank + 1.0]))
    place = world.placement
    facts = [world.rank, place.local_rank, world.size, dist.get_backend(), total.item()]
    pathlib.Path(f"facts{world.rank}.json").write_text(json.dumps(facts))
    state = p.converted(world)[0]
    if world.is_rank_zero:
        torch.save(state, "model.pt")
"""


def started(folder: Path, text: str, command: list[str], *arguments: str) -> Path:
    """Where the script was run, in the environment of the tests."""
    folder.mkdir()
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [*command, "script.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def model(folder: Path) -> p.State:
    loaded: p.State = torch.load(folder / "model.pt", weights_only=True)
    return loaded


def facts(folder: Path) -> list[list[object]]:
    return [json.loads((folder / f"facts{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted script, run by `shoal run -n 2`."""
    return started(tmp_path_factory.mktemp("converted") / "two", CONVERTED, TWO)


def test_row_03_spawn_on_one_machine(converted: Path, tmp_path: Path) -> None:
    plain = started(tmp_path / "plain", SPAWNED, [sys.executable], str(free_port()))
    p.assert_same(model(converted), model(plain))


@pytest.mark.parametrize("command", [TWO, TORCHRUN], ids=["shoal run", "torchrun"])
def test_row_05_and_24_plain_scripts_beside_converted_ones(
    converted: Path, command: list[str], tmp_path: Path
) -> None:
    """The same place, backend and sum (5) and the same model (24), under either launcher."""
    plain = started(tmp_path / "plain", FROM_ENVIRONMENT, command)
    assert facts(plain) == facts(converted)
    assert facts(plain) == [[rank, rank, 2, "gloo", 3.0] for rank in range(2)]
    p.assert_same(model(converted), model(plain))

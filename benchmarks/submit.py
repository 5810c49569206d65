"""Time from sbatch to the first optimizer step on real Slurm: Shoal and hand-written torch.

python benchmarks/submit.py [--nodes 2] [--per-node 2] [--rounds 10]

Starts a Slurm cluster on this machine, which needs root, slurm-wlm, munge and iproute2. Both jobs are
submitted with sbatch and run one srun: the batch script of `shoal submit`, and a plain one with
`srun python`. Rounds alternate between them; the difference is taken within rounds.

Aim: at most 0.3 s longer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from spread import quartiles

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.cluster.slurm import Cluster, missing

COMMON = """
import time, torch
from pathlib import Path
from torch import nn

def loss_of(output, target):
    return (output - target).square().sum()

def note(rank):
    if rank == 0:
        Path("stepped").write_text(str(time.time()))

inputs = torch.randn(64, 5)
net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
"""

SHOAL = f"""{COMMON}
import shoal

with shoal.init() as world:
    model = shoal.parallelize(net, world)
    optimizer = torch.optim.AdamW(model.parameters())
    task = shoal.Task(lambda output, batch: (loss_of(output, batch[1]), len(output)))
    step = shoal.Step(model, optimizer, task)
    data = shoal.Loader((inputs, inputs.sum(1, keepdim=True)), world, batch_size=16)
    step(next(data.epochs(1)))
    note(world.rank)
"""

BY_HAND = f"""{COMMON}
import os, subprocess, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=size)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data, size, rank)
batch, target = next(iter(DataLoader(data, batch_size=16 // size, sampler=sampler)))
(loss_of(model(batch), target) / len(batch)).backward()
optimizer.step()
note(rank)
dist.destroy_process_group()
"""

PLAIN = """#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --time=5:00
#SBATCH --output=log.txt
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun {python} train.py
"""


def prepare(cluster: Cluster, folder: Path, nodes: int, per_node: int) -> dict[str, Path]:
    """Create a directory for each contender, with its script and its batch script."""
    found = {}
    for name, script in (("Shoal", SHOAL), ("hand-written", BY_HAND)):
        place = folder / name
        place.mkdir()
        (place / "train.py").write_text(script)
        found[name] = place
    shape = ["--nodes", str(nodes), "-n", str(nodes * per_node), "--time", "10:00"]
    command = [sys.executable, "-m", "shoal", "submit", *shape, "-o", "job.sh", "train.py"]
    done = cluster.run(command, folder=found["Shoal"])
    if done.returncode:
        raise RuntimeError(done.stderr)
    text = PLAIN.format(nodes=nodes, per_node=per_node, python=sys.executable)
    (found["hand-written"] / "job.sh").write_text(text)
    return found


def measure(cluster: Cluster, place: Path) -> float:
    """Return the seconds from sbatch to the end of the first step."""
    stepped = place / "stepped"
    stepped.unlink(missing_ok=True)
    cluster.wait_idle()
    begun = time.time()
    done = cluster.run(["sbatch", "--wait", "job.sh"], folder=place)
    if done.returncode or not stepped.exists():
        logs = "".join(path.read_text() for path in place.rglob("*.txt"))
        raise RuntimeError(f"{place.name}: {done.stdout}{done.stderr}{logs}")
    return float(stepped.read_text()) - begun


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in (("nodes", 2), ("per-node", 2), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    if missing():
        parser.error(missing())
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder) / "cluster", nodes=given.nodes) as cluster,
    ):
        places = prepare(cluster, Path(folder), given.nodes, given.per_node)
        found: dict[str, list[float]] = {name: [] for name in places}
        for number in range(-1, given.rounds):  # the first is not counted
            for name in sorted(places, reverse=number % 2 == 1):
                found[name].append(measure(cluster, places[name]))
    print(f"{given.nodes} nodes, {given.per_node} processes each; seconds from sbatch to a step")
    for name, times in found.items():
        print(f"{name:>14}  {quartiles(times[1:])}")
    longer = [a - b for a, b in zip(found["Shoal"], found["hand-written"], strict=True)]
    print(f"Shoal takes longer by {quartiles(longer[1:])} s; the aim is at most 0.3 s")


if __name__ == "__main__":
    main()

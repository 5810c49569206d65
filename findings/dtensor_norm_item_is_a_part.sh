#!/bin/sh
# torch 2.13.0 (CPU, Gloo): the norm of a sharded DTensor, read with item(), is that of the rank's own shard,
# another number on each rank, without an error or a warning. Only full_tensor() adds the parts up. So
# `p.grad.norm().item()` of a model under FSDP2 logs a number that depends on the rank and on the number of
# ranks.
# Source: torch/distributed/tensor/_dispatch.py: item() reads the local tensor of a partial result.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$directory/norm.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def run(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    whole = torch.tensor([3.0, 4.0])
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    norm = sharded.norm()
    read, full = norm.item(), norm.full_tensor().item()
    print(f"rank {rank}: item() {read}, full_tensor() {full}", flush=True)
    assert full == 5.0
    assert read == (3.0, 4.0)[rank]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
"$directory/venv/bin/python" "$directory/norm.py" "$directory/store"

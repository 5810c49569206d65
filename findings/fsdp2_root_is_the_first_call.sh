#!/bin/sh
# torch 2.13.0 (CPU, Gloo): which module is the root of FSDP2 is decided by the first call, not by
# fully_shard. A model whose child is called first (a method that encodes, a loss that uses one layer)
# makes the child a root; the call of the model then raises RuntimeError, though both were sharded in the
# documented order, children first. Called in the other order, the same two calls work.
# Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py, FSDPState._lazy_init.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$directory/root.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for child in model:
        fully_shard(child)
    return fully_shard(model)


def run(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x = torch.ones(2, 4)
    model = sharded()
    model(x)
    model[0](x)  # after the model: works
    model = sharded()
    model[0](x)
    try:
        model(x)
        found = ""
    except RuntimeError as error:
        found = str(error)
    if rank == 0:
        print("model before child: works; child before model:", found.replace("\n", " "))
        assert "already been lazily initialized" in found, found
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
"$directory/venv/bin/python" "$directory/root.py" "$directory/store"
# Output seen: model before child: works; child before model: FSDP state has already been lazily
# initialized for 0 FSDP requires running forward through the root module first

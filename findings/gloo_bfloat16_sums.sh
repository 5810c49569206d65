#!/bin/sh
# torch 2.13.0 (CPU, Gloo): an all-reduce of bfloat16 rounds after each addition, and the order of the
# additions depends on the place in the tensor. The sum of equal elements, 256 + 1 + 1 over three ranks,
# is 256 at some places of one tensor and 258 at others, the same on all ranks. One might expect one
# value for equal elements, or an accumulation in float32.
# Source: gloo/allreduce.cc (ring: each rank begins with another segment).
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$directory/sums.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    tensor = torch.full((3000,), [256.0, 1.0, 1.0][rank], dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    found = sorted(set(tensor.tolist()))
    others: list[object] = [None] * 3
    dist.all_gather_object(others, tensor.tolist())
    if rank == 0:
        print("sums of 256 + 1 + 1:", found, "equal on all ranks:", all(each == others[0] for each in others))
        assert found == [256.0, 258.0], found
        assert all(each == others[0] for each in others)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=3)
PYTHON
"$directory/venv/bin/python" "$directory/sums.py" "$directory/store"
# Output seen: sums of 256 + 1 + 1: [256.0, 258.0] equal on all ranks: True

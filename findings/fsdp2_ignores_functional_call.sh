#!/bin/sh
# torch 2.13.0 (CPU, Gloo): torch.func.functional_call on a module of FSDP2 that is resharded after forward
# raises nothing and computes with the module's own parameters. The tensors that it was given are replaced
# again by those that FSDP2 gathers before the forward pass. On a plain module, the same call computes with
# the given tensors; on one that is not resharded (a root's default), it raises RuntimeError, "mixed
# torch.Tensor and DTensor".
# Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, FSDPParam.to_unsharded sets the attribute.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$directory/call.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call


def outputs(model: nn.Module) -> list[float]:
    x = torch.ones(1, 4)
    halved = {name: (p * 0.5).detach() for name, p in model.named_parameters()}
    return [float(model(x).sum()), float(functional_call(model, halved, (x,)).sum())]


def run(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    plain, plain_halved = outputs(model)
    own, own_halved = outputs(fully_shard(model, reshard_after_forward=True))
    if rank == 0:
        print(f"plain: {plain:.6f}, with halved parameters {plain_halved:.6f}")
        print(f"FSDP2: {own:.6f}, with halved parameters {own_halved:.6f}")
        assert abs(plain_halved - 0.5 * plain) < 1e-6
        assert abs(own_halved - own) < 1e-6
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
"$directory/venv/bin/python" "$directory/call.py" "$directory/store"

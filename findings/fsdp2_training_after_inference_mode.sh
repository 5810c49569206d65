#!/bin/sh
# torch 2.13.0 (CPU, Gloo): if the first forward pass of a model under fully_shard is in
# torch.inference_mode, all later training fails ("Inplace update to inference tensor outside
# InferenceMode"). FSDP2 keeps the tensors into which it gathers parameters, and those of the first pass are
# inference tensors. After a first pass under torch.no_grad, or after one training step, inference mode
# does no harm. One might expect that a look at the model before training, as a validation at epoch 0,
# changes nothing.
# Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (init_all_gather_outputs), seen by running it.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$directory/first.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(model):
    try:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error).split(".")[0]
    return "trained"


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
found = {}
for name, first in {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.items():
    for trained in (False, True):
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        if trained:
            train(model)
        with first():
            model(torch.ones(2, 4))
        found[name, trained] = train(model)
if dist.get_rank() == 0:
    for (name, trained), end in found.items():
        print(f"{name} {'after a step' if trained else 'first'}: {end}")
    failed = [key for key, end in found.items() if end != "trained"]
    assert failed == [("inference_mode", False)], failed
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$directory/venv/bin/python" -W ignore -m torch.distributed.run --standalone \
    --nproc-per-node 2 "$directory/first.py" 2> "$directory/errors" || { cat "$directory/errors"; exit 1; }
# Output seen:
# no_grad first: trained
# no_grad after a step: trained
# inference_mode first: Inplace update to inference tensor outside InferenceMode is not allowed
# inference_mode after a step: trained

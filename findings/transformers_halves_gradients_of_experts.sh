#!/bin/sh
# transformers 5.23.0 with torch 2.13.0 (CPU, Gloo): with DistributedConfig(fsdp_size=2, ep_size=2,
# ep_implementation="all_to_all"), each of two processes has half of the experts and half of the samples.
# All gradients are the means over both halves, as on one process, except those of experts, which are
# divided by ep_size once more. AdamW hides most of it; clipping, weight decay against the gradient, and
# SGD do not. With four processes, fsdp_size=4 and ep_size=2, they are right. One might expect the gradients
# of one process, as those of the router and of attention are.
# Source: transformers/distributed/ (the FSDP mesh of experts), seen by comparing gradients.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0
cat > "$directory/experts.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import transformers
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig

folder = sys.argv[1]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_default_dtype(torch.float64)
words = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))


def gradients(part: torch.Tensor, **options: object) -> dict[str, torch.Tensor]:
    options |= {"dtype": torch.float64, "experts_implementation": "eager"}
    model = MixtralForCausalLM.from_pretrained(folder, **options).train()
    model(input_ids=part, labels=part).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


if "RANK" not in os.environ:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    torch.save(gradients(words), f"{folder}/one.pt")
else:
    dist.init_process_group("gloo")
    config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="all_to_all")
    found = gradients(words.chunk(2)[dist.get_rank()], distributed_config=config)
    found = {name: each.full_tensor() for name, each in found.items()}
    if dist.get_rank() == 0:
        for name, one in torch.load(f"{folder}/one.pt").items():
            ratio = float((found[name] * one).sum() / one.square().sum())
            if "layers" in name and ("mlp" in name or "q_proj" in name):
                print(f"{name}: {ratio:.3f} of the gradient of one process")
            assert abs(ratio - (0.5 if "experts" in name else 1)) < 1e-6, name
    dist.destroy_process_group()
PYTHON
python="$directory/venv/bin/python"
"$python" -W ignore "$directory/experts.py" "$directory"
OMP_NUM_THREADS=1 "$python" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$directory/experts.py" "$directory" 2> "$directory/errors" || { cat "$directory/errors"; exit 1; }
# Output seen:
# model.layers.0.self_attn.q_proj.weight: 1.000 of the gradient of one process
# model.layers.0.mlp.gate.weight: 1.000 of the gradient of one process
# model.layers.0.mlp.experts.gate_up_proj: 0.500 of the gradient of one process
# model.layers.0.mlp.experts.down_proj: 0.500 of the gradient of one process

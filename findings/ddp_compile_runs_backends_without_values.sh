#!/bin/sh
# torch 2.13.0 (CPU, Gloo): if the model under DistributedDataParallel has several buckets (the first one
# has 1 MiB), torch.compile splits its graph, and calls the functions that the backend returned while it
# still compiles, with tensors without values (FakeTensor). With one bucket, it calls them with real
# tensors only. A backend whose function reads a number, such as int(torch.randint(9, ())), works for small
# models; for larger ones, torch warns that the backend failed, and compiles smaller pieces. One might
# expect that a compiled function runs only when the model does.
# Source: torch/_dynamo/backends/distributed.py, SubmodCompiler.run_node.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$directory/buckets.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import FakeTensor

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def calls(width: int) -> list[str]:
    """The calls of what the backend returned, in one forward pass."""
    torch.compiler.reset()
    found: list[str] = []

    def backend(graph, inputs):
        compiled = lookup_backend("aot_eager")(graph, inputs)

        def run(*arguments):
            fake = any(isinstance(each, FakeTensor) for each in arguments)
            found.append("without values" if fake else "with values")
            return compiled(*arguments)

        return run

    model = nn.parallel.DistributedDataParallel(Net(width))
    torch.compile(model, backend=backend)(torch.ones(2, width)).sum().backward()
    return found


one, several = calls(40), calls(400)
print("one bucket:", one)
print("several buckets:", several)
assert one == ["with values"], one
assert several.count("without values") >= 2, several
assert several.count("with values") == several.count("without values"), several
dist.destroy_process_group()
PYTHON
"$directory/venv/bin/python" -W ignore "$directory/buckets.py" "$directory/store"
# Output seen:
# one bucket: ['with values']
# several buckets: ['without values', 'without values', 'with values', 'with values']

"""Peak memory of a step of a GPT in bf16: Shoal's FSDP compared with hand-written FSDP2.

shoal run -n 2 benchmarks/gpu/memory.py        # two ranks may share one GPU
shoal run -n 2 benchmarks/gpu/memory.py --layers 2 --width 64 --heads 2 --context 16 --words 96

`--batch` is the number of rows of each rank. Each block is a unit, and so is the rest. Parameters are
gathered in bf16, gradients reduced in fp32. "allocated" is the peak of the device's allocator,
"tracked" that of torch's memory tracker, both of rank 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

import shoal
from gpt import GPT, TASK, adamw, objective
from measuring import parse_options, peak_memory, print_figures, show

from loops import gathered, sequences, train  # isort: skip

Made = tuple[nn.Module, Optimizer, Callable[[], object]]


def by_hand(given: argparse.Namespace, data: Any, world: shoal.World) -> Made:
    """Return a model, its optimizer and a step, in plain torch."""
    torch.manual_seed(0)
    model = GPT(given).to(world.device)
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = adamw(model.parameters())
    batches = gathered(world, data, given.batch * world.size)
    return model, optimizer, train(model, batches, optimizer, objective=objective, clip=1.0).__next__


def by_shoal(given: argparse.Namespace, data: Any, world: shoal.World) -> Made:
    """Return the same with Shoal."""
    torch.manual_seed(0)
    model = shoal.parallelize(GPT(given), world, shoal.FSDP(modules=("blocks.*",)))
    optimizer = adamw(model.parameters())
    step = shoal.Step(model, optimizer, TASK, precision="bf16", clip=1.0)
    batches = shoal.Loader(data, world, batch_size=given.batch * world.size).epochs(10**9)
    return model, optimizer, lambda: step(next(batches))


def measure(
    make: Callable[..., Made], given: argparse.Namespace, data: Any, world: shoal.World
) -> dict[str, int]:
    """Return the peaks of a step, after steps that make the optimizer state."""
    model, optimizer, step = make(given, data, world)
    for _ in range(3):
        step()
    return peak_memory(model, optimizer, step, world.device)


def main() -> None:
    """Measure, and print."""
    shape = {"layers": 24, "width": 1024, "heads": 16, "context": 1024, "words": 50304, "batch": 2}
    given = parse_options(__doc__, **shape)
    with shoal.init(layout="shard=-1") as world:
        if world.size == 1:
            raise SystemExit("a single process shards nothing: shoal run -n 2 benchmarks/gpu/memory.py")
        data = sequences(4 * given.batch * world.size, given.context, given.words)
        peaks = {
            "hand-written": measure(by_hand, given, data, world),
            "Shoal": measure(by_shoal, given, data, world),
        }
        rows = []
        for name, found in peaks.items():
            row: dict[str, Any] = {"FSDP": name}
            for kind, size in found.items():
                row[f"{kind} (MB)"] = size / 1e6
                row[f"{kind} / hand-written"] = size / peaks["hand-written"][kind]
            rows.append(row)
        show(f"Peak memory, {given.layers} layers of {given.width}", rows, world)
        in_mb = {
            name: {f"{kind}_mb": round(size / 1e6, 1) for kind, size in found.items()}
            for name, found in peaks.items()
        }
        print_figures(given, in_mb, world)


if __name__ == "__main__":
    main()

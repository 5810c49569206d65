"""Pretrained weights into shards: time, memory and bytes read of Shoal and of three other ways.

    python benchmarks/pretrained.py [--width 1024] [--layers 8] [--ranks 2] [--rounds 5]

A Llama of transformers in float32, saved in about eight files, is loaded on all ranks from a warm
cache. The ways take turns in the same processes:

- Shoal: `parallelize(…, shoal.FSDP(), empty=True)`, then `load`.
- from_pretrained: `from_pretrained` on each rank, then torch's `fully_shard`.
- transformers: `from_pretrained(…, tp_plan="auto")`, which reads shards of tensor parallelism.
- DCP: `fully_shard` on the meta device, then torch's `HuggingFaceStorageReader`.
- copy: as many bytes as a rank keeps, read into new memory. No way that copies them can be faster.

Time is that of the slowest rank. Memory is the highest resident memory of a rank above that before, and
bytes read are those of read calls (`rchar`), which leave out mapped files; both over the bytes of the
parameters that the rank keeps.
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shoal
from harness import alternate, finish, parse, ratios, show, spread, versions
from helpers.ranks import Ranks

MIB = 2**20


def with_shoal(world: shoal.World, folder: str) -> nn.Module:
    """Create the model without values, shard it, and read the shards."""
    config = transformers.LlamaConfig.from_pretrained(folder)
    make = partial(transformers.LlamaForCausalLM, config)
    model: nn.Module = shoal.parallelize(make, world, shoal.FSDP(), empty=True)
    shoal.load(model, folder)
    return model


def with_from_pretrained(world: shoal.World, folder: str) -> nn.Module:
    """Read all weights on each rank, then shard."""
    model: nn.Module = _sharded(transformers.LlamaForCausalLM.from_pretrained(folder), world)
    return model


def with_transformers(world: shoal.World, folder: str) -> nn.Module:
    """Read shards as transformers does it."""
    model: nn.Module = transformers.LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
    return model


def with_dcp(world: shoal.World, folder: str) -> nn.Module:
    """Shard a model without values, and read the shards with torch.distributed.checkpoint."""
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))
    model: nn.Module = _sharded(made, world)
    model.to_empty(device="cpu")
    state = model.state_dict()
    load_dcp(state, storage_reader=HuggingFaceStorageReader(folder))
    return model


def with_copy(world: shoal.World, folder: str) -> nn.Module:
    """Read this rank's fraction of each file into new memory."""
    held = nn.ParameterList()
    for path in sorted(Path(folder).glob("*.safetensors")):
        part = torch.empty(path.stat().st_size // world.size // 4)
        with path.open("rb") as file:
            file.seek(-(world.rank + 1) * part.nbytes, os.SEEK_END)
            file.readinto(part.numpy().data)
        held.append(nn.Parameter(part))
    return held


WAYS: dict[str, Callable[[shoal.World, str], nn.Module]] = {
    "Shoal": with_shoal,
    "from_pretrained": with_from_pretrained,
    "transformers": with_transformers,
    "DCP": with_dcp,
    "copy": with_copy,
}


def _sharded(model: Any, world: shoal.World) -> Any:
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=world.mesh["shard"])
    return model


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(world: shoal.World, way: str, folder: str) -> dict[str, float]:
    """Load in one way; return seconds, and peak memory and bytes read over the bytes that are kept."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, read = _status("VmRSS"), _bytes_read()
    world.barrier()
    start = time.perf_counter()
    model = WAYS[way](world, folder)
    seconds = time.perf_counter() - start
    read, peak = _bytes_read() - read, _status("VmHWM") - before
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    kept = sum(p.nbytes for p in held)
    assert not any(p.isnan().any() for p in held)
    return {"seconds": seconds, "peak": peak, "read": read, "kept": kept}


def save(folder: str, width: int, layers: int) -> None:
    """Save a model with random values in about eight files."""
    config = transformers.LlamaConfig(
        vocab_size=32 * width,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
    )
    model = transformers.LlamaForCausalLM(config)
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=max(size // 8, 1000))


def main() -> None:
    given = parse(__doc__, width=1024, layers=8, ranks=2, rounds=5)
    transformers.logging.disable_progress_bar()
    found: dict[str, list[list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder, Ranks(given.ranks, layout="shard=-1") as ranks:
        save(folder, given.width, given.layers)
        actions = {way: partial(ranks.call, measure, way, folder) for way in WAYS}
        found = alternate(actions, given.rounds, uncounted=1)
    times = {way: [max(r["seconds"] for r in one) for one in rounds] for way, rounds in found.items()}
    rows = []
    for way, rounds in found.items():
        each = [rank for one in rounds for rank in one]
        rows.append(
            {
                "way": way,
                "seconds": spread(times[way]),
                "time / from_pretrained": spread(ratios(times[way], times["from_pretrained"])),
                "kept, MiB": median(r["kept"] for r in each) / MIB,
                "peak / kept": max(r["peak"] / r["kept"] for r in each),
                "peak - 1.15 kept, MiB": max(r["peak"] - 1.15 * r["kept"] for r in each) / MIB,
                "read / kept": max(r["read"] / r["kept"] for r in each),
            }
        )
    show(versions("shoal", "torch", "transformers"), rows)
    finish(given, {"pretrained": [{k: str(v) for k, v in row.items()} for row in rows]})


if __name__ == "__main__":
    main()

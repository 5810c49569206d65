"""Cost of parallelism strategies in Shoal compared with hand-written torch, interleaved in one run.

    python benchmarks/parallel.py [--rounds 20] [--steps 20] [--only DDP] [--json]

A small transformer on 2 processes, or on 4 with two axes: DDP, FSDP2, tensor parallelism, a 1F1B
pipeline, and FSDP2 over tensor parallelism, each as a torch loop (forward, backward, clip, AdamW,
zero_grad, and the all-reduce that makes the loss global) and as a Shoal Step. A round runs both for the
same number of steps, in an order that changes; ratios are within rounds.

Before that each runs a few steps in which all tensors are watched, to measure the peak memory of a
process (on CUDA torch.cuda.max_memory_allocated), and a few under torch's profiler, which records the
collectives and sends of a process with shapes and dtypes. Bytes are those that a process passes to a
collective. Gloo reduces and scatters by reducing everything, so an all_reduce of FSDP is one of full
gradients.

Gradients, parameters and activations cost the same bytes. The scalars differ: Shoal sums loss, count
and squared norm at once, 3 float64. The torch loops sum loss and count, 2 float32, if ranks have
different samples, and the norm separately: 1 float32 by hand, in FSDP2 that of each of the 51
parameters. So Shoal sends 188 bytes less under FSDP, 20 more under TensorParallel and 12 more in the
last two; under DDP, where each rank has the full norm, the same. In memory Shoal has batches that its
Loader has prefetched, 128 or 256 KiB here, and drops the output before backward, which a loop's
variable keeps.

Context parallelism is not included: torch's does not run on the CPU, and a hand-written exchange of
slices for heads would repeat Shoal's implementation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shoal
from spread import Spread, quartiles

WIDTH, LAYERS, LENGTH, VOCABULARY, BATCH, SAMPLES = 128, 4, 32, 256, 16, 512
MICRO_BATCHES = 4
"""The pipeline's number of micro-batches."""
LAYOUTS = {
    "DDP": "replicate=2",
    "FSDP": "shard=2",
    "TensorParallel": "tensor=2",
    "1F1B": "pipeline=2",
    "TensorParallel, FSDP": "shard=2,tensor=2",
}
WARM, MEASURED = 4, 4
"""Steps before those that are counted, and steps that are counted."""
SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "unsigned char": 1}
"""Bytes of an element, by the profiler's names."""
PLAN = {"blocks.*.linear1": "column", "blocks.*.linear2": "row"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def dataset() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return tokens, tokens.roll(-1, 1)


def by_hand(world: shoal.World, way: str) -> Iterator[None]:
    """Train as torch's tutorials parallelize a model."""
    torch.manual_seed(0)
    net = Net().to(world.device)
    model: nn.Module = net
    if "TensorParallel" in way:
        styles: dict[str, Any] = {}
        for number in range(LAYERS):
            styles[f"blocks.{number}.linear1"] = ColwiseParallel()
            styles[f"blocks.{number}.linear2"] = RowwiseParallel()
        parallelize_module(net, world.mesh["tensor"], styles)
    if "FSDP" in way:
        mesh = world.mesh["shard"]
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    if way == "DDP":
        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, labels = dataset()
    share = BATCH // world.data_size
    start = world.data_rank * share
    while True:
        for first in range(0, SAMPLES, BATCH):
            mine = slice(first + start, first + start + share)
            output = model(tokens[mine].to(world.device))
            loss = mean(output, labels[mine].to(world.device))
            loss.backward()
            if "TensorParallel" in way:
                _clip_over_ranks(net)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if world.data_size > 1:
                dist.all_reduce(torch.stack((loss.detach() * share, loss.new_tensor(share))))
            yield


def by_hand_piped(world: shoal.World) -> Iterator[None]:
    """Train with torch's 1F1B over two stages, each half of the blocks plus the layers at its end."""
    torch.manual_seed(0)
    net, half = Net(), LAYERS // 2
    stages = [
        nn.Sequential(net.embedding, *net.blocks[:half]),
        nn.Sequential(*net.blocks[half:], net.head),
    ]
    model = stages[world.rank].to(world.device)
    stage = PipelineStage(model, world.rank, 2, world.device, group=world.mesh["pipeline"].get_group())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=mean)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, labels = dataset()
    while True:
        for first in range(0, SAMPLES, BATCH):
            mine = slice(first, first + BATCH)
            losses: list[Tensor] = []
            if stage.is_first:
                schedule.step(tokens[mine].to(world.device))
            else:
                targets = labels[mine].to(world.device)
                schedule.step(target=targets, losses=losses, return_outputs=False)
            _clip_over_ranks(model, alike=1)
            optimizer.step()
            optimizer.zero_grad()
            total = torch.zeros((), device=world.device)
            if losses:
                total = torch.stack(losses).sum().detach() * (BATCH // MICRO_BATCHES)
            dist.all_reduce(torch.stack((total, total.new_tensor(BATCH * bool(losses)))))
            yield


def mean(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def _clip_over_ranks(net: nn.Module, alike: int | None = None) -> None:
    """Clip gradients over several meshes, which clip_grad_norm_ does not support.

    `alike` is the number of ranks with the same unsharded parameter. Default: the world size.
    """
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    own = torch.zeros((), device=gradients[0].device)
    for gradient in gradients:
        holders = alike or dist.get_world_size()
        local = gradient
        if isinstance(gradient, DTensor):
            local = gradient.to_local()
            for axis, placement in enumerate(gradient.placements):
                if not placement.is_replicate():
                    holders //= gradient.device_mesh.size(axis)
        own = own + local.square().sum() / holders
    dist.all_reduce(own)
    factor = torch.clamp(1.0 / (own.sqrt() + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Return the same loss as a sum and a count."""
    tokens = F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return tokens / LENGTH, len(batch[1])


def through_shoal(world: shoal.World, way: str) -> Iterator[None]:
    strategies: dict[str, Any] = {
        "DDP": shoal.DDP(),
        "FSDP": shoal.FSDP(),
        "TensorParallel": shoal.TensorParallel(plan=PLAN),
        "1F1B": shoal.Pipeline(split_points=(f"blocks.{LAYERS // 2}",), schedule="1f1b"),
        "TensorParallel, FSDP": [shoal.TensorParallel(plan=PLAN), shoal.FSDP()],
    }
    torch.manual_seed(0)
    model = shoal.parallelize(Net(), world, strategies[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    micro_batches = MICRO_BATCHES if way == "1F1B" else 1
    data = shoal.Loader(dataset(), world, batch_size=BATCH, micro_batches=micro_batches)
    for batch in data.epochs(10**9):
        step(batch)
        yield


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one process: bytes and elements per step of each kind of message, and memory."""

    sent: dict[str, tuple[float, float]]
    peak: int


class Watch(TorchDispatchMode):
    """A mode that tracks the peak bytes of tensors made inside, without those of kernels and Gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # the mode is called again with the plain tensors inside
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                held = StorageWeakRef(leaf.untyped_storage())
                self._storages.setdefault(held.cdata, held)
        self.peak = max(self.peak, self._now())
        return result

    def _now(self) -> int:
        """Return the bytes of live tensors, queried each time as FSDP2 frees and refills storages."""
        total = 0
        for key, held in list(self._storages.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(held.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total


def cost(world: shoal.World, make: Callable[[], Iterator[None]]) -> tuple[Iterator[None], Cost]:
    """Return the loop of `make` after its first steps, and the cost of the later ones of them."""
    watch = Watch()
    cuda = world.device.type == "cuda"
    held = torch.cuda.memory_allocated() if cuda else 0
    with contextlib.nullcontext() if cuda else watch:
        loop = make()
        consume(loop, WARM)
        watch.peak = 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        consume(loop, MEASURED)
    peak = torch.cuda.max_memory_allocated() - held if cuda else watch.peak
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        consume(loop, MEASURED)
    sent: dict[str, tuple[float, float]] = {}
    profiler: Any = recorded.profiler  # its own events have no dtypes
    for event in profiler.kineto_results.events():
        backend, _, kind = event.name().partition(":")
        if backend in ("gloo", "nccl") and kind != "recv":
            counts = [math.prod(shape) for shape in event.shapes()]
            sizes = [SIZES[name] for name in event.dtypes()]
            volume = sum(count * size for count, size in zip(counts, sizes, strict=True))
            elements, before = sent.get(kind, (0.0, 0.0))
            sent[kind] = elements + sum(counts) / MEASURED, before + volume / MEASURED
    return loop, Cost(sent=sent, peak=peak)


def consume(loop: Iterator[None], steps: int) -> None:
    for _ in range(steps):
        next(loop)


def measure(world: shoal.World, way: str, rounds: int, steps: int) -> dict[str, Any]:
    hand = partial(by_hand_piped, world) if way == "1F1B" else partial(by_hand, world, way)
    makers: dict[str, Callable[[], Iterator[None]]] = {
        "torch": hand,
        "shoal": partial(through_shoal, world, way),
    }
    loops, costs = {}, {}
    for who, make in makers.items():
        loops[who], costs[who] = cost(world, make)
    times: dict[str, list[float]] = {who: [] for who in loops}
    for number in range(rounds):
        for who in sorted(loops, reverse=bool(number % 2)):
            world.barrier()
            begun = time.perf_counter()
            consume(loops[who], steps)
            times[who].append((time.perf_counter() - begun) / steps * 1e3)
    pairs = [ours / theirs for ours, theirs in zip(times["shoal"], times["torch"], strict=True)]
    return {
        "way": way,
        "milliseconds": {who: statistics.median(values) for who, values in times.items()},
        "ratio": asdict(quartiles(pairs)),
        "cost": {who: world.gather(asdict(own)) for who, own in costs.items()},
    }


def show(figures: dict[str, Any]) -> None:
    """Print the process that sends most, and the one with the highest peak."""
    volume = {}
    costs: dict[str, list[dict[str, Any]]] = figures["cost"]
    print(f"\n{figures['way']}, {len(costs['torch'])} processes")
    for who, value in figures["milliseconds"].items():
        peak = max(rank["peak"] for rank in costs[who]) / 2**20
        volume[who] = [sum(size for _, size in rank["sent"].values()) for rank in costs[who]]
        busiest = costs[who][max(range(len(volume[who])), key=volume[who].__getitem__)]["sent"]
        kinds = ", ".join(
            f"{kind} {size:,.0f} in {count:,.0f} elements"
            for kind, (count, size) in sorted(busiest.items())
        )
        print(f"  {who:<6} {value:7.2f} ms a step; peak {peak:6.2f} MiB; bytes: {kinds}")
    print(f"  ratio  {Spread(**figures['ratio'])}")
    more = [ours - theirs for ours, theirs in zip(volume["shoal"], volume["torch"], strict=True)]
    told = ", ".join(f"{each:+,.0f}" for each in more)
    print("  the same bytes on each rank" if not any(more) else f"  bytes on each rank: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=LAYOUTS, help="measure only this strategy")
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--inside", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        way, path = options.inside
        with shoal.init(layout=LAYOUTS[way]) as world:
            figures = measure(world, way, options.rounds, options.steps)
            if world.is_rank_zero:
                Path(path).write_text(json.dumps(figures))
        return
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for way in [options.only] if options.only else LAYOUTS:
            path = f"{directory}/{way}.json"
            given = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
            size = math.prod(int(axis.partition("=")[2]) for axis in LAYOUTS[way].split(","))
            command = [sys.executable, "-m", "shoal", "run", "-n", str(size), __file__, "--", *given]
            subprocess.run([*command, "--inside", way, path], check=True)
            found.append(json.loads(Path(path).read_text()))
    for each in found:
        show(each)
    if options.json:
        print(json.dumps({"parallel": found}))


if __name__ == "__main__":
    main()

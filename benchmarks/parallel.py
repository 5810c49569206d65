"""Cost of parallelism strategies in Shoal compared with hand-written torch, interleaved in one run.

    python benchmarks/parallel.py [--rounds 20] [--steps 20] [--ways DDP] [--json]

A small transformer on 2 processes, or on 4 with two axes: DDP, FSDP2, tensor parallelism, a 1F1B
pipeline, and FSDP2 over tensor parallelism, each as a torch loop (forward, backward, clip, AdamW,
zero_grad, and the all-reduce that makes the loss global) and as a Shoal Step.

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
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
from harness import finish, machine, parse, show, time_rows, time_steps
from loops import Transformer, adamw, cross_entropy, sequences, through_shoal, wrapped

WIDTH, LAYERS, LENGTH, VOCABULARY, BATCH, SAMPLES = 128, 4, 32, 256, 16, 512
MICRO_BATCHES = 4
"""The pipeline's number of micro-batches."""
WARM, MEASURED = 4, 4
"""Steps before those that are counted, and steps that are counted."""
SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "unsigned char": 1}
"""Bytes of an element, by the profiler's names."""
PLAN = {"blocks.*.linear1": "column", "blocks.*.linear2": "row"}
TENSOR = shoal.TensorParallel(plan=PLAN)
PIPELINE = shoal.Pipeline(split_points=(f"blocks.{LAYERS // 2}",), schedule="1f1b")


class Way(NamedTuple):
    """A layout and the strategies of Shoal."""

    layout: str
    strategy: Any


WAYS = {
    "DDP": Way("replicate=2", shoal.DDP()),
    "FSDP": Way("shard=2", shoal.FSDP()),
    "TensorParallel": Way("tensor=2", TENSOR),
    "1F1B": Way("pipeline=2", PIPELINE),
    "TensorParallel, FSDP": Way("shard=2,tensor=2", [TENSOR, shoal.FSDP()]),
}


def build() -> Transformer:
    return Transformer(VOCABULARY, WIDTH, LAYERS)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Return the loss of the hand-written loops as a sum and a count of sequences."""
    return cross_entropy(output, batch[1], "sum") / LENGTH, len(batch[1])


def batches(world: shoal.World) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of this rank."""
    rows = BATCH // world.data_size
    while True:
        for pair in zip(
            *(each.split(BATCH) for each in sequences(SAMPLES, LENGTH, VOCABULARY)), strict=True
        ):
            mine = [each[world.data_rank * rows :][:rows].to(world.device) for each in pair]
            yield mine[0], mine[1]


def by_hand(world: shoal.World, way: str) -> Iterator[None]:
    """Train as torch's tutorials parallelize a model."""
    net = build().to(world.device)
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
        model = wrapped(net, world)
    optimizer = adamw(model.parameters())
    for tokens, labels in batches(world):
        value = cross_entropy(model(tokens), labels)
        value.backward()
        if "TensorParallel" in way:
            _clip_over_ranks(net)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world.data_size > 1:
            count = value.new_tensor(len(tokens))
            dist.all_reduce(torch.stack((value.detach() * count, count)))
        yield


def piped_by_hand(
    world: shoal.World, half: nn.Module, batches: Iterable[Any], micro_batches: int
) -> Iterator[None]:
    """Train with torch's 1F1B over two stages, of which `half` is that of this rank."""
    model = half.to(world.device)
    stage = PipelineStage(model, world.rank, 2, world.device, group=world.mesh["pipeline"].get_group())
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=cross_entropy)
    optimizer = adamw(model.parameters())
    for tokens, labels in batches:
        losses: list[Tensor] = []
        if stage.is_first:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        _clip_over_ranks(model, alike=1)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.zeros((), device=world.device)
        if losses:
            total = torch.stack(losses).sum().detach() * (len(tokens) // micro_batches)
        dist.all_reduce(torch.stack((total, total.new_tensor(len(tokens) * bool(losses)))))
        yield


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


class Cost(NamedTuple):
    """The cost of one process: bytes and elements per step of each kind of message, and memory."""

    sent: dict[str, tuple[float, float]]
    peak: int

    @property
    def bytes(self) -> float:
        return sum(size for _, size in self.sent.values())


def cost(world: shoal.World, make: Callable[[], Iterator[Any]]) -> tuple[Iterator[Any], Cost]:
    """Return the loop of `make` after its first steps, and the cost of the later ones of them."""
    watch = Watch()
    cuda = world.device.type == "cuda"
    held = torch.cuda.memory_allocated() if cuda else 0
    with contextlib.nullcontext() if cuda else watch:
        loop = make()
        for _ in range(WARM):
            next(loop)
        watch.peak = 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(MEASURED):
            next(loop)
    peak = torch.cuda.max_memory_allocated() - held if cuda else watch.peak
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(MEASURED):
            next(loop)
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
    return loop, Cost(sent, peak)


def measure(given: argparse.Namespace, way: str) -> tuple[list[dict[str, Any]], list[float]]:
    """Return a row for each loop, and the bytes by which Shoal sends more on each rank."""
    layout, strategy = WAYS[way]

    def theirs() -> Iterator[Any]:
        if way != "1F1B":
            return by_hand(world, way)
        net, half = build(), LAYERS // 2
        ends = [net.embedding, *net.blocks[:half]], [*net.blocks[half:], net.head]
        return piped_by_hand(world, nn.Sequential(*ends[world.rank]), batches(world), MICRO_BATCHES)

    def ours() -> Iterator[Any]:
        return through_shoal(
            world,
            build(),
            sequences(SAMPLES, LENGTH, VOCABULARY),
            BATCH,
            strategy=strategy,
            task=shoal.Task(loss),
            clip=1.0,
            micro_batches=MICRO_BATCHES if way == "1F1B" else 1,
        )

    with shoal.init(layout=layout) as world:
        made = {
            "torch": cost(world, theirs),
            "shoal": cost(world, ours),
        }
        costs = {who: world.gather(tuple(own)) for who, (_, own) in made.items()}
        loops = {who: loop.__next__ for who, (loop, _) in made.items()}
        times = time_steps(world, loops, rounds=given.rounds, steps=given.steps, warm_up=0)
    rows = time_rows(times, "torch")
    for row in rows:
        ranks = [Cost(*each) for each in costs[row["loop"]]]
        row["peak, MiB"] = max(each.peak for each in ranks) / 2**20
        for kind, (count, size) in sorted(max(ranks, key=lambda each: each.bytes).sent.items()):
            row[kind] = f"{size:,.0f} B in {count:,.0f} elements"
    pairs = zip(costs["shoal"], costs["torch"], strict=True)
    return rows, [Cost(*ours).bytes - Cost(*theirs).bytes for ours, theirs in pairs]


def main() -> None:
    given = parse(__doc__, ways=WAYS, rounds=20, steps=20)
    figures = {}
    for way in given.ways:
        size = shoal.Layout.parse(WAYS[way].layout).size
        rows, more = shoal.launch(measure, given, way, processes=size)[0]
        show(f"{way}, {size} processes, {machine()}", rows)
        print("Shoal sends more bytes on each rank:", *(f"{each:+,.0f}" for each in more))
        figures[way] = {"loops": rows, "more": more}
    finish(given, {"parallel": figures})


if __name__ == "__main__":
    main()

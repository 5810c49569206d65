"""DDP starts each all-reduce while backward still computes: its buckets arrive as plain DDP's do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from shoal.strategies import engine_of
from shoal.strategies.data_parallel.ddp import DDPReducer
from shoal.strategies.engine import ReducerEngine

pytestmark = pytest.mark.processes

LAYERS, WIDTH = 6, 384
BUCKET_MB = 1.0
"""Two of the layers fill a bucket. torch does not split compiled graphs for smaller buckets."""

Arrivals = list[str | tuple[str, ...]]
"""A parameter's name when its gradient is ready; a tuple of names when their bucket is sent."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as started:
        yield started


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def record(model: nn.Module, ddp: Any) -> Arrivals:
    """Note each gradient and each bucket from now on, in the order in which DDP sees them."""
    seen: Arrivals = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def ready(parameter: Tensor) -> None:
        seen.append(names[id(parameter)])

    def send(state: object, bucket):  # type: ignore[no-untyped-def]  # torch refuses text annotations
        # The bucket also holds the sums of loss and count, which have no name.
        seen.append(tuple(names[id(p)] for p in bucket.parameters() if id(p) in names))
        mean = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    ddp.register_comm_hook(None, send)
    return seen


def plain(world: shoal.World) -> Arrivals:
    """The third backward of plain DDP, after it has rebuilt its buckets."""
    model = build()
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    seen = record(model, ddp)
    for _ in range(3):
        seen.clear()
        ddp(torch.randn(4, WIDTH)).sum().backward()
    return seen


def through_shoal(world: shoal.World, directory: str, static: bool, compiles: bool = False) -> Arrivals:
    """The first backward of a run in `directory`, from its latest complete checkpoint if it has one."""
    model = build()
    data = shoal.Loader((torch.randn(64, WIDTH),), world, batch_size=16)
    forward = torch.compile(model, backend="aot_eager") if compiles else model
    shoal.parallelize(forward, world, shoal.DDP(bucket_cap_mb=BUCKET_MB, static_graph=static))
    engine = engine_of(model)
    assert isinstance(engine, ReducerEngine)
    assert isinstance(engine.reducer, DDPReducer)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), 0.1), task)
    with shoal.Run(directory, step, data, trackers=()) as run:
        run.restore()
        batches = data.epochs(2)
        if static:  # a static graph is primed by its first backward, in which no bucket is sent
            step(next(batches))
        seen = record(model, engine.reducer._reducer._ddp)
        step(next(batches))
        arrivals = list(seen)
        run.save()
    return arrivals


def sent(arrivals: Arrivals) -> list[tuple[int, tuple[str, ...]]]:
    """Each bucket, with the number of arrivals before it: a graph has its own order of gradients."""
    return [(i, each) for i, each in enumerate(arrivals) if isinstance(each, tuple)]


@pytest.mark.parametrize(
    "static", [False, pytest.param(True, marks=pytest.mark.full)], ids=["dynamic", "static graph"]
)
def test_buckets_are_sent_as_early_as_plain_ddp_sends_them(
    ranks: Ranks, tmp_path: Path, static: bool
) -> None:
    expected = ranks.call(plain)[0]
    first_bucket = next(i for i, each in enumerate(expected) if isinstance(each, tuple))
    assert first_bucket < len(expected) - 2  # plain DDP does overlap here
    for start in ("fresh", "resumed"):
        for rank, arrivals in enumerate(ranks.call(through_shoal, str(tmp_path), static)):
            assert arrivals == expected, f"{start}, rank {rank}"


@pytest.mark.full
def test_a_compiled_model_sends_its_buckets_as_early_as_one_that_is_not(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A graph delivers all its gradients at its end, so that torch splits it where buckets end."""
    expected = ranks.call(plain)[0]
    for rank, arrivals in enumerate(ranks.call(through_shoal, str(tmp_path), False, True)):
        assert sent(arrivals) == sent(expected), f"rank {rank}"

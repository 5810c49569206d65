"""What stages on several ranks can't do is said on all of them, and training may go on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc

import shoal
from helpers.one_process import check_like_one, check_refused
from helpers.ranks import Ranks, free_port
from helpers.token_model import STAGES, Block, Tagger, build, dataset, loss, parts, train

pytestmark = pytest.mark.processes
LAYOUT = "pipeline=2"

REMOTE = shoal.RPCPipeline(stages=STAGES[2])
WITHOUT = [
    {},
    {"front": ()},
    {"front": "first"},
    {"front": ("first", "")},
    ("first", "head"),
    {1: ("first",)},
]
WORKERS = [
    ({"front": (0,)}, "each has at least one worker"),
    ({"front": (0,), "back": ()}, "each has at least one worker"),
    ({"front": (0,), "back": (0, 1)}, "a rank can run only one stage"),
    ({"front": (0,), "back": (-1,)}, "ranks of the .pipeline. axis, numbered from 0"),
    ({"front": (0,), "back": (True,)}, "ranks of the .pipeline. axis, numbered from 0"),
    ({"front": 0, "back": 1}, "each has at least one worker"),
    ((0, 1), "each has at least one worker"),
]


@pytest.mark.parametrize("stages", WITHOUT)
def test_stages_without_names_or_modules_are_refused(stages: Any) -> None:
    with pytest.raises(shoal.StepError, match="a sequence of module names"):
        shoal.RPCPipeline(stages=stages)


@pytest.mark.parametrize(("workers", "found"), WORKERS)
def test_workers_that_do_not_fit_are_refused(workers: Any, found: str) -> None:
    with pytest.raises(shoal.StepError, match=found):
        shoal.RPCPipeline(stages=STAGES[2], workers=workers)


class Tied(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Unused(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Backwards(Tagger):
    """What the map calls the second part is called first."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.blocks[1](self.embedding(tokens)))
        logits: Tensor = self.head(x)
        return logits


class Frozen(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def given(world: shoal.World, make: Any, strategy: Any) -> None:
    shoal.parallelize(make(), world, strategy)


def remote(**stages: tuple[str, ...]) -> shoal.RPCPipeline:
    return shoal.RPCPipeline(stages=stages)


MAPS: list[tuple[Any, Any, str]] = [
    (Tagger, remote(front=("embedding", "blocks"), back=("tail",)), "has 'tail', which the model does"),
    (Backwards, REMOTE, "after blocks.1 of 'back' the model calls blocks.0 of 'front'"),
    (Backwards, remote(front=("embedding", "blocks.1"), back=("head", "blocks.0")), ""),
    (Tied, REMOTE, "embedding.weight and head.weight are one parameter in two stages"),
    (Unused, REMOTE, "parameters that its forward does not use: spare.weight"),
    (Frozen, REMOTE, "a model without trainable parameters"),
    (Tagger, [REMOTE, shoal.DDP()], "RPCPipeline sums gradients, so no strategy"),
    (
        Tagger,
        [shoal.ActivationCheckpointing(), shoal.DDP()],
        "no strategy uses the 'pipeline' axis",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("make", "strategy", "found"), MAPS)
def test_maps_that_do_not_fit_are_refused_on_all_ranks(
    ranks: Ranks, make: Any, strategy: Any, found: str
) -> None:
    if found:
        kind = shoal.StepError | shoal.LayoutError
        check_refused(ranks, found, given, make, strategy, kind=kind)
    else:
        ranks.call(given, make, strategy)


class Opaque(nn.Module):
    """Its output can't be pickled."""

    def forward(self, x: Tensor) -> Any:
        return x, threading.Lock()


class Handing(nn.Module):
    """Beside a tensor the first stage hands on something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.opaque = Opaque()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        if self.kind == "number":
            return self.second(x) / x.size(1)
        x, lock = self.opaque(x)
        return self.second(x), lock


def handed(world: shoal.World, kind: str) -> float:
    torch.manual_seed(1)
    stages = {"front": ("first", "opaque") if kind == "lock" else ("first",), "back": ("second",)}
    model = shoal.parallelize(Handing(kind).double(), world, shoal.RPCPipeline(stages=stages))
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    rows = torch.arange(24.0, dtype=torch.float64).view(6, 4)
    data = shoal.Loader((rows, rows), world, batch_size=6, micro_batches=2)
    return [step(batch).loss for batch in data.epochs(2)][-1]


@pytest.mark.full
def test_numbers_are_handed_on_and_what_cannot_be_pickled_is_named(ranks: Ranks) -> None:
    with shoal.init() as world:
        wanted = handed(world, "number")
    assert ranks.call(handed, "number") == [pytest.approx(wanted, rel=1e-12)] * 2
    check_refused(ranks, "cannot pickle '_thread.lock' object", handed, "lock")


class Failing(Tagger):
    """Fails in training, on a batch of a certain size."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: nn.Module = Bad()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.bad(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Bad(nn.Module):
    rows = -1

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(x) == self.rows:
            raise ValueError("these rows are bad")
        return x


def failing(world: shoal.World, where: str) -> list[str]:
    """One step that fails, then one that does not."""
    torch.manual_seed(3)
    model = shoal.parallelize(Failing().double(), world, REMOTE)

    def losing(output: Tensor, batch: Any) -> tuple[Tensor, Any]:
        if torch.is_grad_enabled() and where == "loss" and len(bad) and len(output) == bad[0]:
            raise ValueError("this loss is bad")
        return loss(output, batch)

    bad: list[int] = []
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(losing))
    data = shoal.Loader(dataset(), world, batch_size=16, micro_batches=4)
    batches = data.epochs(9)
    step(next(batches))
    bad.append(4)
    Bad.rows = 4 if where == "stage" else -1
    said = []
    try:
        step(next(batches))
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    bad.clear()
    Bad.rows = -1
    said.append(f"{step(next(batches)).loss:.6f}")
    return said


@pytest.mark.full
@pytest.mark.parametrize(("where", "who"), [("stage", 0), ("loss", 1)])
def test_what_fails_in_a_stage_is_raised_there_and_told_elsewhere(
    ranks: Ranks, where: str, who: int
) -> None:
    results = ranks.call(failing, where)
    own, other = results[who], results[1 - who]
    assert own[0].startswith("ValueError")
    assert other[0].startswith("StepError")
    for part in (f"rank {who} (stage ", "ValueError: th", "bad"):
        assert part in other[0]
    assert own[1] == other[1] != "nan"  # the next step is one of all ranks again


def called(world: shoal.World) -> None:
    step, data = parts(world, REMOTE)
    for micro in next(data.epochs(1)):
        step.model(micro[0])


def own_loop(world: shoal.World) -> None:
    _, data = parts(world, REMOTE)
    batch = next(data.epochs(1))
    for _ in batch:
        batch.backward(total=torch.zeros((), requires_grad=True), count=1)


def scripted(world: shoal.World) -> None:
    model = shoal.parallelize(build(), world, REMOTE)
    optimizer = torch.optim.AdamW(model.parameters())
    step = shoal.Step(model, optimizer, shoal.Task(loss), compile="script")
    step(next(shoal.Loader(dataset(), world, batch_size=8).epochs(1)))


def detached(world: shoal.World) -> None:
    model = shoal.parallelize(build(), world, REMOTE)
    task = shoal.Task(lambda output, batch: loss(output.detach(), batch))
    step = shoal.Step(model, torch.optim.AdamW(model.parameters()), task)
    step(next(shoal.Loader(dataset(), world, batch_size=8).epochs(1)))


def converted(world: shoal.World) -> None:
    step, data = parts(world, REMOTE)
    if world.rank == 0:
        step.model.float()
    step(next(data.epochs(1)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "found"),
    [
        (called, "step = shoal.Step(model, optimizer, task); step(batch) trains"),
        (own_loop, "the strategy of the model needs shoal.Step"),
        (scripted, "TorchScript cannot call"),
        (detached, "does not depend on any trainable parameter"),
        (converted, "moved, converted or replaced after parallelize"),
    ],
)
def test_what_stages_on_other_ranks_cannot_do_is_said(ranks: Ranks, task: Any, found: str) -> None:
    check_refused(ranks, found, task)


def with_rpc_of_its_own(world: shoal.World) -> None:
    port = world.broadcast(free_port())
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    name = f"mine{world.rank}"
    rpc.init_rpc(name, rank=world.rank, world_size=world.size, rpc_backend_options=options)
    try:
        shoal.parallelize(build(), world, REMOTE)
    finally:
        rpc.shutdown()


@pytest.mark.full
def test_rpc_that_was_begun_before_is_refused() -> None:
    with Ranks(2, layout="pipeline=2") as ranks:
        check_refused(ranks, "torch supports a single RPC agent per process", with_rpc_of_its_own)


def partly_frozen(world: shoal.World, strategy: Any) -> list[float]:
    model = build()
    model.embedding.requires_grad_(False)
    for part in model.blocks:
        assert isinstance(part, Block)
    model.blocks[0].requires_grad_(False)
    model = shoal.parallelize(model, world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=0.1)
    data = shoal.Loader(dataset(), world, batch_size=16, micro_batches=2)
    return [step(batch).loss for batch in data.epochs(2)]


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy", [REMOTE, [shoal.ActivationCheckpointing(modules=("blocks.*",)), REMOTE]]
)
def test_a_stage_may_be_frozen_and_blocks_recomputed(ranks: Ranks, strategy: Any) -> None:
    check_like_one(ranks, partly_frozen, strategy)


@pytest.mark.full
def test_after_all_that_the_ranks_still_train(ranks: Ranks) -> None:
    first, second = ranks.call(train, REMOTE, 4)
    assert first[0].losses == second[0].losses

"""Bad input on several ranks: the same error on all of them, soon, before anything has moved."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import cross_entropy as loss
from helpers.small_training import mean_cross_entropy, squares
from shoal.util.errors import (
    CheckpointError,
    DataError,
    LaunchError,
    ShoalError,
    StepError,
)

pytestmark = pytest.mark.processes

RANKS = 3
LIMIT = 60.0
"""How long a rank waits for others: an error that came of that would be another one, and later."""
SAMPLES = 20
BAD_SAMPLE = 9

X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES) % 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS, timeout=LIMIT) as ranks:
        ranks.call(warm_up)
        yield ranks


class Rig:
    def __init__(self, world: shoal.World) -> None:
        torch.manual_seed(0)
        self.world = world
        self.model = shoal.parallelize(nn.Linear(4, 3), world)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self, loss: Any = loss, **options: Any) -> shoal.Step:
        return shoal.Step(self.model, self.optimizer, shoal.Task(loss), **options)

    def loader(self, data: Any = None, batch_size: int = 6, **options: Any) -> shoal.Loader:
        data = (X, Y, torch.arange(SAMPLES)) if data is None else data
        return shoal.Loader(data, self.world, batch_size=batch_size, shuffle=False, **options)

    def train(self, loss: Any, **options: Any) -> shoal.StepResult:
        return self.step(loss)(next(self.loader(**options).epochs(1)))

    def values(self) -> tuple[list[list[float]], int]:
        return [p.flatten().tolist() for p in self.model.parameters()], len(self.optimizer.state)


def warm_up(world: shoal.World) -> None:
    # The first replica of a process costs a second of imports.
    Rig(world).train(loss)


def small_batch(rig: Rig) -> object:
    return rig.loader(batch_size=2)


def mean_where_rank_0_has_one_sample(rig: Rig) -> object:
    return rig.train(mean_cross_entropy, batch_size=5)


def wrong_on_one_rank(rig: Rig) -> object:
    if rig.world.rank == 1:
        return rig.train(lambda output, batch: (output.sum(1), len(output)))
    return rig.train(loss)


def no_sample_on_any_rank_but_one(rig: Rig) -> object:
    step = shoal.Step(rig.model, rig.optimizer, shoal.Task(squares, inputs=lambda batch: batch))
    return shoal.evaluate(step, X[:1], metrics={"share": shoal.Accuracy()})


def rubbish_from_a_metric(rig: Rig) -> object:
    return shoal.evaluate(rig.step(), (X[:1], Y[:1]), metrics={"share": lambda output, target: "all"})


def no_count(rig: Rig) -> object:
    return rig.train(lambda output, batch: (output.square().sum(), 0))


def infinite_data_of_one_rank(rig: Rig) -> object:
    named = [
        {"x": x * torch.inf if n == 3 else x, "y": y} for n, (x, y) in enumerate(zip(X, Y, strict=True))
    ]
    task = shoal.Task(lambda o, b: loss(o, (b["x"], b["y"])), inputs=lambda b: b["x"])
    step = shoal.Step(rig.model, rig.optimizer, task)
    return step(next(rig.loader(named).epochs(1)))


def a_directory_that_one_rank_cannot_write(rig: Rig) -> object:
    path = "/dev/null/run" if rig.world.rank == 2 else os.path.join(os.getcwd(), "run")
    return shoal.Run(path, rig.step(), rig.loader())


def events_that_one_rank_cannot_write(rig: Rig) -> object:
    if rig.world.rank == 1:
        Path("run/events/rank-1.jsonl").mkdir(parents=True)
    return shoal.Run("run", rig.step(), rig.loader())


def shorter_data(rig: Rig) -> object:
    save(rig)
    return shoal.Run("run", rig.step(), rig.loader((X[:19], Y[:19]))).restore()


def another_model(rig: Rig) -> object:
    save(rig)
    other = shoal.parallelize(nn.Sequential(nn.Linear(4, 3)), rig.world)
    step = shoal.Step(other, torch.optim.AdamW(other.parameters()), shoal.Task(loss))
    return shoal.Run("run", step, rig.loader()).restore()


def save(rig: Rig) -> None:
    shoal.Run("run", rig.step(), rig.loader()).save()


def two_models(rig: Rig) -> object:
    other = shoal.parallelize(nn.Linear(4, 3), rig.world)
    batch = next(rig.loader().epochs(1))
    for micro in batch:
        total, count = loss(rig.model(micro[0]), micro)
        batch.backward(total=total, count=count)
    return other


def no_backward(rig: Rig) -> object:
    return next(rig.loader().epochs(1)).finish(rig.model)


def single(rig: Rig) -> object:
    return shoal.parallelize(nn.Linear(4, 3), rig.world, shoal.SingleProcess())


ROWS: list[tuple[Callable[[Rig], object], type[ShoalError], str, str, str]] = [
    (small_batch, DataError, "batch_size=2.*3 data rank", "1 of them would never", "batch_size=3"),
    (
        mean_where_rank_0_has_one_sample,
        StepError,
        "mean_cross.*for 2 samples",
        "a mean, not a sum",
        "sum",
    ),
    (wrong_on_one_rank, StepError, "lambda", r"shape \(2,\)", r"return F.cross_entropy\("),
    (no_sample_on_any_rank_but_one, DataError, "Tensor", "neither a second element", "targets=lambda"),
    (rubbish_from_a_metric, StepError, "share", "a str, not two numbers: 'all'", "return"),
    (no_count, StepError, "6 samples", "a count of 0 in total", r"len\("),
    (
        infinite_data_of_one_rank,
        StepError,
        "0 to 5",
        r"batch\['x'\] has values that are not finite, among samples 2 to 3",
        "nan_to_num",
    ),
    (
        a_directory_that_one_rank_cannot_write,
        CheckpointError,
        "checkpoints",
        "rank 2: .*Not a directory",
        "ls -ld",
    ),
    (events_that_one_rank_cannot_write, CheckpointError, "events", "rank 1: .*Is a dir", "ls -ld"),
    (shorter_data, DataError, "19 samples", "20 samples", "shoal.Run"),
    (another_model, CheckpointError, "Sequential", "missing: 0.weight.*unexpected: weight", "Run"),
    (two_models, StepError, "loop", r"\d parallelized models", r"batch.backward\(.*model=model\)"),
    (no_backward, StepError, "1 micro-batch", "called 0 times", "for micro in batch"),
    (single, StepError, "world of 3", "a separate model", r"shoal.DDP\(\)"),
]


def provoke(world: shoal.World, number: int, folder: str) -> Any:
    """The error on this rank, and whether parameters and optimizer are as they were."""
    os.chdir(folder)
    rig = Rig(world)
    before = rig.values()
    try:
        ROWS[number][0](rig)
    except ShoalError as error:
        return error, rig.values() == before
    return None


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[row[0].__name__ for row in ROWS])
def test_all_ranks_raise_the_same(ranks: Ranks, number: int, tmp_path: Path) -> None:
    _, kind, *wanted = ROWS[number]
    results = ranks.call(provoke, number, str(tmp_path))
    for error, untouched in results:
        assert type(error) is kind
        for name, pattern in zip(("given", "found", "fix"), wanted, strict=True):
            assert re.search(pattern, getattr(error, name)), f"{name}: {getattr(error, name)}"
        assert untouched


def poisoned(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    total, count = loss(output, batch)
    return (total * torch.inf if BAD_SAMPLE in batch[2] else total), count


def go_on(world: shoal.World, how: str, skip: bool) -> Any:
    """Train over a batch with a loss that is not finite, or leave that batch out."""
    rig = Rig(world)
    step = rig.step(poisoned, clip=0.1 if how == "Step" else None)
    told = []
    for batch in rig.loader().epochs(1):
        if skip and batch.first <= BAD_SAMPLE < batch.first + batch.size:
            continue
        before = rig.values()
        try:
            if how == "Step":
                step(batch)
            else:
                for micro in batch:
                    total, count = poisoned(rig.model(micro[0]), micro)
                    batch.backward(total=total, count=count, model=rig.model)
                batch.finish(rig.model, clip=0.1)
                rig.optimizer.step()
                rig.optimizer.zero_grad()
        except StepError as error:
            assert rig.values() == before
            assert all(p.grad is None for p in rig.model.parameters())
            told.append((error.given, error.found))
    return told, rig.values()


@pytest.mark.parametrize("how", ["Step", "loop"])
def test_a_loss_that_is_not_finite_is_survived_by_all(ranks: Ranks, how: str) -> None:
    results = ranks.call(go_on, how, False)
    without = ranks.call(go_on, how, True)
    for rank, ((told, values), (nothing, same)) in enumerate(zip(results, without, strict=True)):
        first = 6 + 2 * rank
        assert told == [
            (
                f"the batch at samples 6 to 11 (this rank: {first} to {first + 1})",
                "a loss of inf, over all ranks; the parameters were not changed",
            )
        ]
        assert nothing == []
        assert values == same


def test_a_port_in_use_is_told_by_the_rank_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(LaunchError) as caught:
            shoal.init()
    assert caught.value.given == f"rank 0 of 2 at tcp://127.0.0.1:{port} (torchrun)"
    assert caught.value.found == f"port {port} is in use"
    assert "export MASTER_PORT=" in caught.value.fix

"""Mistakes in training on several ranks that would give wrong numbers: each raises, on all ranks."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import cross_entropy, sgd, take
from shoal.distributed.consistency import check_same_environment
from shoal.strategies.dtensor import whole
from shoal.util.errors import AgreementError, StepError

pytestmark = pytest.mark.processes

SAMPLES, BATCH = 24, 8


def loader(world: shoal.World, unlike: int) -> shoal.Loader:
    """Batches of data that rank `unlike` has others of; -1 for none."""
    generator = torch.Generator().manual_seed(1 if world.rank == unlike else 0)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return shoal.Loader((inputs, torch.arange(SAMPLES) % 3), world, batch_size=BATCH)


def counted(world: shoal.World, own: bool) -> tuple[list[int], str, str]:
    """Collectives of each step of a first Loader, and what a second one with unlike data raises."""
    model = shoal.parallelize(nn.Linear(6, 3), world)
    optimizer = sgd(model)
    step = None if own else shoal.Step(model, optimizer, shoal.Task(cross_entropy))

    def train(batch: shoal.Batch) -> None:
        take(batch, model, optimizer, cross_entropy) if step is None else step(batch)

    check_same_environment(world)
    sequence: Any = world.group
    found = []
    for batch in loader(world, -1).epochs(1):
        before = sequence._get_sequence_number_for_group()
        train(batch)
        found.append(sequence._get_sequence_number_for_group() - before)
    before_second = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(AgreementError) as caught:
        train(next(loader(world, 1).epochs(1)))
    assert all(map(torch.equal, before_second, model.parameters()))
    return found, caught.value.given, caught.value.fix


@pytest.mark.parametrize("own", [False, True], ids=["step", "own loop"])
def test_the_data_of_each_loader_are_compared_at_its_first_batch_alone(two: Ranks, own: bool) -> None:
    for (first, second, third), given, fix in two.call(counted, own):
        assert first > second == third
        assert "the loader's samples" in given
        assert "generate data before shoal.parallelize" in fix


def without_finish(world: shoal.World) -> str:
    """The error of a step inside of the loop over micro-batches, which is none after `finish`."""
    model = shoal.parallelize(nn.Linear(6, 3), world)
    optimizer = torch.optim.AdamW(model.parameters())
    first, second, _ = loader(world, -1).epochs(1)
    for x, y in first:
        first.backward(mean=F.cross_entropy(model(x), y), count=len(y), model=model)
        with pytest.raises(StepError) as caught:
            optimizer.step()
    optimizer.zero_grad()
    for x, y in second:
        second.backward(mean=F.cross_entropy(model(x), y), count=len(y), model=model)
        second.finish(model)
        optimizer.step()
        optimizer.zero_grad()
    assert whole(optimizer.state[model.weight]["exp_avg"]).any()
    return caught.value.given


def compiled_parts(world: shoal.World) -> list[str]:
    """A compiled model where units are compiled one by one, and the bare one compiled afterwards."""
    with pytest.raises(StepError, match="compile the parts of a model separately"):
        shoal.parallelize(torch.compile(nn.Linear(6, 3), backend="eager"), world)
    model = shoal.parallelize(nn.Linear(6, 3), world)
    whole: Any = torch.compile(model, backend="eager")
    take(next(loader(world, -1).epochs(1)), whole, sgd(model), cross_entropy)
    return list(model.state_dict())


def test_a_forgotten_finish_raises_on_all_ranks_and_divided_models_are_compiled(two: Ranks) -> None:
    for layout in ("replicate=-1", "shard=-1"):
        two.divide(layout)
        assert two.call(without_finish) == ["optimizer.step()"] * 2
    assert two.call(compiled_parts) == [["weight", "bias"]] * 2
    two.divide("replicate=-1")


class Graphs:
    """A batch that can't be cut in halves."""

    def __init__(self, items: list[tuple[Tensor, Tensor]]) -> None:
        self.x, self.y = (torch.cat([item[n] for item in items]) for n in range(2))


def of_graphs(world: shoal.World, reduction: str, samples: int) -> str | None:
    items = [(torch.randn(3 + n % 4, 6), torch.zeros(3 + n % 4, dtype=torch.long)) for n in range(24)]
    model = shoal.parallelize(nn.Linear(6, 3), world)

    def loss(output: Tensor, batch: Graphs) -> tuple[Tensor, int]:
        return F.cross_entropy(output, batch.y, reduction=reduction), len(batch.y)

    step = shoal.Step(model, sgd(model), shoal.Task(loss, inputs=lambda batch: batch.x))
    data = shoal.Loader(items, world, batch_size=samples, collate_fn=Graphs)
    try:
        step(next(data.epochs(1)))
    except StepError as error:
        return error.found
    return None


@pytest.mark.parametrize("samples", [2, 3, 8])
def test_a_mean_over_batches_that_cannot_be_cut_raises(two: Ranks, samples: int) -> None:
    for found in two.call(of_graphs, "mean", samples):
        assert found is not None
        assert "it is a mean, not a sum" in found
    assert two.call(of_graphs, "sum", samples) == [None, None]


class Drawn(torch.utils.data.Dataset[Any]):
    """Samples that its constructor draws, as scripts for one process do."""

    def __init__(self) -> None:
        self.images = torch.randn(16, 4)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 2


def printed(world: shoal.World, early: bool) -> str:
    """What a first batch prints, of a dataset drawn before the generators differ by rank or after."""
    world.reseed("data", by_rank=not early)
    data = shoal.Loader(torch.utils.data.Subset(Drawn(), range(12)), world, batch_size=4)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        data.compare_ranks()
    return out.getvalue()


def test_a_dataset_that_holds_other_arrays_on_a_rank_is_named(two: Ranks) -> None:
    first, *others = two.call(printed, False)
    assert "dataset's dataset.images differs between ranks (rank 1)" in first
    assert two.call(printed, True) == [""] * (1 + len(others))


def stepped_apart(world: shoal.World) -> str:
    """What is printed when a plain loop trains a parallelized model."""
    model = shoal.parallelize(nn.Linear(6, 3), world)
    optimizer = sgd(model)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        optimizer.step()  # without gradients nothing happens
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
    return printed.getvalue()


def test_a_plain_loop_over_a_parallelized_model_is_reported_once(two: Ranks) -> None:
    first, second = two.call(stepped_apart)
    assert first.count("each rank trains on its own gradients") == 1
    assert second == ""

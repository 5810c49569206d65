"""A Loader, a Run and evaluate around models that DDP and FSDP2 train, without parallelize."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shoal
from helpers.ranks import Ranks
from shoal.strategies.dtensor import whole

pytestmark = pytest.mark.processes

SAMPLES = 101


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.arange(SAMPLES) % 3, torch.arange(SAMPLES)


def network(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    between = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 3)).double()


def prepared(world: shoal.World, how: str) -> nn.Module:
    """The model as a script that knows nothing of Shoal would have it."""
    model = network()
    if how == "fsdp":
        fully_shard(model)
        return model
    return DistributedDataParallel(model, process_group=world.group) if world.size > 1 else model


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def train(
    world: shoal.World, directory: Path, how: str, micro_batches: int = 1, kill_at: int = -1
) -> dict[str, Any]:
    model = prepared(world, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = shoal.Loader(data(), world, batch_size=16, micro_batches=micro_batches)
    seen: list[tuple[int, int]] = []
    losses = []
    with shoal.Run(directory, model, loader, optimizer=optimizer, schedule=schedule) as run:
        run.restore()
        for batch in loader.epochs(2):
            for inputs, labels, numbers in batch:
                total = F.cross_entropy(model(inputs), labels, reduction="sum")
                batch.averaged(total).backward()
                seen += [(batch.epoch, int(n)) for n in numbers if batch.micro.weight]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(run.train_states["step"].last.loss)  # type: ignore[union-attr]
            run.tick(every=2)
            if run.step == kill_at:
                run.save()
                os.kill(os.getpid(), signal.SIGKILL)
        scores = shoal.evaluate(model, data(), task=shoal.Task(loss), world=world)
    parameters = [whole(each.detach()).flatten() for each in model.parameters()]
    return {"seen": seen, "scores": scores, "losses": losses, "end": torch.cat(parameters)}


def plain() -> torch.Tensor:
    """The parameters after a loop of plain torch over the same batches in one process."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    with shoal.init() as world:
        for batch in shoal.Loader(data(), world, batch_size=16).epochs(2):
            for inputs, labels, _ in batch:
                F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize(
    ("how", "size", "micro_batches"), [("ddp", 1, 1), ("ddp", 3, 2), ("fsdp", 2, 1)]
)
def test_any_number_of_ranks_trains_as_one_process(
    tmp_path: Path, how: str, size: int, micro_batches: int
) -> None:
    """101 samples in batches of 16: the last one of an epoch has 5, some ranks one more than others."""
    expected = plain()
    with Ranks(size) as ranks:
        results = ranks.call(train, tmp_path, how, micro_batches)
    for result in results:
        torch.testing.assert_close(result["end"], expected, rtol=0, atol=1e-12)
        assert result["scores"]["samples"] == SAMPLES
        assert result["losses"] == results[0]["losses"]
    counts = Counter(each for result in results for each in result["seen"])
    assert counts == Counter((epoch, number) for epoch in range(2) for number in range(SAMPLES))


def test_a_killed_run_goes_on_at_the_next_sample_with_other_ranks(tmp_path: Path) -> None:
    with Ranks(3) as ranks:
        assert ranks.call_until_killed(train, tmp_path, "ddp", 1, 5) is None
    with Ranks(2) as ranks:
        results = ranks.call(train, tmp_path, "ddp")
    torch.testing.assert_close(results[0]["end"], plain(), rtol=0, atol=1e-12)
    counts = Counter(each for result in results for each in result["seen"])
    assert set(counts.values()) == {1}
    assert len(counts) == 2 * SAMPLES - 5 * 16


def evaluate_apart(world: shoal.World, what: str) -> dict[str, float]:
    model = network(norm=True)
    with torch.no_grad():
        model.get_parameter("2.bias")[0] += world.rank * (what == "parameter")
        model.get_buffer("1.running_mean")[0] += world.rank * (what == "buffer")
    return shoal.evaluate(model, data(), task=shoal.Task(loss), world=world)


def test_ranks_with_other_parameters_are_refused_and_buffers_are_rank_0s() -> None:
    with Ranks(2) as ranks:
        for error in ranks.errors(shoal.StepError, evaluate_apart, "parameter"):
            assert "2.bias differs between ranks" in str(error)
        several = ranks.call(evaluate_apart, "buffer")
    with Ranks(1) as ranks:
        (alone,) = ranks.call(evaluate_apart, "buffer")
    assert several == [pytest.approx(alone, rel=1e-12)] * 2


def open_with_parts(world: shoal.World, directory: Path) -> None:
    model = network()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=world.group, lr=1e-2
    )
    shoal.Run(directory, model, shoal.Loader(data(), world, batch_size=16), optimizer=optimizer)


def test_optimizers_and_parameters_in_parts_are_refused(tmp_path: Path, world: shoal.World) -> None:
    with Ranks(2) as ranks:
        for error in ranks.errors(shoal.StepError, open_with_parts, tmp_path):
            assert "each rank has a part of its state" in str(error)
    model = network()
    vars(model.get_parameter("0.weight"))["ds_id"] = 0
    with pytest.raises(shoal.StepError, match="DeepSpeed keeps its parameters"):
        shoal.evaluate(model, data(), task=shoal.Task(loss), world=world)


def train_apart(world: shoal.World, directory: Path) -> None:
    """A script that has forgotten DDP."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = shoal.Loader(data(), world, batch_size=16)
    with shoal.Run(directory, model, loader, optimizer=optimizer):
        for batch in loader.epochs(1):
            for inputs, labels, _ in batch:
                F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def test_ranks_that_train_apart_are_told_after_one_step(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        for error in ranks.errors(shoal.StepError, train_apart, tmp_path):
            assert "0.weight differs between ranks" in str(error)


def test_a_model_that_was_forgotten_is_still_an_error(world: shoal.World) -> None:
    model = network()
    with pytest.raises(shoal.StepError, match="not parallelized"):
        shoal.evaluate(model, data(), task=shoal.Task(loss))
    with pytest.raises(shoal.StepError, match="not parallelized"):
        shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))


def local_numbers(world: shoal.World, state: dict[str, Any] | None, stop: int) -> Any:
    batches = shoal.LocalBatches(shoal.Loader(data(), world, batch_size=16, seed=1))
    if state is not None:
        batches.load_state_dict(state)
    seen = []
    for epoch in range(2):
        for count, (_, _, numbers) in enumerate(batches, 1):
            assert batches.batch is not None
            seen += [(epoch, int(n)) for n in numbers if batches.batch.micro.weight]
            if count == stop:
                return seen, batches.state_dict()
    return seen, batches.state_dict()


def test_local_batches_go_on_within_an_epoch_with_other_ranks() -> None:
    with Ranks(3) as ranks:
        first = ranks.call(local_numbers, None, 4)
    with Ranks(2) as ranks:
        second = ranks.call(local_numbers, first[0][1], -1)
    counts = Counter(each for seen, _ in [*first, *second] for each in seen)
    assert counts == Counter((epoch, number) for epoch in range(2) for number in range(SAMPLES))


def test_local_batches_of_micro_batches_are_refused(world: shoal.World) -> None:
    with pytest.raises(shoal.DataError, match=r"not a shoal\.Loader"):
        shoal.LocalBatches([1, 2])  # type: ignore[arg-type]
    loader = shoal.Loader(data(), world, batch_size=16, micro_batches=2)
    with pytest.raises(shoal.DataError, match="a step after each"):
        next(iter(shoal.LocalBatches(loader)))


def test_a_batch_without_a_step_is_not_repeated(world: shoal.World, tmp_path: Path) -> None:
    """As a GradScaler decides for gradients that overflow, here of the first and the third batch."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = shoal.Loader(data(), world, batch_size=16)
    with shoal.Run(tmp_path, model, loader, optimizer=optimizer) as run:
        for number, batch in enumerate(loader.epochs(1)):
            for inputs, labels, _ in batch:
                F.cross_entropy(model(inputs), labels).backward()
            if number not in (0, 2):
                optimizer.step()
            optimizer.zero_grad()
            run.tick()
            if number == 2:
                run.save()
                break
    again = shoal.Loader(data(), world, batch_size=16)
    with shoal.Run(tmp_path, model, again, optimizer=optimizer) as run:
        run.restore()
        assert (run.step, again.position) == (1, 48)


def test_a_tick_between_micro_batches_is_refused(world: shoal.World, tmp_path: Path) -> None:
    """A save would have the position after the batch, and the optimizer from before it."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = shoal.Loader(data(), world, batch_size=16, micro_batches=2)
    with shoal.Run(tmp_path, model, loader, optimizer=optimizer) as run:
        for batch in loader.epochs(1):
            for inputs, labels, _ in batch:
                F.cross_entropy(model(inputs), labels).backward()
                with pytest.raises(shoal.StepError, match="outside the loop over the batch"):
                    run.tick(every=1)
                break
            break


def test_a_loss_without_averaged_is_told(
    world: shoal.World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = shoal.Loader(data(), world, batch_size=16)
    with shoal.Run(tmp_path, model, loader, optimizer=optimizer) as run:
        for batch in loader.epochs(1):
            for inputs, labels, _ in batch:
                F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            run.tick()
    assert capsys.readouterr().out.count("does not pass its loss through batch.averaged") == 1


def test_losses_that_are_no_sums_are_refused(world: shoal.World) -> None:
    model = network()
    (batch,) = shoal.Loader(data(), world, batch_size=SAMPLES).epochs(1)
    for inputs, labels, _ in batch:
        rows = F.cross_entropy(model(inputs), labels, reduction="none")
        for loss, found in (
            (F.cross_entropy(model(inputs), labels), "a mean, not a sum"),
            (rows.mean(), "a mean, not a sum"),
            (rows, r"not shape \(101,\)"),
            (3.0, "not float"),
        ):
            with pytest.raises(shoal.StepError, match=found):
                batch.averaged(loss)  # type: ignore[arg-type]
        assert batch.averaged(rows.sum()).item() == pytest.approx(rows.mean().item())

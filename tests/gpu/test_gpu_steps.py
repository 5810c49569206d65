"""One process on a device: its steps do not wait, its numbers are those of the CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from helpers import batch_norms
from helpers.accelerators import counted_waits, keep_busy, no_waits, on_accelerator
from helpers.device_training import (
    BATCH,
    CLASSES,
    SAMPLES,
    TOLERANCES,
    WIDTH,
    Training,
    by_hand,
    dataset,
    loss,
)
from helpers.reference import SEED, TOLERANCE, distance
from shoal.checkpoint.async_save import Staging
from shoal.telemetry.step_timer import OTHER
from shoal.util import accelerator


@pytest.fixture
def world(device: str) -> Iterator[shoal.World]:
    with shoal.init(device=device, seed=SEED) as alone:
        yield alone


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("layout", ["replicate=1", "shard=1", "replicate=1,shard=1"])
def test_a_world_of_one_trains_like_plain_torch(device: str, layout: str, dtype: torch.dtype) -> None:
    with shoal.init(layout=layout, device=device, seed=SEED) as world:
        found = Training(world, dtype, micro_batches=2).losses()
        assert found == pytest.approx(by_hand(world.device, dtype), rel=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_and_the_next_batch_make_no_wait(
    world: shoal.World, dtype: torch.dtype, micro_batches: int
) -> None:
    """Nor does the copy of a batch. In the first step, Shoal compares and tries the loss."""
    training = Training(world, dtype, micro_batches=micro_batches, result="late")
    batches = training.loader.epochs(2)
    results = [training.step(next(batches))]
    with no_waits(world.device):
        results += [training.step(batch) for batch in batches]
    now = Training(world, dtype, micro_batches=micro_batches, result="now").losses()
    assert [result.loss for result in results] == now


def test_results_are_late_where_the_device_can_skip_a_step(world: shoal.World) -> None:
    mode = Training(world).step.result_mode.value
    assert mode == ("late" if accelerator.is_accelerator(world.device) else "now")


def test_a_tick_and_logged_tensors_make_no_wait(world: shoal.World, tmp_path: Path) -> None:
    training = Training(world, result="late")
    batches = training.loader.epochs(2)
    with shoal.Run(tmp_path, training.step, training.loader, trackers=()) as run:
        training.step(next(batches))
        run.tick()
        with no_waits(world.device):
            for batch in batches:
                training.step(batch)
                world.log({"mean": batch.micros[0].value[0].mean()})
                run.tick()
    events = (tmp_path / "events" / "rank-0.jsonl").read_text()
    assert events.count('"mean"') == 2 * SAMPLES // BATCH - 1


def test_an_evaluation_waits_twice(world: shoal.World) -> None:
    """For its sums and at its end, whatever the number of batches and metrics."""
    training = Training(world)
    training.losses(1)
    with counted_waits(world.device) as waits:
        found = shoal.evaluate(
            training.step, dataset(), metrics={"accuracy": shoal.Accuracy()}, batch_size=BATCH
        )
    assert len(waits) <= 2, waits
    inputs, labels = (column.to(world.device) for column in dataset())
    training.model.eval()
    with torch.no_grad():
        output = training.model(inputs)
    assert found["loss"] == pytest.approx(F.cross_entropy(output, labels).item(), rel=1e-4)
    assert found["accuracy"] == pytest.approx((output.argmax(1) == labels).float().mean().item())


def test_a_loss_that_is_not_finite_changes_nothing(world: shoal.World) -> None:
    training = Training(world, result="late")
    batches = training.loader.epochs(2)
    training.step(next(batches))
    training.step(next(batches))
    before = [p.detach().clone() for p in training.model.parameters()]
    bad = next(batches)
    bad.micros[0].value[0].fill_(torch.nan)
    training.step(bad)
    with pytest.raises(shoal.StepError, match="late"):
        training.step(next(batches))
    assert all(map(torch.equal, before, training.model.parameters()))
    assert training.step.number == 2


def test_random_numbers_are_those_of_the_samples_on_the_cpu(world: shoal.World) -> None:
    found = Training(world, torch.float64, micro_batches=3, dropout=0.3).losses()
    with shoal.init(device="cpu", seed=SEED) as cpu:
        expected = Training(cpu, torch.float64, dropout=0.3).losses()
    assert found == pytest.approx(expected, rel=1e-9)
    assert found != pytest.approx(by_hand(world.device, torch.float64), rel=1e-2)


@pytest.mark.parametrize(("statistics", "micro_batches"), [("batch", 1), (4, 3)])
def test_batch_norm_normalizes_groups_as_on_the_cpu(
    world: shoal.World, statistics: int | str, micro_batches: int
) -> None:
    case = batch_norms.Case("Single", "replicate=1", statistics, micro_batches)
    found = batch_norms.train(world, case)
    assert distance(found, batch_norms.specification(statistics)) < TOLERANCE


def test_a_save_copies_what_comes_before_the_next_update(world: shoal.World) -> None:
    """The device is busy, so that the copies have not begun when the tensors change."""
    weight = torch.randn(1 << 20, device=world.device)
    expected = weight.cpu().clone()
    staging = Staging()
    keep_busy(world.device)
    with no_waits(world.device):
        staging.fill({"weight": weight})
        weight.zero_()
    data = b"".join(map(bytes, staging.blocks()))
    assert data.endswith(expected.numpy().tobytes())


@on_accelerator("cuda")
def test_host_memory_is_pinned_to_the_byte() -> None:
    """On the CPU, `tests/util/test_device_waits.py` has it."""
    device = torch.device("cuda", 0)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    buffer = accelerator.pinned(33_000_001, device)
    assert buffer.is_pinned()
    assert buffer.nbytes == 33_000_001
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before


def test_deterministic_runs_have_the_same_bits(device: str) -> None:
    """With an embedding, whose gradients are otherwise summed in any order."""
    found = []
    for _ in range(2):
        with shoal.init(device=device, seed=SEED, deterministic=True) as world:
            torch.manual_seed(3)
            net = nn.Sequential(nn.Embedding(8, WIDTH), nn.Flatten(), nn.Linear(6 * WIDTH, CLASSES))
            model = shoal.parallelize(net, world)
            step = shoal.Step(model, torch.optim.AdamW(model.parameters()), shoal.Task(loss))
            tokens = torch.arange(6 * SAMPLES).reshape(SAMPLES, 6) % 8
            loader = shoal.Loader((tokens, dataset()[1]), world, batch_size=BATCH, seed=SEED)
            losses = [step(batch).loss for batch in loader.epochs(4)]
            found.append((losses, [p.detach().cpu() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_the_parts_of_steps_add_up_to_their_time(world: shoal.World) -> None:
    """By the clock of the device, whose marks the host does not wait for."""
    training = Training(world)
    training.losses(1)
    accelerator.synchronize(world.device)
    world.timeline.enter(OTHER)
    accelerator.synchronize(world.device)
    before, begun = world.timeline.take(), time.perf_counter()
    for batch in itertools.islice(training.loader.epochs(20), 100):
        training.step(batch)
    world.timeline.enter(OTHER)
    accelerator.synchronize(world.device)
    wall, after = time.perf_counter() - begun, world.timeline.take()
    parts = (sum(after[1:]) - sum(before[1:])) / 1e9
    assert parts == pytest.approx(wall, rel=0.1)

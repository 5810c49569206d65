"""Rows of the sources in one process or several: plain torch and Shoal come to the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal
from helpers import practice_models as p
from helpers.ranks import Ranks
from shoal.distributed.consistency import sources


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_row_01_data_parallel(world: shoal.World) -> None:
    model = p.build()
    wrapped = nn.DataParallel(model)
    p.plain(wrapped, p.adam(wrapped))
    p.assert_same(p.converted(world, shoal.DataParallel())[0], p.state(model))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_row_06_pinned_batches_on_the_device(world: shoal.World) -> None:
    loader = DataLoader(p.data(), batch_size=p.BATCH, pin_memory=True)
    theirs = [[part.to("cuda", non_blocking=True) for part in batch] for batch in loader]
    ours = shoal.Loader(p.data(), world, batch_size=p.BATCH, shuffle=False, pin_memory=True)
    batches = [micro for batch in ours.epochs(1) for micro in batch]
    assert len(batches) == len(theirs)
    for mine, other in zip(batches, theirs, strict=True):
        assert all(torch.equal(a, b) and a.is_cuda for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_row_10_mixed_precision(world: shoal.World, precision: str, dtype: torch.dtype) -> None:
    """autocast and, for fp16, GradScaler; the first steps overflow and are skipped by both."""

    def build() -> nn.Module:
        model = p.build()
        model.float()
        with torch.no_grad():
            next(model[2].parameters()).mul_(60)
        return model

    model = build()
    optimizer = p.adam(model)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    sampler, loader = p.loaders()
    skipped = 0
    for epoch in range(p.EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(inputs.float()), labels)
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
            optimizer.zero_grad()

    ours = shoal.parallelize(build(), world)
    task = shoal.Task(p.loss, inputs=lambda batch: batch[0].float())
    step = shoal.Step(ours, p.adam(ours), task, precision=precision)
    batches = shoal.Loader(p.data(), world, batch_size=p.BATCH).epochs(p.EPOCHS)
    results = [step(batch) for batch in batches]
    assert sum(result.skipped for result in results) == skipped
    assert skipped > 0 or precision == "bf16"
    p.assert_same(p.state(ours), p.state(model), tolerance=1e-2)


def both(world: shoal.World, bucket_mb: float) -> tuple[p.State, p.State]:
    ours = p.converted(world, shoal.DDP(bucket_cap_mb=bucket_mb))[0]
    return ours, p.plain_ddp(bucket_mb)


@pytest.mark.compat
@pytest.mark.parametrize("bucket_mb", [25.0, 0.0003])
def test_rows_02_and_11_distributed_data_parallel(two: Ranks, bucket_mb: float) -> None:
    """Also in buckets of a few hundred bytes, each reduced while backward goes on."""
    for ours, theirs in two.call(both, bucket_mb):
        p.assert_same(ours, theirs)


def shares(world: shoal.World, shuffle: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Per step, the samples that this rank gets in two epochs: Shoal's, and those of the sources."""
    data = TensorDataset(torch.arange(p.SAMPLES))
    loader = shoal.Loader(data, world, batch_size=p.BATCH, shuffle=shuffle)
    ours = [micro[0].tolist() for batch in loader.epochs(2) for micro in batch]
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=shuffle)
    plain = DataLoader(data, batch_size=p.BATCH // world.size, sampler=sampler)
    theirs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        theirs += [batch.tolist() for (batch,) in plain]
    return ours, theirs


@pytest.mark.parametrize("shuffle", [False, True])
def test_row_07_distributed_sampler_with_set_epoch(two: Ranks, shuffle: bool) -> None:
    results = two.call(shares, shuffle)
    whole = []
    for which in (0, 1):
        ranks = [result[which] for result in results]
        assert [[len(step) for step in rank] for rank in ranks] == [[p.BATCH // 2] * 8] * 2
        steps = [sorted(one + other) for one, other in zip(*ranks, strict=True)]
        for epoch in (steps[:4], steps[4:]):
            assert sorted(sample for step in epoch for sample in step) == list(range(p.SAMPLES))
        assert (steps[:4] != steps[4:]) is shuffle
        whole.append(steps)
    assert (whole[0] == whole[1]) is not shuffle  # in order they are the same global batches


def initialised(world: shoal.World) -> tuple[p.State, p.State, dict[str, str]]:
    """Parameters by Shoal's seed, those by torch's of a source, and what ranks compare."""
    world.reseed("weights", by_rank=False)  # as init does
    ours = p.state(torch.nn.Linear(5, 5))
    torch.manual_seed(world.rank)  # ranks that forgot to seed alike
    spread = p.state(shoal.parallelize(torch.nn.Linear(5, 5), world))
    return ours, spread, sources()


def test_row_08_consistent_initialisation(two: Ranks) -> None:
    (first, spread, code), *others = two.call(initialised)
    for other, other_spread, other_code in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
        assert all(torch.equal(spread[name], other_spread[name]) for name in spread)
        assert code == other_code
    torch.manual_seed(0)
    plain = p.state(torch.nn.Linear(5, 5))  # DistributedDataParallel sends rank 0's, seeded with 0
    assert all(torch.equal(spread[name], plain[name]) for name in plain)


STOP = 1
"""The epoch after which training is stopped."""


def plain_until_stopped(world: shoal.World, path: Path) -> None:
    model = p.build()
    parallel = DistributedDataParallel(model)
    optimizer = p.adam(parallel)
    losses = p.plain(parallel, optimizer, range(STOP))
    state = {"model": parallel.state_dict(), "optimizer": optimizer.state_dict(), "loss": losses[-1]}
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def plain_resumed(world: shoal.World, path: Path) -> p.State:
    checkpoint = torch.load(path, map_location=world.device, weights_only=True)
    model = p.build()
    parallel = DistributedDataParallel(model)
    optimizer = p.adam(parallel)
    parallel.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    p.plain(parallel, optimizer, range(STOP, p.EPOCHS))
    return p.state(model)


def run_until(world: shoal.World, directory: Path, epochs: int) -> tuple[int | None, p.State]:
    model = shoal.parallelize(p.build(), world)
    step = shoal.Step(model, p.adam(model), shoal.Task(p.loss))
    loader = shoal.Loader(p.data(), world, batch_size=p.BATCH)
    with shoal.Run(directory, step, loader) as run:
        restored = run.restore()
        for batch in loader.epochs(epochs):
            step(batch)
            run.tick()
        run.save()
    return restored and restored.epoch, p.state(model)


@pytest.mark.compat
def test_row_12_checkpoints(two: Ranks, tmp_path: Path) -> None:
    two.call(plain_until_stopped, tmp_path / "checkpoint.pth")
    theirs = two.call(plain_resumed, tmp_path / "checkpoint.pth")
    two.call(run_until, tmp_path / "run", STOP)
    for (epoch, ours), plain in zip(
        two.call(run_until, tmp_path / "run", p.EPOCHS), theirs, strict=True
    ):
        assert epoch == STOP
        p.assert_same(ours, plain)


def validated(world: shoal.World, samples: int) -> tuple[dict[str, Any], dict[str, float]]:
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(5)).double()
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    model = shoal.parallelize(p.build(), world)
    step = shoal.Step(model, p.adam(model), shoal.Task(p.loss))
    ours = shoal.evaluate(step, data, metrics={"accuracy": shoal.Accuracy()}, batch_size=20)

    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=False)
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for images, labels in DataLoader(data, batch_size=20 // world.size, sampler=sampler):
        with torch.no_grad():
            outputs = model(images)
            values = (F.cross_entropy(outputs, labels), (outputs.argmax(1) == labels).double().mean())
        sums += torch.stack(values) * images.size(0) / samples
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    model.train()
    return ours, dict(zip(("loss", "accuracy"), sums.tolist(), strict=True))


def test_row_13_distributed_validation(two: Ranks) -> None:
    for ours, theirs in two.call(validated, 90):  # the last batch is a short one
        assert ours["samples"] == 90
        assert theirs == pytest.approx({name: ours[name] for name in theirs}, rel=1e-12)
    # 91 samples on two ranks: the sources count one of them twice, Shoal does not.
    [(ours, theirs), _] = two.call(validated, 91)
    assert ours["samples"] == 91
    assert theirs["loss"] > ours["loss"] * (1 + 1e-4)

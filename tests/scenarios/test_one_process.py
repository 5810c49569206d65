"""Rows of the sources that need one process: plain torch and Shoal come to the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import shoal
from helpers import practice_models as p
from shoal.distributed import env_vars
from shoal.distributed.device import choose_device


@pytest.fixture
def world() -> Iterator[shoal.World]:
    with shoal.init() as world:
        yield world


def test_row_01_data_parallel(world: shoal.World) -> None:
    model = p.build()
    wrapped = nn.DataParallel(model)
    p.plain(wrapped, p.adam(wrapped))
    p.assert_same(p.converted(world, shoal.DataParallel())[0], p.state(model))


@pytest.mark.parametrize("local_rank", range(4))
def test_row_06_device_by_local_rank(monkeypatch: pytest.MonkeyPatch, local_rank: int) -> None:
    """As `torch.cuda.set_device(idr_torch.local_rank)`, on the second of two nodes of four GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    variables = {
        "RANK": str(4 + local_rank),
        "WORLD_SIZE": "8",
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "12345",
    }
    assert choose_device(None, env_vars.placement(variables)).value == torch.device("cuda", local_rank)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_row_06_pinned_batches_on_the_device(world: shoal.World) -> None:
    loader = DataLoader(p.data(), batch_size=p.BATCH, pin_memory=True)
    theirs = [[part.to("cuda", non_blocking=True) for part in batch] for batch in loader]
    ours = shoal.Loader(p.data(), world, batch_size=p.BATCH, shuffle=False, pin_memory=True)
    batches = [micro for batch in ours.epochs(1) for micro in batch]
    assert len(batches) == len(theirs)
    for mine, other in zip(batches, theirs, strict=True):
        assert all(torch.equal(a, b) and a.is_cuda for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("accumulation_steps", [2, 4])
def test_row_09_gradient_accumulation(world: shoal.World, accumulation_steps: int) -> None:
    model = p.build()
    optimizer = p.adam(model)
    sampler = p.InOrder(p.data(), num_replicas=1, rank=0)
    loader = DataLoader(p.data(), batch_size=p.BATCH // accumulation_steps, sampler=sampler)
    for epoch in range(p.EPOCHS):
        sampler.set_epoch(epoch)
        for index, (inputs, labels) in enumerate(loader):
            loss = F.cross_entropy(model(inputs), labels) / accumulation_steps
            loss.backward()
            if (index + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    p.assert_same(p.converted(world, micro_batches=accumulation_steps)[0], p.state(model))


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_row_16_eager_and_script_mode(world: shoal.World) -> None:
    model = p.build()
    scripted = torch.jit.script(model)
    p.plain(scripted, p.adam(scripted))
    p.assert_same(p.converted(world, compile="script")[0], p.state(model))


class Drawn(Dataset[tuple[int, Tensor]]):
    """A Dataset as the sources have it: a length and a sample for each index."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.full((3,), float(index))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_row_17_dataset_loader_sampler_workers(world: shoal.World, num_workers: int) -> None:
    order = shoal.Permutation(23, seed=0)
    theirs = list(DataLoader(Drawn(), batch_size=5, sampler=list(order), num_workers=num_workers))
    loader = shoal.Loader(Drawn(), world, batch_size=5, num_workers=num_workers)
    ours = [micro for batch in loader.epochs(1) for micro in batch]
    assert len(ours) == len(theirs) == 5
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_row_18_scatter_replicate_gather(world: shoal.World) -> None:
    """By hand, with two replicas on the CPU; Shoal's DataParallel has one there."""
    model = p.build()
    optimizer = p.adam(model)
    sampler, loader = p.loaders()
    for epoch in range(p.EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            replicas = [copy.deepcopy(model) for _ in range(2)]
            outputs = [net(part) for net, part in zip(replicas, inputs.chunk(2), strict=True)]
            F.cross_entropy(torch.cat(outputs), labels).backward()
            for own, *parts in zip(*(net.parameters() for net in (model, *replicas)), strict=True):
                own.grad = sum((part.grad for part in parts), torch.zeros_like(own))
            optimizer.step()
    p.assert_same(p.converted(world, shoal.DataParallel())[0], p.state(model))

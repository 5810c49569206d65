"""exact="bits": the same SHA-256 of all state on any number of ranks, and through kills."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from helpers.ranks import Ranks
from shoal.distributed.virtual_ranks import virtual_ranks_of
from shoal.strategies.data_parallel.summation_tree import TreeSum, subtrees

SAMPLES, BATCH, STEPS, WIDTH = 44, 20, 20, 7
# The last batch of an epoch has 2 groups, so that rank 0 of 3 has empty virtual ranks only.
GROUP = 2
LONG_STEPS = 1_000


def joined(one: str, other: str) -> str:
    return f"({one}{other})"


@pytest.mark.parametrize("total", range(1, 13))
def test_any_number_of_ranks_adds_with_the_same_parentheses(total: int) -> None:
    found = set()
    for ranks in range(1, total + 1):
        everyone = TreeSum(total, joined)
        for rank in range(ranks):
            _, start, stop = virtual_ranks_of(rank, ranks=ranks, total=total)
            local = TreeSum(total, joined)
            for leaf in range(start, stop):
                local.push(leaf, leaf + 1, f"<{leaf}>")
            assert [node[:2] for node in local.nodes] == subtrees(start, stop, total)
            for node in local.nodes:
                everyone.push(*node)
        ((_, _, sum_),) = everyone.nodes
        found.add(sum_)
    assert len(found) == 1


def make_model() -> nn.Module:
    torch.manual_seed(5)
    wide = [nn.Linear(WIDTH, 33), nn.BatchNorm1d(33), nn.GELU(), nn.Dropout(0.3)]
    return nn.Sequential(*wide, nn.Linear(33, 3))


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return inputs, torch.randint(0, 3, (SAMPLES,), generator=generator)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def train(
    world: shoal.World,
    directory: Path | None = None,
    until: int = STEPS,
    dies_at: int | None = None,
) -> list[str]:
    """Train, after a resume if the directory has a checkpoint; return all that results.

    The last rank kills itself after the step `dies_at`.
    """
    model = shoal.parallelize(make_model(), world, statistics=GROUP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    loader = shoal.Loader(dataset(), world, batch_size=BATCH)
    last = None
    if directory is None:
        for batch in itertools.islice(loader.epochs(9999), until):
            last = step(batch)
    else:
        with shoal.Run(directory, step, loader) as run:
            run.restore()
            for batch in loader.epochs(9999):
                last = step(batch)
                run.tick(every=20)
                if step.number == dies_at and world.rank == world.size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step.number == until:
                    break
            run.save()
    assert last is not None
    evaluated = shoal.evaluate(step, dataset(), metrics={"accuracy": shoal.Accuracy()})
    return [
        digest_of(model, optimizer),
        repr((last.loss, last.norm, last.counted)),
        repr(evaluated),
    ]


def train_in_a_loop(world: shoal.World) -> list[str]:
    """Train in a custom training loop under autocast."""
    model = shoal.parallelize(make_model(), world, statistics=GROUP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = shoal.Loader(dataset(), world, batch_size=BATCH)
    results = []
    for batch in loader.epochs(1):
        for inputs, labels in batch:
            with torch.autocast("cpu", torch.bfloat16):
                output = model(inputs)
            total = F.cross_entropy(output.float(), labels, reduction="sum")
            batch.backward(total=total, count=len(labels))
        results.append(repr(batch.finish(model, clip=1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return [digest_of(model, optimizer), *results]


def train_in_16_bits(world: shoal.World, precision: str) -> list[str]:
    """Train in mixed precision, with checkpointed activations."""
    recomputed = shoal.ActivationCheckpointing(modules=("1", "3"))
    model = shoal.parallelize(make_model(), world, [recomputed, shoal.DDP()], statistics=GROUP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), precision=precision)
    loader = shoal.Loader(dataset(), world, batch_size=BATCH)
    losses = [repr(step(batch).loss) for batch in loader.epochs(1)]
    return [digest_of(model, optimizer), *losses]


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of all tensors of both."""
    state = [*model.state_dict().values(), *_tensors(optimizer.state_dict()["state"])]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state)).hexdigest()


def _tensors(states: dict[int, dict[str, Tensor]]) -> list[Tensor]:
    return [tensor for state in states.values() for tensor in state.values()]


def refused(world: shoal.World) -> list[str]:
    """The errors of what would depend on the number of ranks."""
    found = []
    for strategy, options in (
        (shoal.FSDP(), {"statistics": GROUP}),
        (shoal.DDP(compression="fp16"), {"statistics": GROUP}),
        (None, {}),
        (None, {"statistics": GROUP, "random": "ranks"}),
    ):
        with pytest.raises(shoal.ShoalError, match="bits") as error:
            shoal.parallelize(make_model(), world, strategy, **options)
        found.append(error.value.fix)
    with pytest.raises(shoal.ShoalError, match="virtual ranks"):
        shoal.Loader(dataset(), world, batch_size=BATCH, micro_batches=2)
    return found


@pytest.mark.full
@pytest.mark.processes
def test_all_state_has_the_same_bits_on_one_two_and_three_ranks_and_through_a_kill(
    tmp_path: Path,
) -> None:
    results, others = {}, {}
    for size in (1, 3, 2):
        with Ranks(size, exact="bits") as ranks:
            if size == 1:
                assert len(ranks.call(refused)[0]) == 4
            results[size] = ranks.call(train)
            if size < 3:
                others[size] = [
                    ranks.call(train_in_a_loop),
                    ranks.call(train_in_16_bits, "bf16"),
                    ranks.call(train_in_16_bits, "fp16"),
                ]
            if size == 3:
                ranks.call(train, tmp_path / "run", STEPS // 2)
                ranks.kill()
            elif size == 2:
                results[32] = ranks.call(train, tmp_path / "run")
    expected = results[1][0]
    for found in results.values():
        assert all(each == expected for each in found)
    for alone, together in zip(others[1], others[2], strict=True):
        assert all(each == alone[0] for each in together)


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.processes
def test_a_thousand_steps_have_the_same_bits_through_ten_kills_that_change_the_number(
    tmp_path: Path,
) -> None:
    steps, sizes = LONG_STEPS, (1, 2, 3, 4, 6, 8)
    results = []
    for size in sizes:
        with Ranks(size, exact="bits", call_seconds=900.0) as ranks:
            results += ranks.call(train, None, steps)
    for kill in range(10):
        with Ranks(sizes[(kill + 1) % len(sizes)], exact="bits", call_seconds=900.0) as ranks:
            dies_at = steps * (kill + 1) // 11
            assert ranks.call_until_killed(train, tmp_path / "run", steps, dies_at) is None
    with Ranks(3, exact="bits", call_seconds=900.0) as ranks:
        results += ranks.call(train, tmp_path / "run", steps)
    assert all(each == results[0] for each in results)


def test_a_resume_with_other_virtual_ranks_or_threads_raises_an_error() -> None:
    def loader(world: shoal.World) -> shoal.Loader:
        return shoal.Loader(dataset(), world, batch_size=BATCH)

    with shoal.init(device="cpu", exact="bits", virtual_ranks=4) as world:
        reasons = {decision.what: decision.reason for decision in world.decisions}
        assert "bits" in reasons["deterministic"]
        assert "bits" in reasons["threads"]
        state = loader(world).state_dict()
        loader(world).load_state_dict(state)
        torch.set_num_threads(2)
        with pytest.raises(shoal.DataError, match="2 thread"):
            loader(world).load_state_dict(state)
    with (
        shoal.init(device="cpu", exact="bits") as world,
        pytest.raises(shoal.DataError, match="4 virtual ranks"),
    ):
        loader(world).load_state_dict(state)
    with shoal.init(device="cpu") as world, pytest.raises(shoal.DataError, match="no virtual ranks"):
        loader(world).load_state_dict(state)


def test_a_parameter_that_is_frozen_later_does_not_change() -> None:
    with shoal.init(device="cpu", exact="bits") as world:
        model = shoal.parallelize(make_model(), world, statistics=GROUP)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        step = shoal.Step(model, optimizer, shoal.Task(loss))
        batches = shoal.Loader(dataset(), world, batch_size=BATCH).epochs(1)
        step(next(batches))
        first, *_, last = model.parameters()
        first.requires_grad_(False)
        before = first.clone(), last.clone()
        step(next(batches))
        assert torch.equal(first, before[0])
        assert not torch.equal(last, before[1])


class Checkpointed(nn.Module):
    """A layer that is called twice, in checkpoints with nested backward passes or without."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_parameter_may_not_receive_two_gradients_in_one_backward_pass(reentrant: bool) -> None:
    with shoal.init(device="cpu", exact="bits") as world:
        model = shoal.parallelize(Checkpointed(reentrant), world)
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
        batch = next(shoal.Loader(dataset(), world, batch_size=BATCH).epochs(1))
        if reentrant:
            with pytest.raises(shoal.StepError, match="use_reentrant=False"):
                step(batch)
        else:
            assert step(batch).counted == BATCH

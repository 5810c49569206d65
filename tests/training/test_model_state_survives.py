"""What a model holds besides plain parameters, under each strategy and through a kill (FAILURES 31)."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.killed_training import same
from helpers.ranks import Ranks
from helpers.small_training import cross_entropy

pytestmark = pytest.mark.processes

SAMPLES, BATCH = 22, 8  # 3 steps an epoch
STEPS = 9
STRATEGIES = {
    "ddp": shoal.DDP(find_unused_parameters=True),
    "ddp, small buckets": shoal.DDP(find_unused_parameters=True, bucket_cap_mb=0.0001),
    "single": shoal.SingleProcess(),
    "data parallel": shoal.DataParallel(),
}


class Net(nn.Module):
    """A frozen layer, BatchNorm, a weight of two layers, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.frozen = nn.Linear(4, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.head = nn.Linear(6, 3)
        self.never = nn.Linear(4, 3)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(values))
        output: Tensor = self.head(self.other(self.one(hidden).tanh()).tanh())
        return output


@dataclass(frozen=True)
class Ended:
    model: dict[str, Tensor]
    ema: dict[str, Any]
    tied: bool
    restored: bool
    said: str


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, 3, (SAMPLES,), generator=generator)


def train(world: shoal.World, strategy: Any, directory: Path, steps: int) -> Ended:
    said = io.StringIO()
    model = Net().double()
    with contextlib.redirect_stdout(said):
        shoal.parallelize(model, world, strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ema = shoal.EMA(model, decay=0.7)
        step = shoal.Step(model, optimizer, shoal.Task(cross_entropy), clip=1.0)
        data = shoal.Loader(dataset(), world, batch_size=BATCH)
        with shoal.Run(directory, step, data, state={"ema": ema}) as run:
            restored = run.restore() is not None
            for batch in data.epochs(STEPS):
                step(batch)
                ema.update()
                run.tick(every=STEPS)
                if step.number == steps:
                    break
            run.save()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tied = model.one.weight is model.other.weight
    return Ended(state, ema.state_dict(), tied, restored, said.getvalue())


@pytest.mark.full
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_survive_a_strategy_and_a_resume(name: str, world: shoal.World, tmp_path: Path) -> None:
    def call(directory: str, steps: int) -> list[Ended]:
        arguments = STRATEGIES[name], tmp_path / directory, steps
        if not name.startswith("ddp"):
            return [train(world, *arguments)]
        with Ranks(3) as ranks:
            return ranks.call(train, *arguments)

    before = Net().double().state_dict()
    whole = call("whole", STEPS)
    call("parts", 4)  # in the second epoch
    parts = call("parts", STEPS)
    for ended in (*whole, *parts):
        assert same(ended.model, whole[0].model)  # on every rank, bit for bit, resumed or not
        assert same(ended.ema, whole[0].ema)
        assert ended.tied
    assert [ended.restored for ended in parts] == [True] * len(whole)

    after = whole[0].model
    assert list(after) == list(before)
    stay = ("frozen.", "never.")
    for key, tensor in after.items():
        assert torch.equal(tensor, before[key]) is key.startswith(stay), key
    # Neither the trial of the loss nor what primes the buckets is a batch that it has seen.
    assert after["norm.num_batches_tracked"] == STEPS
    assert whole[0].ema["updates"] == STEPS
    assert not torch.equal(whole[0].ema["averages"]["head.weight"], after["head.weight"])
    assert "does not use: never.weight, never.bias\n" in whole[0].said
    assert all("does not use" not in other.said for other in whole[1:])


def test_in_one_process_it_is_plain_torch(world: shoal.World, tmp_path: Path) -> None:
    ours = train(world, shoal.SingleProcess(), tmp_path, STEPS)
    model = Net().double()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)
    )
    average.update_parameters(model)  # the first one copies
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values, labels = dataset()
    for step in range(STEPS):
        epoch, number = divmod(step, 3)
        order = torch.from_numpy(shoal.Permutation(SAMPLES, seed=0, epoch=epoch).indices(0, SAMPLES))
        chosen = order.split(BATCH)[number]
        optimizer.zero_grad()
        F.cross_entropy(model(values[chosen]), labels[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(ours.model[name], tensor, rtol=1e-9, atol=1e-12)
    for name, parameter in average.module.named_parameters():
        torch.testing.assert_close(ours.ema["averages"][name], parameter.data, rtol=1e-9, atol=1e-12)

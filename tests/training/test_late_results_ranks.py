"""Late results on several ranks: the same bits as results at once, and errors on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.killed_training import same
from helpers.ranks import Ranks
from helpers.small_training import sgd
from shoal.strategies.dtensor import is_divided, share
from shoal.util.errors import StepError

pytestmark = pytest.mark.processes

BATCH, STEPS = 7, 5  # batches that do not divide evenly
WAYS: dict[str, tuple[str, Any]] = {
    "DDP": ("replicate=-1", None),
    "FSDP": ("shard=-1", None),
    "Tensor": ("tensor=-1", shoal.TensorParallel(plan={"first": "column", "second": "row"})),
    "Pipeline": ("pipeline=-1", shoal.Pipeline(split_points=("second",), schedule="gpipe")),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x).tanh())
        return output


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss over some of the labels, whose count only the device knows."""
    total = F.cross_entropy(output, batch[1], reduction="sum", ignore_index=0)
    return total, (batch[1] != 0).sum()


class Training:
    def __init__(self, world: shoal.World, way: str, result: str, bad: int | None = None) -> None:
        torch.manual_seed(3)
        model = shoal.parallelize(Net().double(), world, WAYS[way][1])
        parameters = list(model.parameters())
        groups = [[p for p in parameters if is_divided(p) is kind] for kind in (True, False)]
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups if group], lr=0.05, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.model = model
        options: dict[str, Any] = {"clip": 0.1, "schedule": self.schedule, "result": result}
        options["schedule_interval"] = "step"
        self.step = shoal.Step(model, self.optimizer, shoal.Task(loss), **options)
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(BATCH * STEPS, 4, generator=generator).double()
        if bad is not None:
            inputs[bad * BATCH + 1] = torch.inf  # of one rank alone
        labels = torch.randint(0, 3, (BATCH * STEPS,), generator=generator)
        self.loader = shoal.Loader(
            (inputs, labels), world, batch_size=BATCH, micro_batches=2, shuffle=False
        )

    def state(self) -> list[Any]:
        """This rank's part of all that a step changes."""
        state = [p.detach() for p in self.model.parameters()]
        for values in self.optimizer.state.values():
            state += values.values()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        held = [share(tensor).clone() for tensor in state]
        return [*held, *rates, self.step.number, self.schedule.last_epoch]


def trained(world: shoal.World, way: str) -> tuple[bool, bool]:
    """Whether parameters and results are the same, at once and late, read at each step or after all."""
    states, results = [], []
    for mode, read in (("now", True), ("late", True), ("late", False)):
        training = Training(world, way, mode)
        found = []
        for batch in training.loader.epochs(2):
            result = training.step(batch)
            found.append(result[:4] if read else result)
        states.append(training.state())
        results.append([result[:4] for result in found])
    return all(same(state, states[0]) for state in states), results[0] == results[1] == results[2]


def failed(world: shoal.World, way: str, directory: Path) -> tuple[Any, ...]:
    """The knowledge of a rank after a step that failed, and after a save."""
    training = Training(world, way, "late", bad=2)
    with shoal.Run(directory, training.step, training.loader, trackers=()) as run:
        for number, batch in enumerate(training.loader.epochs(1)):
            if number == 2:
                before = training.state()
            if number == 3:
                try:
                    training.step(batch)
                except StepError as error:
                    told = error.found
                break
            training.step(batch)
            run.tick()
        unchanged = same(training.state(), before)
        saved = run.save()
        for batch in training.loader.epochs(1):
            training.step(batch)
        on = training.step.number
    again = Training(world, way, "late")
    with shoal.Run(directory, again.step, again.loader, trackers=()) as run:
        restored = run.restore()
        assert restored is not None
        resumed = same(again.state(), before)
        for batch in again.loader.epochs(1):
            again.step(batch)
        run.save()
    return told, unchanged, saved.name, on, restored.position, resumed, again.step.number


@pytest.mark.parametrize("way", WAYS)
def test_late_results_are_those_of_now(two: Ranks, way: str) -> None:
    two.divide(WAYS[way][0])
    assert two.call(trained, way) == [(True, True)] * 2


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.full] * (way in ("FSDP", "Tensor"))) for way in WAYS]
)
def test_all_ranks_raise_and_nothing_has_changed(two: Ranks, way: str, tmp_path: Path) -> None:
    two.divide(WAYS[way][0])
    for told, *found in two.call(failed, way, tmp_path):
        assert "over all ranks" in told
        assert "seen late" in told
        assert found == [True, "step-2", 3, 2 * BATCH, True, 5]


def compressed(world: shoal.World) -> str:
    model = shoal.parallelize(Net(), world, shoal.DDP(compression="bf16"))
    with pytest.raises(StepError) as refused:
        shoal.Step(model, sgd(model, fused=True), shoal.Task(loss), result="late")
    return refused.value.found


def test_compressed_gradients_are_not_late(two: Ranks) -> None:
    two.divide("replicate=-1")
    for found in two.call(compressed):
        assert "error feedback of compressed gradients" in found

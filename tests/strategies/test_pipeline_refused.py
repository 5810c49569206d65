"""What no pipeline can do is said, on all ranks."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.one_process import check_refused
from helpers.pipeline_model import CLASSES, PIPELINE, WIDTH, Net, build, dataset, log, loss, parts, tied
from helpers.ranks import Ranks
from shoal.util.errors import StepError

pytestmark = pytest.mark.processes
LAYOUT = "pipeline=2"


class Deciding(Net):
    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Tensor]:
        return super().forward(values if values.sum() > 0 else -values)


class Dropping(Net):
    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Tensor]:
        return super().forward(F.dropout(values, 0.1, self.training))


class Doubling(Net):
    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Tensor]:
        values = values * 1
        values.mul_(2)
        return super().forward(values)


class Drawing(Net):
    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Tensor]:
        return super().forward(values + torch.randn(4))


class Numbering(Net):
    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Tensor]:
        self.scale += 1
        return super().forward(values)


class Counting(nn.Module):
    """What a later stage needs is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, CLASSES), nn.Linear(CLASSES, CLASSES)
        self.double()

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        hidden = self.first(values)
        width = hidden.size(1)
        return {"scores": self.second(hidden) / width}


class Again(Net):
    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Tensor]:
        hidden = self.blocks[0](self.first(values) * self.places)
        return {"scores": self.head(self.blocks[2](self.blocks[1](self.blocks[1](hidden))))}


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        for part in (self.blocks[1:], self.head):
            part.requires_grad_(False)


def one_way(**options: Any) -> shoal.Pipeline:
    return shoal.Pipeline(**{"split_points": ("blocks.1",), **options})


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")

REFUSED: list[tuple[Any, Any, str]] = [
    (
        Net,
        one_way(split_points=("blocks.7",)),
        "does not call a module 'blocks.7'; it calls first, blocks.0, blocks.1",
    ),
    (Net, one_way(split_points=("first",)), "without the first module"),
    (Net, one_way(split_points=("blocks.2", "blocks.1"), schedule="looped"), "each split point once"),
    (Net, one_way(split_points=("blocks.1", "blocks.2")), "needs 1 stage(s) on each rank"),
    (Net, one_way(schedule="zbv"), "3 split points for 4 stages"),
    (Net, one_way(stages_per_rank=2, schedule="looped"), "needs 2 stage(s) on each rank"),
    (
        tied,
        one_way(split_points=("chain.2",)),
        "chain.0.weight and chain.4.weight are one parameter in two",
    ),
    (Deciding, one_way(), "it branches on the values"),
    (Dropping, one_way(), "nn.Dropout in place of F.dropout"),
    (Doubling, one_way(), "changes mul in place"),
    (Drawing, one_way(), "creates tensors without inputs"),
    (Numbering, one_way(), "stores values in attributes of the model: scale"),
    (Counting, one_way(split_points=("second",)), "only tensors can be sent"),
    (
        Net,
        [shoal.ActivationCheckpointing(), one_way(split_points=BLOCKS, schedule="zbv")],
        "would recompute the blocks",
    ),
    (Again, one_way(split_points=BLOCKS, schedule="zbv"), "blocks.1 is called twice in one stage"),
    (Unused, one_way(), "parameters that its forward does not use: spare.weight"),
    (Frozen, one_way(), "has no trainable parameters"),
    (Net, [PIPELINE, shoal.FSDP()], "Pipeline sums gradients, so no strategy can follow it"),
    (Net, shoal.DDP(), "layout='replicate=-1'), or shoal.Pipeline(split_points=…) for this axis"),
]


@pytest.mark.parametrize(("make", "strategy", "found"), REFUSED)
def test_what_cannot_be_cut_is_refused_on_all_ranks(
    ranks: Ranks, make: Any, strategy: Any, found: str
) -> None:
    kinds = shoal.StepError | shoal.LayoutError
    check_refused(ranks, found, log, strategy, make, kind=kinds)


def called(world: shoal.World) -> None:
    step, data = parts(world, PIPELINE)
    for micro in next(data.epochs(1)):
        step.model(micro[0])


def own_loop(world: shoal.World) -> None:
    _, data = parts(world, PIPELINE)
    batch = next(data.epochs(1))
    for _ in batch:
        batch.backward(total=torch.zeros((), requires_grad=True), count=1)


def unequal(world: shoal.World) -> None:
    """Sentences of other lengths in the micro-batches of one batch."""
    step, _ = parts(world, PIPELINE, lambda: Net().double())
    rows = [
        (torch.randn(2 + number % 2, 4).double(), torch.zeros(2 + number % 2).long())
        for number in range(8)
    ]
    data = shoal.Loader(rows, world, batch_size=4, micro_batches=4, collate_fn=lambda some: some[0])
    step(next(data.epochs(1)))


def with_an_option(world: shoal.World) -> None:
    step, data = parts(world, PIPELINE)
    step.task = shoal.Task(loss, inputs=lambda batch: (batch[0], False))
    step(next(data.epochs(1)))


def few(world: shoal.World) -> None:
    split = ("blocks.0", "blocks.1", "blocks.2")
    step, _ = parts(world, shoal.Pipeline(split_points=split, schedule="dualpipev"))
    step(next(shoal.Loader(dataset(), world, batch_size=16).epochs(1)))


def scripted(world: shoal.World) -> None:
    log(world, PIPELINE, build, "script")


def split_and_compiled(world: shoal.World) -> None:
    split = ("blocks.0", "blocks.1", "blocks.2")
    log(world, shoal.Pipeline(split_points=split, schedule="zbv"), build, "inductor")


@pytest.mark.parametrize(
    ("task", "found"),
    [
        (called, "each rank has only some of the stages"),
        (own_loop, "the strategy of the model needs shoal.Step"),
        (unequal, "inputs of different shapes"),
        (with_an_option, "arguments with defaults keep their defaults"),
        (few, "micro_batches=4"),
        (scripted, "TorchScript cannot call"),
        (split_and_compiled, "the schedule runs backward in two parts"),
    ],
)
def test_what_a_pipeline_cannot_do_is_said(ranks: Ranks, task: Any, found: str) -> None:
    check_refused(ranks, found, task)


class Unlearnable(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no gradient here")


class Scored(nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        scores: Tensor = Unlearnable.apply(super().forward(values))
        return scores


class Failing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = Scored(WIDTH, CLASSES)


def failed(world: shoal.World, make: Any, fails: Any, directory: Path) -> None:
    """Write the error of a step, and end the process as the error would end a script."""
    step, data = parts(world, one_way(split_points=BLOCKS, schedule="zero-bubble"), make)
    step.task = shoal.Task(fails)
    try:
        step(next(data.epochs(1)))
    except Exception as error:
        text = "".join(traceback.format_exception_only(error))
        (directory / f"rank {world.rank}").write_text(text)
        os._exit(1)


def failing() -> Net:
    return Failing().double()


def late(output: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    if torch.is_grad_enabled():
        raise ValueError("no loss here")
    return loss(output, batch)


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "fails", "found"),
    [(build, late, "ValueError: no loss here"), (failing, loss, "in two parts")],
    ids=["forward", "backward"],
)
def test_the_other_rank_does_not_wait_for_one_that_failed_in_the_schedule(
    make: Any, fails: Any, found: str, tmp_path: Path
) -> None:
    with Ranks(2, layout="pipeline=2", seed=0, call_seconds=60) as ranks:
        ranks.attempt(failed, make, fails, tmp_path)
    first, second = ((tmp_path / f"rank {rank}").read_text() for rank in (0, 1))
    assert found in second
    assert re.search(r"(closed|reset) by peer", first)  # known for the end of another rank
    assert "in two parts" not in first


@pytest.mark.parametrize(
    "options", [{"split_points": None}, {"split_points": "blocks.1"}, {"schedule": "2f2b"}]
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(StepError):
        one_way(**options)


@pytest.mark.parametrize("stage", [shoal.DDP(), shoal.FSDP(), shoal.FSDP(reshard_after_forward=False)])
def test_combinations_of_torchs_that_are_wrong_are_refused(stage: Any) -> None:
    """torch gives no gradients, or wrong ones, for most of them."""
    with pytest.raises(StepError, match=r"wrong|no gradients"):
        one_way(stage_strategy=stage)


class Meaning(nn.Module):
    """It returns its own loss, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.second(self.first(values)), labels)}


def its_own_loss(world: shoal.World, size: int) -> float:
    model = shoal.parallelize(Meaning(), world, shoal.Pipeline(split_points=("second",)))
    task = shoal.Task(
        lambda output, batch: (output["loss"] * len(batch[1]), len(batch[1])), inputs=lambda b: b
    )
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    batch = next(shoal.Loader(dataset(), world, batch_size=size, micro_batches=2).epochs(1))
    return step(batch).loss


def test_a_mean_over_samples_that_fill_up_is_refused_on_all_ranks(ranks: Ranks) -> None:
    ranks.call(its_own_loss, 10)
    check_refused(ranks, "that include the padding of a short micro-batch", its_own_loss, 11)
    ranks.call(its_own_loss, 10)


class Heads(nn.Module):
    """Features that are normalised together, between a column and a row layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        hidden = self.wide(self.first(values)).softmax(-1)
        return {"scores": self.head(self.narrow(hidden))}


def planned(world: shoal.World, plan: dict[str, str]) -> None:
    torch.manual_seed(3)
    log(world, [shoal.TensorParallel(plan=plan), shoal.Pipeline(split_points=("head",))], Heads)


def test_a_plan_is_proved_stage_by_stage() -> None:
    wrong = {"wide": "column", "narrow": "row"}
    with Ranks(4, layout="tensor=2,pipeline=2", seed=0) as four:
        for plan, found in (
            (wrong, "the input of narrow"),
            ({"wide": "sequence"}, "full activations"),
        ):
            check_refused(four, found, planned, plan)

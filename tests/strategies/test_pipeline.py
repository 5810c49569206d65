"""Pipelines: how a model is cut, what travels, and what a run keeps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from helpers.one_process import alone, check_like_one, check_refused
from helpers.pipeline_model import (
    CLASSES,
    PIPELINE,
    STEPS,
    WIDTH,
    Net,
    Scores,
    build,
    dataset,
    log,
    parts,
)
from helpers.ranks import Ranks

LAYOUT = "pipeline=2"
pytestmark = pytest.mark.processes


def trained(world: shoal.World, strategy: Any, directory: Path, steps: int) -> dict[str, Any]:
    """Train up to `steps`, from the directory's checkpoint if there is one, and save there."""
    step, data = parts(world, strategy)
    ema = shoal.EMA(step.model, decay=0.5)
    losses = []
    with shoal.Run(directory, step, data, state={"ema": ema}) as run:
        run.restore()
        for batch in data.epochs(9):
            losses.append(step(batch).loss)
            ema.update()
            run.tick()
            if step.number == steps:
                break
        run.save()
    with ema.applied():
        averaged = shoal.evaluate(step, dataset(), batch_size=8)["loss"]
    shoal.export(step, directory / "model.safetensors")
    return {"losses": losses, "evaluated": averaged}


@pytest.mark.compat
def test_checkpoints_go_on_in_one_process_and_back(ranks: Ranks, tmp_path: Path) -> None:
    """Parameters, moments, averages and the exported file are of all stages."""
    from safetensors.torch import load_file

    with shoal.init() as world:
        whole = trained(world, None, tmp_path / "whole", STEPS)
        ranks.call(trained, PIPELINE, tmp_path / "parts", 2)
        trained(world, None, tmp_path / "parts", 4)
        end = ranks.call(trained, PIPELINE, tmp_path / "parts", STEPS)
    for result in end:
        assert result["losses"] == pytest.approx(whole["losses"][4:], rel=1e-12)
        assert result["evaluated"] == pytest.approx(whole["evaluated"], rel=1e-12)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-13)


def resumed(world: shoal.World, directory: Path) -> tuple[int, list[Tensor]]:
    trained(world, PIPELINE, directory, 3)
    step, data = parts(world, PIPELINE)
    with shoal.Run(directory, step, data) as run:
        loaded = run.files.checkpoints.restore(run.contents.template(), run.contents.elsewhere())
        assert loaded is not None
        state = loaded.state["steps"]["step"]
        read = [*state["model"].values(), *(m["exp_avg"] for m in state["optimizer"]["state"].values())]
    return sum(tensor.is_meta for tensor in read), [p.detach() for p in step.model.parameters()]


def test_a_rank_reads_its_own_stages_only(ranks: Ranks, tmp_path: Path) -> None:
    own = build().state_dict()
    results = ranks.call(resumed, tmp_path / "run")
    assert sum(skipped for skipped, _ in results) == len(own) + len(list(build().parameters()))


def loaded(world: shoal.World, state: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    step, _ = parts(world, PIPELINE)
    shoal.load(step.model, state)
    return [(name, tensor.clone()) for name, tensor in step.model.state_dict().items()]


def test_a_file_is_loaded_by_stages(ranks: Ranks) -> None:
    torch.manual_seed(9)
    state = Net().double().state_dict()
    found = dict(itertools.chain(*ranks.call(loaded, state)))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    del state["head.bias"]
    check_refused(ranks, "missing: head.bias", loaded, state, kind=shoal.CheckpointError)


def filled(world: shoal.World, strategy: Any) -> list[tuple[str, Tensor]]:
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(lambda: Net().double(), world, strategy)
    return [(name, tensor.clone()) for name, tensor in model.state_dict().items()]


def test_a_model_made_stage_by_stage_has_the_values_of_one_process(ranks: Ranks) -> None:
    expected = dict(alone(filled, None))
    found = [dict(result) for result in ranks.call(filled, PIPELINE)]
    assert found[0].keys().isdisjoint(name for name in found[1])
    together = found[0] | found[1]
    assert together.keys() == expected.keys()
    assert all(torch.equal(together[name], tensor) for name, tensor in expected.items())


def balanced(world: shoal.World) -> tuple[list[float], list[str]]:
    strategy = shoal.Pipeline(example_args=(torch.randn(4, 4, dtype=torch.float64),))
    model = shoal.parallelize(build(), world, strategy)
    return log(world, strategy), [name for name, _ in model.named_parameters()]


def test_a_model_is_cut_by_what_its_parts_cost(ranks: Ranks) -> None:
    expected = alone(log, None)
    (losses, first), (again, second) = ranks.call(balanced)
    assert losses == again == pytest.approx(expected, rel=1e-12)
    assert {*first} | {*second} == {name for name, _ in build().named_parameters()}
    assert any(name.startswith("blocks") for name in first)
    assert any(name.startswith("blocks") for name in second)


def wide_at_the_end() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512 if number < 5 else 8192) for number in range(6)))


def stage_sizes(world: shoal.World) -> int:
    strategy = shoal.Pipeline(example_args=(torch.randn(64, 512),))
    return len(list(shoal.parallelize(wide_at_the_end, world, strategy).parameters()))


def test_what_a_function_makes_is_there_when_it_is_measured(ranks: Ranks) -> None:
    assert ranks.call(stage_sizes) == [10, 2]


class Joined(Net):
    """The gradients of what it joins are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Tensor]:
        first = self.blocks[0](self.first(values) + self.places)
        return {"scores": self.head(torch.cat([first, self.blocks[2](self.blocks[1](first))], 1))}


def growing(world: shoal.World, strategy: Any) -> list[float]:
    """Batches of another size each time, in one form of micro-batches after the other."""
    step, _ = parts(world, strategy)
    losses = []
    for size in (8, 13, 5, 32):
        data = shoal.Loader(dataset(), world, batch_size=size, micro_batches=4)
        losses += [step(batch).loss for batch in itertools.islice(data.epochs(1), 3)]
    return losses


def test_batches_of_any_size_follow_each_other(ranks: Ranks) -> None:
    check_like_one(ranks, growing, PIPELINE)


class Spectral(Net):
    """Frequencies travel from one stage to the next, beside what is no tensor in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.transform, self.back = Transform(), Back()

    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Any]:
        turned = self.transform(self.blocks[0](self.first(values) + self.places))
        hidden = self.back(self.blocks[1](turned.real) + 1j * self.blocks[2](turned.imag))
        return {"spare": None, "scores": self.head(hidden) * torch.exp(self.scale)[:CLASSES]}


class Transform(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        turned: Tensor = torch.fft.fft(values)
        return turned


class Back(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        back: Tensor = torch.fft.ifft(values).real
        return back


class InPlace(Net):
    """What is changed in place has other names, under which other stages use it."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.ReLU(inplace=True)

    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Tensor]:
        hidden = early = self.first(values)
        hidden += self.places
        hidden = late = self.blocks[0](hidden * 2)
        hidden = self.blocks[2](self.blocks[1](self.cut(hidden)))
        return {"scores": self.head(hidden * self.scale + early + late)}


def seeded(world: shoal.World, strategy: Any, make: Any) -> list[float]:
    def build() -> nn.Module:
        torch.manual_seed(2)
        module: nn.Module = make().double()
        return module

    return log(world, strategy, build)


def cut(*points: str, schedule: str = "1f1b") -> shoal.Pipeline:
    return shoal.Pipeline(split_points=points, schedule=schedule)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (Net, [shoal.ActivationCheckpointing(), PIPELINE]),
        (Scores, cut("chain.1", "chain.2", "chain.4", schedule="zbv")),
        (Joined, cut("blocks.1", "blocks.2", "head", schedule="zero-bubble")),
        (Spectral, cut("blocks.1")),
        (InPlace, cut("cut")),
    ],
    ids=["recomputed", "tied", "joined", "frequencies", "in place"],
)
def test_what_travels_is_that_of_one_process(ranks: Ranks, make: Any, strategy: Any) -> None:
    check_like_one(ranks, seeded, strategy, make)


@pytest.mark.long
def test_stages_compiled(ranks: Ranks) -> None:
    expected = alone(log, None)
    for losses in ranks.call(log, PIPELINE, build, "inductor"):
        assert losses == pytest.approx(expected, rel=1e-9)


class Noisy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, nn.Dropout(0.3))


def with_dropout(world: shoal.World, directory: Path, stops: list[int]) -> list[float]:
    """The losses of runs one after the other in one directory, each until one of `stops`."""
    losses = []
    for number, stop in enumerate(stops):
        world.reseed(f"run {number}")
        step, data = parts(world, PIPELINE, lambda: Noisy().double())
        with shoal.Run(directory, step, data) as run:
            run.restore()
            for batch in data.epochs(9):
                losses.append(step(batch).loss)
                run.tick()
                if step.number == stop:
                    break
            run.save()
    return losses


@pytest.mark.full
def test_a_resumed_run_draws_the_same_noise_in_a_short_batch(ranks: Ranks, tmp_path: Path) -> None:
    """The fourth batch is the short one of the epoch, and the first after the restore."""
    at_once = ranks.call(with_dropout, tmp_path / "once", [STEPS])
    assert ranks.call(with_dropout, tmp_path / "twice", [3, STEPS]) == at_once


def sent_alone(world: shoal.World) -> list[str]:
    """The dtypes that are sent one by one in an evaluation, in which NCCL would make communicators."""
    step, _ = parts(world, PIPELINE)
    found: list[str] = []
    inner = dist.send

    def send(tensor: Tensor, *arguments: Any, **named: Any) -> None:
        found.append(str(tensor.dtype))
        inner(tensor, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send", send)
        shoal.evaluate(step, dataset(), batch_size=16)
    return found


def test_an_evaluation_sends_activations_as_schedules_do(ranks: Ranks) -> None:
    first, last = ranks.call(sent_alone)
    assert set(first) == {"torch.int64", "torch.uint8"}  # the forms, through memory of the host
    assert last == []

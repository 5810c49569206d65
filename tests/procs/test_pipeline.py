"""Pipelines: how a model is cut, what a run keeps, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from ranks import RankError, Ranks
from shoal.errors import LayoutError, StepError

WIDTH, CLASSES, SAMPLES, STEPS = 8, 3, 53, 6


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, layout="pipeline=2", seed=0) as ranks:
        yield ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = self.narrow(F.relu(self.wide(values)))
        return values + added


class Net(nn.Module):
    """An input that the last stage needs again, a parameter and a buffer of its own, and blocks."""

    scale: Tensor

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.places = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Tensor]:
        hidden = self.first(values) + self.places
        kept = hidden
        for block in self.blocks:
            hidden = block(hidden)
        if scaled:
            hidden = hidden * self.scale
        return {"scores": self.head(hidden + kept) + values.sum(1, keepdim=True)}


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def loss(output: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output["scores"], batch[1], reduction="sum"), len(batch[1])


def build() -> Net:
    torch.manual_seed(2)
    return Net().double()


def parts(world: shoal.World, strategy: Any, make: Any = build) -> tuple[shoal.Step, shoal.Loader]:
    model = shoal.parallelize(make(), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=0.5)
    return step, shoal.Loader(dataset(), world, batch_size=16, micro_batches=4)


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


PIPELINE = shoal.Pipeline(split=("blocks.1",))


def test_checkpoints_go_on_in_one_process_and_back(two: Ranks, tmp_path: Path) -> None:
    """Parameters, moments, averages and the exported file are of all stages."""
    from safetensors.torch import load_file

    with shoal.init() as world:
        whole = trained(world, None, tmp_path / "whole", STEPS)
        two.call(trained, PIPELINE, tmp_path / "parts", 2)
        trained(world, None, tmp_path / "parts", 4)
        end = two.call(trained, PIPELINE, tmp_path / "parts", STEPS)
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
        loaded = run.checkpoints.restore(run._template(), run._elsewhere())
        assert loaded is not None
        state = loaded.state["steps"]["step"]
        read = [*state["model"].values(), *(m["exp_avg"] for m in state["optimizer"]["state"].values())]
    return sum(tensor.is_meta for tensor in read), [p.detach() for p in step.model.parameters()]


def test_a_rank_reads_its_own_stages_only(two: Ranks, tmp_path: Path) -> None:
    own = build().state_dict()
    results = two.call(resumed, tmp_path / "run")
    assert sum(skipped for skipped, _ in results) == len(own) + len(list(build().parameters()))


def loaded(world: shoal.World, state: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    step, _ = parts(world, PIPELINE)
    shoal.load(step.model, state)
    return [(name, tensor.clone()) for name, tensor in step.model.state_dict().items()]


def test_a_file_is_loaded_by_stages(two: Ranks) -> None:
    torch.manual_seed(9)
    state = Net().double().state_dict()
    found = dict(itertools.chain(*two.call(loaded, state)))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    del state["head.bias"]
    for result in two.attempt(loaded, state):
        assert isinstance(result, RankError)
        assert "missing: head.bias" in str(result.error)


def filled(world: shoal.World) -> list[tuple[str, Tensor]]:
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(lambda: Net().double(), world, PIPELINE)
    return [(name, tensor.clone()) for name, tensor in model.state_dict().items()]


def test_a_model_made_stage_by_stage_has_the_values_of_one_process(two: Ranks) -> None:
    with shoal.init() as world:
        world.reseed("weights", by_rank=False)
        expected = Net().double().state_dict()
    found = [dict(result) for result in two.call(filled)]
    assert found[0].keys().isdisjoint(name for name in found[1])
    together = found[0] | found[1]
    assert together.keys() == expected.keys()
    assert all(torch.equal(together[name], tensor) for name, tensor in expected.items())


def log(
    world: shoal.World, strategy: Any, make: Any = build, compile: str | None = None
) -> list[float]:
    model = shoal.parallelize(make(), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), compile=compile)
    data = shoal.Loader(dataset(), world, batch_size=16, micro_batches=4)
    return [step(batch).loss for batch in itertools.islice(data.epochs(9), STEPS)]


def balanced(world: shoal.World) -> tuple[list[float], list[str]]:
    strategy = shoal.Pipeline(example=(torch.randn(4, 4, dtype=torch.float64),))
    model = shoal.parallelize(build(), world, strategy)
    return log(world, strategy), [name for name, _ in model.named_parameters()]


def test_a_model_is_cut_by_what_its_parts_cost(two: Ranks) -> None:
    with shoal.init() as world:
        expected = log(world, None)
    (losses, first), (again, second) = two.call(balanced)
    assert losses == again == pytest.approx(expected, rel=1e-12)
    assert {*first} | {*second} == {name for name, _ in build().named_parameters()}
    assert any(name.startswith("blocks") for name in first)
    assert any(name.startswith("blocks") for name in second)


def test_blocks_that_run_again_in_backward(two: Ranks) -> None:
    with shoal.init() as world:
        expected = log(world, None)
    for losses in two.call(log, [shoal.Recompute(), PIPELINE]):
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.full
def test_stages_compiled(two: Ranks) -> None:
    with shoal.init() as world:
        expected = log(world, None)
    for losses in two.call(log, PIPELINE, build, "inductor"):
        assert losses == pytest.approx(expected, rel=1e-9)


class Chain(nn.Sequential):
    """One parameter in its first and its last part."""

    def __init__(self) -> None:
        tied = nn.Linear(4, 4)
        super().__init__(tied, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self[4].weight = tied.weight


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        return {"scores": self.chain(values)[:, :CLASSES]}


def tied() -> nn.Module:
    torch.manual_seed(5)
    return Scores().double()


def test_a_folded_schedule_carries_tied_parameters(two: Ranks) -> None:
    with shoal.init() as world:
        expected = log(world, None, tied)
    strategy = shoal.Pipeline(split=("chain.1", "chain.2", "chain.4"), schedule="zbv")
    for losses in two.call(log, strategy, tied):
        assert losses == pytest.approx(expected, rel=1e-12)


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
    return shoal.Pipeline(**{"split": ("blocks.1",), **options})


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")

REFUSED: list[tuple[Any, Any, str]] = [
    (Net, one_way(split=("blocks.7",)), "calls no part 'blocks.7'; it calls first, blocks.0, blocks.1"),
    (Net, one_way(split=("first",)), "not the first part"),
    (Net, one_way(split=("blocks.2", "blocks.1"), schedule="looped"), "each split point once"),
    (Net, one_way(split=("blocks.1", "blocks.2")), "has 1 stage(s) on each rank"),
    (Net, one_way(schedule="zbv"), "3 split points for 4 stages"),
    (Net, one_way(stages_per_rank=2, schedule="looped"), "has 2 stage(s) on each rank"),
    (tied, one_way(split=("chain.2",)), "chain.0.weight and chain.4.weight are one parameter of two"),
    (Deciding, one_way(), "it decides by what tensors hold"),
    (Dropping, one_way(), "nn.Dropout in place of F.dropout"),
    (Doubling, one_way(), "changes mul in place"),
    (Drawing, one_way(), "makes tensors of nothing"),
    (Numbering, one_way(), "keeps what it computes on the model: scale"),
    (Counting, one_way(split=("second",)), "only tensors travel"),
    (Net, [shoal.Recompute(), one_way(split=BLOCKS, schedule="zbv")], "would run the blocks again"),
    (Again, one_way(split=BLOCKS, schedule="zbv"), "blocks.1 is called twice in one stage"),
    (Unused, one_way(), "parameters that its forward does not use: spare.weight"),
    (Frozen, one_way(), "has no trainable parameters"),
    (Net, [PIPELINE, shoal.FSDP()], "Pipeline sums gradients by itself"),
    (Net, shoal.DDP(), "no strategy given serves the axis 'pipeline'"),
]


@pytest.mark.parametrize(("make", "strategy", "found"), REFUSED)
def test_what_cannot_be_cut_is_refused_on_all_ranks(
    two: Ranks, make: Any, strategy: Any, found: str
) -> None:
    for result in two.attempt(log, strategy, make):
        assert isinstance(result, RankError)
        assert isinstance(result.error, StepError | LayoutError)
        assert found in str(result.error)


def called(world: shoal.World) -> None:
    step, data = parts(world, PIPELINE)
    for micro in next(data.epochs(1)):
        step.model(micro[0])


def own_loop(world: shoal.World) -> None:
    _, data = parts(world, PIPELINE)
    batch = next(data.epochs(1))
    for _ in batch:
        batch.backward(torch.zeros((), requires_grad=True), 1)


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
    step, _ = parts(world, shoal.Pipeline(split=split, schedule="dualpipev"))
    step(next(shoal.Loader(dataset(), world, batch_size=16).epochs(1)))


def scripted(world: shoal.World) -> None:
    log(world, PIPELINE, build, "script")


def split_and_compiled(world: shoal.World) -> None:
    split = ("blocks.0", "blocks.1", "blocks.2")
    log(world, shoal.Pipeline(split=split, schedule="zbv"), build, "inductor")


@pytest.mark.parametrize(
    ("task", "found"),
    [
        (called, "each rank has some of its stages"),
        (own_loop, "PipelineEngine owns the backward pass"),
        (unequal, "inputs of different shapes"),
        (with_an_option, "arguments with defaults keep them"),
        (few, "micro_batches=4"),
        (scripted, "TorchScript can't call"),
        (split_and_compiled, "it runs backward in two parts"),
    ],
)
def test_what_a_pipeline_cannot_do_is_said(two: Ranks, task: Any, found: str) -> None:
    for result in two.attempt(task):
        assert isinstance(result, RankError)
        assert isinstance(result.error, StepError)
        assert found in str(result.error)


def growing(world: shoal.World, strategy: Any) -> list[float]:
    """Batches of another size each time, in one form of micro-batches after the other."""
    step, _ = parts(world, strategy)
    losses = []
    for size in (8, 13, 5, 32):
        data = shoal.Loader(dataset(), world, batch_size=size, micro_batches=4)
        losses += [step(batch).loss for batch in itertools.islice(data.epochs(1), 3)]
    return losses


def test_batches_of_any_size_follow_each_other(two: Ranks) -> None:
    with shoal.init() as world:
        expected = growing(world, None)
    for losses in two.call(growing, PIPELINE):
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("options", [{"split": None}, {"split": "blocks.1"}, {"schedule": "2f2b"}])
def test_options_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(StepError):
        one_way(**options)


@pytest.mark.parametrize("stage", [shoal.DDP(), shoal.FSDP(), shoal.FSDP(reshard=False)])
def test_combinations_of_torchs_that_are_wrong_are_refused(stage: Any) -> None:
    """torch gives no gradients, or wrong ones, for most of them."""
    with pytest.raises(StepError, match=r"wrong|no gradients"):
        one_way(stage=stage)


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


@pytest.mark.parametrize(("make", "split"), [(Spectral, "blocks.1"), (InPlace, "cut")])
def test_what_travels_is_that_of_one_process(two: Ranks, make: Any, split: str) -> None:
    with shoal.init() as world:
        expected = log(world, None, seeded(make))
    for losses in two.call(log_of, make, split):
        assert losses == pytest.approx(expected, rel=1e-12)


def seeded(make: Any) -> Any:
    def build() -> nn.Module:
        torch.manual_seed(2)
        module: nn.Module = make().double()
        return module

    return build


def log_of(world: shoal.World, make: Any, split: str) -> list[float]:
    return log(world, shoal.Pipeline(split=(split,)), seeded(make))


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


def test_a_resumed_run_draws_the_same_noise_in_a_short_batch(two: Ranks, tmp_path: Path) -> None:
    """The fourth batch is the short one of the epoch, and the first after the restore."""
    at_once = two.call(with_dropout, tmp_path / "once", [STEPS])
    assert two.call(with_dropout, tmp_path / "twice", [3, STEPS]) == at_once


class Meaning(nn.Module):
    """It returns its own loss, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.second(self.first(values)), labels)}


def its_own_loss(world: shoal.World, size: int) -> float:
    model = shoal.parallelize(Meaning(), world, shoal.Pipeline(split=("second",)))
    task = shoal.Task(
        lambda output, batch: (output["loss"] * len(batch[1]), len(batch[1])), inputs=lambda b: b
    )
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    batch = next(shoal.Loader(dataset(), world, batch_size=size, micro_batches=2).epochs(1))
    return step(batch).loss


def test_a_mean_over_samples_that_fill_up_is_refused_on_all_ranks(two: Ranks) -> None:
    two.call(its_own_loss, 10)
    for result in two.attempt(its_own_loss, 11):
        assert isinstance(result, RankError)
        assert "some only fill a short micro-batch up" in str(result.error)
    two.call(its_own_loss, 10)


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
    log(world, [shoal.Tensor(plan=plan), shoal.Pipeline(split=("head",))], Heads)


def test_a_plan_is_proved_stage_by_stage() -> None:
    wrong = {"wide": "column", "narrow": "row"}
    with Ranks(4, layout="tensor=2,pipeline=2", seed=0) as four:
        for plan, found in (
            (wrong, "what comes to narrow"),
            ({"wide": "sequence"}, "whole activations"),
        ):
            for result in four.attempt(planned, plan):
                assert isinstance(result, RankError)
                assert found in str(result.error)

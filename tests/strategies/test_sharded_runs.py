"""Divided models around a run: built share by share, saved, resumed at other divisions, exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import shoal
from helpers.one_process import check_like_one, check_refused
from helpers.ranks import Ranks
from shoal.strategies.dtensor import share, whole

pytestmark = pytest.mark.processes
LAYOUT = "shard=-1"

WIDTH, CLASSES, SAMPLES, BATCH = 8, 3, 101, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.narrow(torch.tanh(self.wide(x)))
        return x + change


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.sum().detach()
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


PLAN = {"blocks.*.wide": "column", "blocks.*.narrow": "row"}


def made(world: shoal.World, strategy: Any = None) -> shoal.Step:
    world.reseed("weights", by_rank=False)
    if world.layout.degree("tensor") > 1:
        strategy = shoal.TensorParallel(plan=PLAN)
    if world.layout.degree("tensor") > 1 < world.layout.degree("shard"):
        strategy = [shoal.TensorParallel(plan=PLAN), shoal.FSDP()]
    model = shoal.parallelize(Net, world, strategy, statistics="rank")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)


def train(world: shoal.World, directory: Path, until: int, strategy: Any = None) -> dict[str, Any]:
    """To optimizer step `until` (7 are an epoch), evaluated with averaged parameters, exported."""
    step = made(world, strategy)
    ema = shoal.EMA(step.model, decay=0.9)
    loader = shoal.Loader(data(), world, batch_size=BATCH, micro_batches=2)
    with shoal.Run(directory, step, loader, state={"ema": ema}, trackers=()) as run:
        run.restore()
        for batch in loader.epochs(3):
            if run.step < until:
                step(batch)
                ema.update()
                run.tick()
            if run.step == until:
                break
        run.save()
        with ema.applied():
            result = shoal.evaluate(step, data(), metrics={"accuracy": shoal.Accuracy()})
        shoal.export(run, directory / "model.safetensors")
    return {
        "evaluation": result,
        "held": sum(share(p).numel() for p in step.model.parameters()),
        "moments": sum(
            share(value).numel()
            for state in step.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ),
    }


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3, layout="shard=-1") as started:
        yield started


@pytest.fixture(scope="module")
def tensor() -> Iterator[Ranks]:
    with Ranks(2, layout="tensor=2") as started:
        yield started


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("one")
    with shoal.init() as world:
        return directory, train(world, directory, 17)


def test_a_run_is_that_of_one_process_and_each_rank_holds_its_share(
    ranks: Ranks, one: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    for found in ranks.call(train, tmp_path, 17):
        assert found["evaluation"] == pytest.approx(one[1]["evaluation"], rel=1e-12)
        assert found["held"] == pytest.approx(one[1]["held"] / 2, rel=0.05)
        assert found["moments"] == 2 * found["held"]
    here, there = (load_file(d / "model.safetensors") for d in (one[0], tmp_path))
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        if name != "seen":  # a buffer that follows each rank's own samples; rank 0's is kept
            assert torch.allclose(tensor, there[name], rtol=0, atol=1e-12)


@pytest.mark.full
def test_a_checkpoint_goes_on_however_it_was_divided(
    ranks: Ranks, three: Ranks, tensor: Ranks, one: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """By FSDP over 2, then 3, layers over 2, one process, in mid-epoch: as if nothing had happened."""
    ranks.call(train, tmp_path, 4)
    three.call(train, tmp_path, 8)
    tensor.call(train, tmp_path, 12)
    with shoal.init() as world:
        assert train(world, tmp_path, 17)["evaluation"] == pytest.approx(
            one[1]["evaluation"], rel=1e-12
        )


def resumed(world: shoal.World, directory: Path, stop: int) -> list[Tensor]:
    train(world, directory, stop)
    step = made(world)
    loader = shoal.Loader(data(), world, batch_size=BATCH, micro_batches=2)
    with shoal.Run(directory, step, loader, state={"ema": shoal.EMA(step.model)}, trackers=()) as run:
        run.restore()
        for batch in loader.epochs(2):
            step(batch)
    return [whole(p.detach()).clone() for p in step.model.parameters()]


@pytest.mark.compat
@pytest.mark.full
def test_resuming_on_as_many_ranks_is_bit_equal(three: Ranks, tmp_path: Path) -> None:
    straight = three.call(resumed, tmp_path / "a", 2)[0]
    later = three.call(resumed, tmp_path / "b", 9)[0]
    assert all(torch.equal(a, b) for a, b in zip(straight, later, strict=True))


def loaded(world: shoal.World, file: Path) -> float:
    step = made(world)
    shoal.load(step.model, file)
    return float(shoal.evaluate(step, data())["loss"])


@pytest.mark.long
def test_layers_and_shares_are_both_divided(one: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with Ranks(4, layout="shard=2,tensor=2") as four:
        four.call(train, tmp_path, 7)
        for found in four.call(train, tmp_path, 17):
            assert found["evaluation"] == pytest.approx(one[1]["evaluation"], rel=1e-12)


def test_a_file_of_whole_tensors_is_divided(ranks: Ranks, one: tuple[Path, dict[str, Any]]) -> None:
    file = one[0] / "model.safetensors"
    with shoal.init() as world:
        expected = loaded(world, file)
    assert ranks.call(loaded, file) == pytest.approx([expected] * 2, rel=1e-12)


def buffers(world: shoal.World) -> list[float]:
    step = made(world)
    assert isinstance(step.model, Net)
    found = []
    for batch in shoal.Loader(data(), world, batch_size=BATCH).epochs(1):
        before = float(step.model.seen)
        step(batch)
        found += [float(step.model.seen), before + float(batch.micros[0].value[0].sum())]
    return found


def test_buffers_are_those_of_rank_0_after_each_batch(ranks: Ranks) -> None:
    """As with DDP."""
    first, second = ranks.call(buffers)
    assert first[::2] == second[::2] == pytest.approx(first[1::2])
    assert second[1::2] != pytest.approx(first[1::2])


def judged_twice(world: shoal.World) -> tuple[float, float]:
    """Evaluate, change the parameters, evaluate."""
    step = made(world, shoal.FSDP(reshard_after_forward=False))
    before = float(shoal.evaluate(step, data())["loss"])
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.mul_(2.0)
    return before, float(shoal.evaluate(step, data())["loss"])


def test_a_forward_without_backward_leaves_nothing_gathered(ranks: Ranks) -> None:
    with shoal.init() as world:
        expected = judged_twice(world)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)
    for found in ranks.call(judged_twice):
        assert found == pytest.approx(expected, rel=1e-12)


def looked_at(world: shoal.World, reshard: bool) -> float:
    """A step, a forward whose result is dropped, other parameters, then the loss of a batch."""
    step = made(world, shoal.FSDP(reshard_after_forward=reshard))
    parameters = list(step.model.parameters())
    batches = shoal.Loader(data(), world, batch_size=BATCH).epochs(1)
    step(next(batches))
    step.model(data()[0])
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2.0)
    return step(next(batches)).loss


@pytest.mark.parametrize("reshard", [True, False])
def test_a_forward_whose_backward_never_comes_leaves_nothing_stale(ranks: Ranks, reshard: bool) -> None:
    with shoal.init() as world:
        expected = looked_at(world, reshard)
    for found in ranks.call(looked_at, reshard):
        assert found == pytest.approx(expected, rel=1e-12)


def tried_first(world: shoal.World, inference: bool) -> float:
    """The loss of the second step, after a forward pass in inference mode or none."""
    step = made(world, shoal.FSDP())
    if inference:
        with torch.inference_mode():
            step.model(data()[0])
    batches = shoal.Loader(data(), world, batch_size=BATCH).epochs(1)
    step(next(batches))
    return step(next(batches)).loss


def test_the_first_forward_may_be_in_inference_mode(ranks: Ranks) -> None:
    assert ranks.call(tried_first, True) == ranks.call(tried_first, False)


def twice(world: shoal.World, strategy: shoal.FSDP) -> list[float]:
    """A loss that runs the model a second time, on what the first time gave."""
    step = made(world, strategy)

    def both(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        one, count = loss(output, batch)
        again = step.model(output.repeat(1, 3)[:, :WIDTH] * batch[0])
        return one + loss(step.model(-batch[0]), batch)[0] + loss(again, batch)[0], count

    step.task = shoal.Task(both)
    loader = shoal.Loader(data(), world, batch_size=BATCH, micro_batches=2)
    return [value for batch in loader.epochs(1) for value in step(batch)[:2]]


@pytest.mark.full
@pytest.mark.parametrize("accumulate", ["sharded", "whole"])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_model_that_runs_several_times_before_its_backward_is_right(
    ranks: Ranks, reshard: bool, accumulate: str
) -> None:
    strategy = shoal.FSDP(reshard_after_forward=reshard, accumulate=accumulate)
    with shoal.init() as world:
        expected = twice(world, strategy)
    for found in ranks.call(twice, strategy):
        assert found == pytest.approx(expected, rel=1e-9)


def gathers(world: shoal.World) -> list[int]:
    """How many times each of two steps gathers parameters."""
    step = made(world)
    counts = []
    for _, batch in zip(
        range(2), shoal.Loader(data(), world, batch_size=BATCH).epochs(1), strict=False
    ):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            step(batch)
        names = [event.name for event in recorded.events() or ()]
        counts.append(sum(name.startswith("gloo:") and "all_gather" in name for name in names))
    return counts


@pytest.mark.full
def test_what_lies_outside_of_units_is_gathered_once(ranks: Ranks) -> None:
    """Three blocks forward and backward, the rest of the model forward only."""
    for found in ranks.call(gathers):
        assert found[1] == 2 * 3 + 1


def failing(world: shoal.World, accumulate: str) -> list[float]:
    """The second batch fails in its third micro-batch and is dropped."""
    step = made(world, shoal.FSDP(accumulate=accumulate))
    calls = 0

    def sometimes(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        if calls == 4 + 3:
            raise ValueError("bad sample")
        return loss(output, batch)

    losses = []
    for number, batch in enumerate(
        shoal.Loader(data(), world, batch_size=BATCH, micro_batches=4).epochs(1)
    ):
        if number == 1:
            step.task = shoal.Task(sometimes)
            calls = 4
            with pytest.raises(ValueError, match="bad sample"):
                step(batch)
            step.task = shoal.Task(loss)
        else:
            losses.append(step(batch).loss)
    return losses


class TiedHead(nn.Module):
    """One parameter under two names, in the same unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.trunc_normal_(self.head.weight)


def constructed(world: shoal.World) -> tuple[bool, dict[str, Tensor]]:
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(TiedHead, world)
    values = {name: whole(tensor.detach()).clone() for name, tensor in model.state_dict().items()}
    return model.head.weight is model.embedding.weight, values


def test_a_model_made_share_by_share_has_the_values_and_ties_of_one_process(ranks: Ranks) -> None:
    with shoal.init() as world:
        tied, expected = constructed(world)
    assert tied
    for still_tied, found in ranks.call(constructed):
        assert still_tied
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.full
@pytest.mark.parametrize("accumulate", ["sharded", pytest.param("whole", marks=pytest.mark.long)])
def test_a_batch_that_failed_leaves_nothing_behind(ranks: Ranks, accumulate: str) -> None:
    with shoal.init() as world:
        expected = failing(world, accumulate)
    for found in ranks.call(failing, accumulate):
        assert found == pytest.approx(expected, rel=1e-12)


def compiled(world: shoal.World, how: str | None) -> list[float]:
    step = made(world)
    step = shoal.Step(step.model, step.optimizer, step.task, clip=1.0, compile=how)
    loader = shoal.Loader(data(), world, batch_size=BATCH)
    return [step(batch).loss for batch in loader.epochs(1)]


@pytest.mark.long
def test_units_are_compiled(ranks: Ranks) -> None:
    check_like_one(ranks, compiled, "inductor")


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.zeros(CLASSES, WIDTH))
        self.blocks[1].wide.weight = self.blocks[0].wide.weight  # type: ignore[union-attr]


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.zeros(4, dtype=torch.complex128))


class Mixed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4, dtype=torch.float32))


def spread(world: shoal.World, model: type[nn.Module], options: dict[str, Any]) -> None:
    shoal.parallelize(model(), world, shoal.FSDP(**options))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Tied, {}, ["blocks.0.wide.weight", "blocks.1.wide.weight", "modules="]),
        (Complex, {}, ["spectrum", "complex", "view_as_complex"]),
        (Mixed, {}, ["scale", "float32", "float64"]),
        (Net, {"modules": ("layers.*",)}, ["layers.*", "blocks, head"]),
        (Net, {"cpu_offload": True}, ["cpu_offload", "CPU"]),
        (Net, {"param_dtype": "half"}, ["param_dtype='half'", "'bf16'"]),
        (Net, {"accumulate": "never"}, ["accumulate='never'", "'whole'"]),
    ],
)
def test_what_cannot_be_divided_is_refused_on_all_ranks(
    ranks: Ranks, model: type[nn.Module], options: dict[str, Any], words: list[str]
) -> None:
    check_refused(ranks, words, spread, model, options)


def scripted(world: shoal.World, directory: Path) -> None:
    shoal.export(made(world), directory / "model.ts")


def test_programs_are_not_exported_from_shares(ranks: Ranks, tmp_path: Path) -> None:
    check_refused(ranks, "model.safetensors", scripted, tmp_path, kind=shoal.CheckpointError)

"""The random numbers of modules belong to samples: the same at any split of the same batches."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from shoal.data.micro import CURRENT_DRAWS, Draws, MicroBatch
from shoal.strategies.random_draws import philox
from shoal.strategies.random_draws.draws import register
from shoal.strategies.random_draws.layouts import Layouts

SAMPLES, WIDTH, STEPS = 29, 8, 6
LENGTH = 5  # equals the number of samples of some micro-batches, so that one size fits two dimensions


class Everything(nn.Module):
    """Each layer of torch that draws, and functions that draw as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=first)
            for first in (False, True)
        )
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        self.drops = nn.ModuleList([nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)])
        self.channels = nn.Dropout1d(0.4)
        self.planes = nn.ModuleList([nn.Dropout2d(0.2), nn.Dropout3d(0.2)])
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.rrelu = nn.RReLU()
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder[0](x.transpose(0, 1)).transpose(0, 1)  # (length, samples, width)
        h = self.encoder[1](h)
        for drop in self.drops:
            h = drop(h)
        h = h + self.attention(h, h, h, need_weights=True)[0]  # over samples * heads
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + F.scaled_dot_product_attention(h, h, h, dropout_p=0.2)
        h = self.channels(self.convolution(h.transpose(1, 2))).transpose(1, 2)
        h = self.planes[0](h.unsqueeze(-1)).squeeze(-1)
        h = self.planes[1](h[..., None, None])[..., 0, 0]
        h = self.rrelu(h) * F.gumbel_softmax(h, dim=-1)
        h = (
            h * torch.bernoulli(torch.full((len(h), 1, 1), 0.8, dtype=h.dtype)) / 0.8
        )  # stochastic depth
        h = h * h.new_empty(len(h), 1, 1).bernoulli_(0.8).div_(0.8)
        h = h + torch.rand(len(h), 1, 1, dtype=h.dtype) + 0.1 * torch.randn_like(h)
        h = h + torch.randint(0, 3, h.shape) + torch.rand(WIDTH, dtype=h.dtype)  # no sample dimension
        flat = F.dropout(h.reshape(-1, WIDTH), 0.2).reshape(h.shape)  # (samples * length, width)
        output: Tensor = self.last(flat)
        return output.mean(1)


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((SAMPLES, LENGTH, WIDTH), (SAMPLES, 1))
    inputs, targets = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return inputs, targets


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch[1], reduction="sum"), len(output)


def train(
    world: shoal.World,
    strategy: Any = None,
    micro_batches: int = 1,
    kind: Callable[[], nn.Module] = Everything,
    batch_size: int = 10,
    random: str = "samples",
) -> list[float]:
    torch.manual_seed(2)
    model = shoal.parallelize(kind().double(), world, strategy, random=random)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shoal.Task(loss), clip=1.0)
    loader = shoal.Loader(dataset(), world, batch_size=batch_size, micro_batches=micro_batches)
    taken = [step(batch) for batch in itertools.islice(loader.epochs(9), STEPS)]
    return [each for one in taken for each in (one.loss, one.norm)]


UNITS = ["encoder.*", "attention", "drops.*"]
RECOMPUTED = [shoal.ActivationCheckpointing(modules=UNITS), shoal.DDP()]


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[int, str], Ranks]]:
    with ExitStack() as stack:
        worlds: dict[tuple[int, str], Ranks] = {}

        def ranks(size: int, layout: str) -> Ranks:
            if (size, layout) not in worlds:
                worlds[size, layout] = stack.enter_context(Ranks(size, layout=layout, seed=3))
            return worlds[size, layout]

        yield ranks


@pytest.fixture(scope="module")
def alone() -> list[float]:
    with shoal.init(seed=3) as world:
        return train(world)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("size", "layout", "strategy", "micro_batches"),
    [
        (1, "replicate=-1", None, 3),
        (2, "replicate=-1", None, 1),
        (3, "replicate=-1", None, 2),
        (2, "replicate=-1", RECOMPUTED, 1),
        pytest.param(2, "shard=-1", shoal.FSDP(), 2, marks=FULL),
        pytest.param(4, "replicate=2,shard=2", shoal.FSDP(), 1, marks=FULL),
        pytest.param(3, "shard=-1", [RECOMPUTED[0], shoal.FSDP()], 2, marks=FULL),
        pytest.param(4, "replicate=-1", None, 1, marks=FULL),
        pytest.param(1, "replicate=-1", RECOMPUTED, 5, marks=FULL),
    ],
)
@pytest.mark.processes
def test_the_split_changes_no_number(
    started: Callable[[int, str], Ranks],
    alone: list[float],
    size: int,
    layout: str,
    strategy: Any,
    micro_batches: int,
) -> None:
    for found in started(size, layout).call(train, strategy, micro_batches):
        assert found == pytest.approx(alone, rel=1e-9)


def test_without_keys_the_split_does_change_them() -> None:
    with shoal.init(seed=3) as world:
        ours = train(world, random="ranks")
    with shoal.init(seed=3) as world:
        assert train(world, None, 3, random="ranks") != pytest.approx(ours, rel=1e-3)


class TwoViews(nn.Module):
    """Two forward passes with different masks of the same samples (Gao et al. 2021, SimCSE)."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.layer(self.drop(x)).mean(1) for _ in range(2))
        difference: Tensor = first - second
        return difference.square()


@pytest.mark.processes
def test_two_forward_passes_draw_two_masks(started: Callable[[int, str], Ranks]) -> None:
    with shoal.init(seed=3) as world:
        alone = train(world, kind=TwoViews)
    for found in started(2, "replicate=-1").call(train, None, 2, TwoViews):
        assert found == pytest.approx(alone, rel=1e-9)
    drop = nn.Dropout(0.5)
    register(drop)
    micro = MicroBatch(None, 0, 4, 1.0)
    assert not torch.equal(*keyed(lambda: (drop(torch.ones(4, 9)), drop(torch.ones(4, 9))), micro))


def own_loop(world: shoal.World, micro_batches: int) -> list[float]:
    torch.manual_seed(2)
    model = shoal.parallelize(Everything().double(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = shoal.Loader(dataset(), world, batch_size=10, micro_batches=micro_batches)
    found = []
    for batch in itertools.islice(loader.epochs(9), STEPS):
        for x, y in batch:
            batch.backward(total=F.mse_loss(model(x), y, reduction="sum"), count=len(y))
        found.append(batch.finish(model, clip=1.0).loss)
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.processes
def test_a_custom_loop_draws_what_a_step_draws(
    started: Callable[[int, str], Ranks], alone: list[float]
) -> None:
    # Of 4, 3 and 3 samples, none of which is the length of a sequence: no Task shows the layouts.
    for found in started(3, "replicate=-1").call(own_loop, 1):
        assert found == pytest.approx(alone[::2], rel=1e-9)


def resumed(world: shoal.World, directory: str, steps: int) -> list[float]:
    torch.manual_seed(2)
    model = shoal.parallelize(Everything().double(), world)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shoal.Task(loss), clip=1.0)
    loader = shoal.Loader(dataset(), world, batch_size=10)
    losses = []
    with shoal.Run(directory, step, loader) as run:
        run.restore()
        for batch in loader.epochs(9):
            losses.append(step(batch).loss)
            run.tick()
            if step.number == steps:
                run.save()
                return losses
    return losses


@pytest.mark.processes
def test_a_resumed_run_draws_the_same(
    started: Callable[[int, str], Ranks], alone: list[float], tmp_path: Path
) -> None:
    begun = started(3, "replicate=-1").call(resumed, str(tmp_path), 2)[0]
    rest = started(2, "replicate=-1").call(resumed, str(tmp_path), STEPS)[0]
    assert begun + rest == pytest.approx(alone[::2], rel=1e-9)


# The stream.


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 in Python's integers, as the paper writes it."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_the_reference_gives_the_known_answer() -> None:
    """Random123's kat_vectors, philox 4x32-10 of zeros."""
    assert reference([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("first", [0, 2**32 - 2])
def test_words_are_those_of_philox(first: int) -> None:
    key = (7, 2**32 - 3)
    expected = [
        [word for b in range(3) for word in reference([b, 0, p & 0xFFFFFFFF, p >> 32], list(key))]
        for p in range(first, first + 5)
    ]
    cpu = torch.device("cpu")
    words = torch.stack(philox._on_device(key, first, 5, 3, cpu), -1).view(5, 12)
    assert words.tolist() == expected
    numbers = philox.uniform(key, first, 5, 11, cpu, torch.float32)
    assert torch.equal(numbers, (words[:, :11] >> 8) * 2.0**-24)
    assert torch.equal(philox.below(0.3, key, first, 5, 11, cpu), words[:, :11] < round(0.3 * 2**32))
    pairs = words.view(5, 6, 2)
    doubles = ((pairs[..., 0] >> 5).double() * 2.0**26 + (pairs[..., 1] >> 6)) * 2.0**-53
    assert torch.equal(philox.uniform(key, first, 5, 6, cpu, torch.float64), doubles)


def keyed(call: Callable[[], Any], micro: MicroBatch, seed: int = 0) -> Any:
    token = CURRENT_DRAWS.set(Draws(micro, seed))
    try:
        return call()
    finally:
        CURRENT_DRAWS.reset(token)


class Calling(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self) -> Tensor:
        return self.function()


def draw(function: Callable[[], Tensor], first: int = 0, samples: int = 64, seed: int = 0) -> Tensor:
    module = Calling(function)
    register(module)
    found: Tensor = keyed(module, MicroBatch(None, first, samples, 1.0), seed)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "mean", "variance"),
    [("uniform_", 0.5, 1 / 12), ("normal_", 0.0, 1.0), ("exponential_", 1.0, 1.0)],
)
def test_moments_and_independence(name: str, mean: float, variance: float, dtype: torch.dtype) -> None:
    def function() -> Tensor:
        return getattr(torch.empty(64, 4096, dtype=dtype), name)()  # type: ignore[no-any-return]

    found = draw(function).double()
    count = found.numel()
    assert float(found.mean()) == pytest.approx(mean, abs=5 * (variance / count) ** 0.5)
    assert float(found.var()) == pytest.approx(variance, rel=20 / count**0.5)
    # Rows, sites and steps: correlations of 64 rows with each other, with those of another key and with
    # those of other positions are those of independent numbers.
    rows = torch.cat([found, draw(function, seed=1), draw(function, first=64)]).double()
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
    correlations = (rows @ rows.T / rows.shape[1]).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 6 / rows.shape[1] ** 0.5


def test_uniform_numbers_fill_all_intervals() -> None:
    found = draw(lambda: torch.empty(64, 4096).uniform_())
    counts = torch.histc(found, 256, 0, 1)
    expected = found.numel() / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert 255 - 6 * 22.6 < chi_squared < 255 + 6 * 22.6  # standard deviation: sqrt(2 * 255)
    assert float(found.min()) >= 0
    assert float(found.max()) < 1


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_keeps_its_fraction(p: float) -> None:
    found = draw(lambda: F.dropout(torch.ones(64, 4096), p))
    kept = float((found != 0).double().mean())
    assert kept == pytest.approx(1 - p, abs=5 * (0.25 / found.numel()) ** 0.5 if 0 < p < 1 else 0)
    assert found[found != 0].tolist() == pytest.approx(
        [1 / (1 - p)] * int(found.count_nonzero()) if p < 1 else []
    )


def test_a_generator_of_the_user_draws_itself() -> None:
    def function() -> Tensor:
        return torch.rand(64, 3, generator=torch.Generator().manual_seed(1))

    assert torch.equal(draw(function), function())
    assert torch.equal(draw(function, first=9), function())


def test_layouts_are_learned_from_several_sizes() -> None:
    known = Layouts()
    assert known.dimension("a", (8, 8, 3), 8) == 0  # ambiguous: the first dimension that fits
    assert known.dimension("a", (8, 4, 3), 4) == 1  # not any more: (length, samples, width)
    assert known.dimension("a", (8, 8, 3), 8) == 1
    assert known.dimension("b", (64, 8, 8), 8) == 1  # samples * heads, or (length, samples, …)
    assert known.dimension("b", (32, 8, 8), 4) == 0
    assert known.dimension("b", (64, 8, 8), 8) == 0
    assert known.dimension("c", (7,), 4) is None
    assert known.dimension("d", (8, 3), 4) == 0
    assert known.dimension("d", (8, 3), 2) is None  # the same shape: it counts no samples
    assert known.dimension("d", (8, 3), 4) is None


def test_a_model_after_all_others_were_deleted() -> None:
    program = """
import gc, torch, shoal
with shoal.init(device="cpu") as world:
    for _ in range(2):
        model = shoal.parallelize(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout()), world)
        del model
        gc.collect()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_wrong_value_is_refused() -> None:
    with (
        shoal.init() as world,
        pytest.raises(shoal.StepError, match=r"(?s)random='sample'.*'samples' or to 'ranks'"),
    ):
        shoal.parallelize(nn.Linear(1, 1), world, random="sample")

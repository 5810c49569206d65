"""Compressed gradients: nothing is lost for good, what must be exact is, and no order can hang."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.clocks import ManualClock
from helpers.ranks import Ranks
from shoal.strategies import engine_of
from shoal.strategies.data_parallel import choose_compression, compression
from shoal.strategies.data_parallel.compressed_collectives import CountedCollectives
from shoal.strategies.data_parallel.compression import BLOCK, Bucket, Compress

pytestmark = pytest.mark.processes

RANKS, WIDTH, SAMPLES, BATCH = 3, 12, 43, 12
HALVES: list[Compress] = ["fp16", "bf16"]
FEEDBACK: list[Compress] = ["int8", shoal.PowerSGD(rank=2, warmup_steps=2), shoal.TopK(ratio=0.1)]


def gradient(rank: int, *, finite: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [(40, 30), (7,), (3, 5, 20), (33,)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made[0] *= 10.0  # not all alike
    if not finite:
        made[2][1, 2, 3] = math.nan
    return made


def reduce(world: shoal.World, how: Compress, steps: int) -> tuple[list[Tensor], Any, int]:
    """The same gradients `steps` times: the sums of what came of them, what is left, bytes sent."""
    chosen, wire = compression.method(how), CountedCollectives(world)
    totals = [torch.zeros_like(each) for each in gradient(0)]
    for _ in range(steps):
        mine = gradient(world.rank)
        compression.reduce(chosen, Bucket(list("abcd"), mine), wire)
        for total, mean in zip(totals, mine, strict=True):
            total += mean
    sent = wire.sent
    chosen.synchronize(wire)
    return totals, chosen.state(), sent


def means() -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*map(gradient, range(RANKS)), strict=True)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "error"), [pytest.param("fp16", 1e-3, marks=pytest.mark.long), ("bf16", 1e-2)]
)
def test_halves_are_as_near_as_their_precision(how: str, error: float, ranks: Ranks) -> None:
    for totals, _, sent in ranks.call(reduce, how, 1):
        for found, mean in zip(totals, means(), strict=True):
            assert float((found - mean).norm() / mean.norm()) < error
        assert sent == 2 * sum(mean.numel() * 2 for mean in means()) * (RANKS - 1) // RANKS


@pytest.mark.parametrize(
    "how",
    [FEEDBACK[2], *(pytest.param(how, marks=pytest.mark.full) for how in FEEDBACK[:2])],
    ids=str,
)
def test_what_is_left_out_comes_later(how: Compress, ranks: Ranks) -> None:
    """What came in all steps, and the mean of what is left, are what should have come."""
    steps = 7
    for totals, state, sent in ranks.call(reduce, how, steps):
        for name, found, mean in zip("abcd", totals, means(), strict=True):
            left = state["left"].get(name, torch.zeros_like(mean))
            assert torch.allclose(found + left, steps * mean, rtol=0, atol=1e-9)
        whole = 2 * sum(mean.nbytes for mean in means()) * (RANKS - 1) // RANKS
        assert 0 < sent < (0.3 if how == "int8" else 0.7) * steps * whole


def rescaled(world: shoal.World, how: Compress) -> tuple[list[Tensor], dict[str, Tensor]]:
    """As `reduce`, with gradients multiplied by what differs from step to step."""
    chosen, wire = compression.method(how), CountedCollectives(world)
    totals = [torch.zeros_like(each) for each in gradient(0)]
    for scale in (65536.0, 32768.0, 65536.0):
        mine = [each * scale for each in gradient(world.rank)]
        compression.reduce(chosen, Bucket(list("abcd"), mine, scale), wire)
        for total, mean in zip(totals, mine, strict=True):
            total += mean / scale
    chosen.synchronize(wire)
    return totals, chosen.state()["left"]


@pytest.mark.parametrize("how", FEEDBACK, ids=str)
def test_what_is_left_out_has_no_scale(how: Compress, ranks: Ranks) -> None:
    for totals, left in ranks.call(rescaled, how):
        for name, found, mean in zip("abcd", totals, means(), strict=True):
            assert torch.allclose(found + left.get(name, 0 * mean), 3 * mean, rtol=0, atol=1e-9)


def scales(world: shoal.World) -> tuple[set[float], float]:
    """What the gradients that come to be compressed are multiplied by, as the engine has it."""
    net = Net()
    model = shoal.parallelize(net.layers.float(), world, shoal.DDP(compression="int8"))
    engine: Any = engine_of(model)
    method = engine.reducer._method
    seen, inner = set(), method.reduce

    def noted(bucket: Bucket, wire: CountedCollectives) -> None:
        seen.add(bucket.scale)
        inner(bucket, wire)

    method.reduce = noted
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = shoal.Step(model, optimizer, shoal.Task(loss), precision="fp16")
    inputs, targets = data()
    loader = shoal.Loader((inputs.float(), targets.float()), world, batch_size=BATCH)
    for batch in loader.epochs(1):
        step(batch)
    left = engine.state()["compression"]["left"].values()
    return seen, max(float(each.abs().max()) for each in left)


def test_with_fp16_the_scale_is_that_of_the_loss(ranks: Ranks) -> None:
    for seen, left in ranks.call(scales):
        assert 1.0 not in seen
        assert 65536.0 in seen
        assert left < 1.0


def in_16_bits(world: shoal.World, dtype: torch.dtype) -> list[float]:
    model = shoal.parallelize(
        nn.Linear(WIDTH, 40).to(dtype), world, shoal.DDP(compression=shoal.PowerSGD(warmup_steps=0))
    )

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return (output.float() - 1.0).square().mean(1).sum(), len(output)

    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.5), shoal.Task(loss))
    loader = shoal.Loader((data()[0].to(dtype),), world, batch_size=BATCH)
    return [step(batch).loss for batch in loader.epochs(5)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_16_bits_are_compressed_too(dtype: torch.dtype, ranks: Ranks) -> None:
    for losses in ranks.call(in_16_bits, dtype):
        assert losses[-1] < losses[0] / 2


def spoiled(world: shoal.World, how: Compress) -> tuple[bool, bool]:
    chosen, wire = compression.method(how), CountedCollectives(world)
    mine = gradient(world.rank, finite=world.rank != 1)
    compression.reduce(chosen, Bucket(list("abcd"), mine), wire)
    seen = all(bool(each.isfinite().all()) for each in mine)
    mine = gradient(world.rank)
    compression.reduce(chosen, Bucket(list("abcd"), mine), wire)
    return seen, all(bool(each.isfinite().all()) for each in mine)


@pytest.mark.parametrize(
    "how", [*HALVES, "int8", shoal.PowerSGD(warmup_steps=0), shoal.TopK()], ids=str
)
def test_what_is_not_finite_is_seen_by_all_and_does_not_stay(how: Compress, ranks: Ranks) -> None:
    assert ranks.call(spoiled, how) == [(False, True)] * RANKS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_8_bits_of_16_turn_no_sign(dtype: torch.dtype) -> None:
    """However the scale is rounded in 16 bits, the largest element is no more than the last level."""
    generator = torch.Generator().manual_seed(0)
    for exponent in range(4, 24):
        given = torch.randn(1, 32 * BLOCK, generator=generator).mul(2.0**-exponent).to(dtype)
        found = compression._restored(*compression._quantised(given), dtype)
        assert not (found.sign() * given.sign() < 0).any()
        assert float((found - given).abs().max()) <= 0.01 * float(given.abs().max()) + 2.0**-24


@pytest.mark.parametrize("how", FEEDBACK, ids=str)
@pytest.mark.parametrize("before", FEEDBACK, ids=str)
def test_another_method_goes_on_with_what_is_left(before: Compress, how: Compress) -> None:
    """Also where only some parameters of a bucket have something left."""
    with shoal.init(device="cpu") as world:
        wire, kept = CountedCollectives(world), compression.method(before)
        total = [torch.zeros_like(each) for each in gradient(0)]
        chosen = compression.method(how)
        for step in range(8):
            if step == 4:
                chosen.load_state(kept.state())
            mine = gradient(0)
            compression.reduce(kept if step < 4 else chosen, Bucket(list("abcd"), mine), wire)
            for sums, mean in zip(total, mine, strict=True):
                sums += mean
        left = chosen.state()["left"]
        for name, sums, each in zip("abcd", total, gradient(0), strict=True):
            assert torch.allclose(sums + left.get(name, 0.0 * each), 8 * each, rtol=0, atol=1e-9)
        if isinstance(how, shoal.PowerSGD):
            assert not any(left[name].any() for name in "bd" if name in left)  # it sends vectors whole


def test_a_bucket_without_elements(ranks: Ranks) -> None:
    assert ranks.call(of_nothing) == [True] * RANKS


def of_nothing(world: shoal.World) -> bool:
    for how in (*HALVES, *FEEDBACK):
        compression.reduce(
            compression.method(how), Bucket(["empty"], [torch.zeros(0, 5)]), CountedCollectives(world)
        )
    return True


class Failing:
    """A loss that is no number in one step, on one rank."""

    def __init__(self, world: shoal.World) -> None:
        self.fails = False
        self._here = world.rank == 1

    def __call__(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        squares, count = loss(output, batch)
        return squares * (math.nan if self.fails and self._here else 1.0), count


def through_failures(world: shoal.World, how: Compress, own: bool, skip: bool) -> list[Tensor]:
    """Where training ends whose third and sixth batch fails; with `skip`, that never had them."""
    model = shoal.parallelize(Net(), world, shoal.DDP(compression=how, bucket_cap_mb=0.001))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    failing = Failing(world)
    step = shoal.Step(model, optimizer, shoal.Task(failing))
    for number, batch in enumerate(shoal.Loader(data(), world, batch_size=BATCH).epochs(3)):
        failing.fails = number in (2, 5)
        if skip and failing.fails:
            continue
        with pytest.raises(shoal.StepError) if failing.fails else contextlib.nullcontext():
            if own:
                for micro in batch:
                    total, count = failing(model(micro[0]), micro)
                    batch.backward(total=total, count=count)
                batch.finish(model)
                optimizer.step()
                optimizer.zero_grad()
            else:
                step(batch)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("how", FEEDBACK, ids=str)
@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_batch_that_fails_leaves_nothing(how: Compress, own: bool, ranks: Ranks) -> None:
    failed, never = (ranks.call(through_failures, how, own, skip) for skip in (False, True))
    for one, other in zip(failed, never, strict=True):
        assert all(map(torch.equal, one, other))


class Heads(nn.Module):
    """Of which the second is used when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(WIDTH, 1).double(), nn.Linear(WIDTH, 1).double()
        self.both = True

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.first(inputs)
        return found + self.second(inputs) if self.both else found


def left_of_second(world: shoal.World, how: Compress) -> list[float]:
    strategy = shoal.DDP(compression=how, find_unused_parameters=True, bucket_cap_mb=0.00001)
    heads = Heads()
    model = shoal.parallelize(heads, world, strategy)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    engine: Any = engine_of(model)
    found = []
    for batch in shoal.Loader(data(), world, batch_size=BATCH).epochs(1):
        step(batch)
        found.append(float(engine.state()["compression"]["left"]["second.weight"].norm()))
        heads.both = False
    return found


@pytest.mark.parametrize("how", ["int8", shoal.TopK(ratio=0.1)], ids=str)
def test_what_nobody_uses_waits_for_who_does(how: Compress, ranks: Ranks) -> None:
    for found in ranks.call(left_of_second, how):
        assert found == found[:1] * 4
        assert found[0] > 0


class Net(nn.Module):
    """With a complex parameter, in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1)]
        self.layers = nn.Sequential(*layers).double()
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers((inputs * self.turn).real)
        return found


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    return inputs, inputs.sin().sum(1, keepdim=True)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


def train(
    world: shoal.World,
    how: Compress | None,
    steps: int,
    run: Path | None = None,
    strategy: Any = None,
) -> tuple[list[float], list[Tensor]]:
    """In many small buckets, with accumulation and clipping."""
    made = strategy or shoal.DDP(compression=how, bucket_cap_mb=0.001)
    model = shoal.parallelize(Net(), world, made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    loader = shoal.Loader(data(), world, batch_size=BATCH, micro_batches=2)
    with shoal.Run(run, step, loader, trackers=()) if run else contextlib.nullcontext() as opened:
        if opened:
            opened.restore()
        losses = []
        for batch in loader.epochs(10**6):
            losses.append(step(batch).loss)
            if opened:
                opened.tick(every=5)
            if step.number >= steps:
                break
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.full
@pytest.mark.parametrize("how", ["int8", "fp16", shoal.PowerSGD()], ids=str)
def test_it_learns_nearly_as_without(how: Compress, ranks: Ranks) -> None:
    exact = ranks.call(train, None, 40)
    found = ranks.call(train, how, 40)
    assert found[0][0][0] == pytest.approx(exact[0][0][0], rel=1e-12)  # the sum of losses is exact
    assert all(each[0] == found[0][0] for each in found)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one, other)  # ranks do not drift apart
    assert found[0][0] != exact[0][0]  # it is compressed indeed
    near, first = exact[0][0][-1], exact[0][0][0]
    assert abs(found[0][0][-1] - near) < 0.1 * (first - near)


def forgotten(world: shoal.World, how: Compress) -> bool:
    model = shoal.parallelize(Net(), world, shoal.DDP(compression=how))
    engine = weakref.ref(engine_of(model))
    del model
    gc.collect()
    return engine() is None


def test_an_engine_goes_with_its_model(ranks: Ranks) -> None:
    assert all(ranks.call(forgotten, "int8"))


@pytest.mark.full
@pytest.mark.parametrize("how", FEEDBACK, ids=str)
def test_a_resumed_run_ends_bit_equal(how: Compress, ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.call(train, how, 13, tmp_path / "whole")
    ranks.call(train, how, 8, tmp_path / "parts")
    parts = ranks.call(train, how, 13, tmp_path / "parts")
    for one, other in zip(whole[0][1], parts[0][1], strict=True):
        assert torch.equal(one, other)


def compressed_steps(world: shoal.World) -> list[bool]:
    """Which of some steps were not exact, each in an attempt of its own."""
    wire, options = CountedCollectives(world), shoal.PowerSGD(rank=1, warmup_steps=3)
    kept: dict[str, Any] = {}
    lossy = []
    for _ in range(5):
        chosen = compression.method(options)
        chosen.load_state(kept)
        gradients = [torch.randn(8, 8, generator=torch.Generator().manual_seed(world.rank))]
        exact = wire.mean(gradients[0].clone())
        compression.reduce(chosen, Bucket(["weight"], gradients), wire)
        lossy.append(not torch.allclose(gradients[0], exact))
        kept = chosen.state()
    return lossy


def test_the_whole_steps_are_counted_over_all_attempts(ranks: Ranks) -> None:
    assert ranks.call(compressed_steps) == [[False] * 3 + [True] * 2] * RANKS


@pytest.mark.full
def test_what_is_left_goes_on_with_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.call(train, shoal.TopK(ratio=0.1), 5, tmp_path)
    with Ranks(2) as fewer:
        found = fewer.call(_left, tmp_path)
    assert found[0] == found[1] > 0


def _left(world: shoal.World, run: Path) -> float:
    model = shoal.parallelize(Net(), world, shoal.DDP(compression=shoal.TopK(ratio=0.1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    loader = shoal.Loader(data(), world, batch_size=BATCH, micro_batches=2)
    with shoal.Run(run, step, loader, trackers=()) as opened:
        opened.restore()
    engine = engine_of(model)
    return sum(float(each.norm()) for each in engine.state()["compression"]["left"].values())


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("again", range(20))
def test_many_buckets_never_hang(again: int) -> None:
    """500 steps on 4 ranks, 8 buckets."""
    with Ranks(4) as started:
        for how in FEEDBACK:
            assert len(started.call(train, how, 500)[0][0]) == 500


def slowly(world: shoal.World, rate: float) -> str:
    """The choice where each byte takes its time."""

    clock = ManualClock()

    class Narrow(CountedCollectives):
        def mean(self, tensor: Tensor) -> Tensor:
            clock.sleep(tensor.nbytes / rate)
            return super().mean(tensor)

        def swap(self, rows: Tensor) -> Tensor:
            clock.sleep(rows.nbytes / rate)
            return super().swap(rows)

    gradients = [("weight", torch.zeros(256, 512)), ("bias", torch.zeros(512))]
    return str(choose_compression.choose(gradients, Narrow(world), clock).value)


def test_it_is_chosen_by_the_link(ranks: Ranks) -> None:
    found = ranks.call(slowly, 3e6)
    assert len({*found}) == 1
    assert "PowerSGD" in found[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: shoal.DDP(compression="int4"), r"compression='int4'"),
        (lambda: shoal.DDP(compression=8), r"compression=8"),  # type: ignore[arg-type]
        (lambda: shoal.TopK(ratio=0.0), r"ratio=0.0"),
        (lambda: shoal.TopK(ratio="0.1"), r"ratio='0.1'"),  # type: ignore[arg-type]
        (lambda: shoal.PowerSGD(rank=0), r"rank=0"),
        (
            lambda: compression.reduce(None, Bucket(["n"], [torch.ones(2, dtype=torch.int64)]), None),  # type: ignore[arg-type]
            r"gradients of int64",
        ),
    ],
)
def test_bad_options_are_refused(make: Any, said: str) -> None:
    with pytest.raises(shoal.StepError, match=said):
        make()

"""Hogwild: updates that are all there, staleness counted and bounded, deaths survived."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import RankError, Ranks
from shoal.strategies import engine_of
from shoal.strategies.asynchronous import shared_parameters
from shoal.strategies.asynchronous.hogwild import HogwildEngine

pytestmark = pytest.mark.processes

WIDTH, SAMPLES, BATCH = 64, 64, 8
RATE = 2**-6
PLACES = [pytest.param(False, id="shared"), pytest.param(True, id="served")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, timeout=600.0, prepare_timeout=600.0) as started:
        yield started


@pytest.fixture
def mortals() -> Iterator[Ranks]:
    """Three, of which some die in one test."""
    with Ranks(3, timeout=600.0, prepare_timeout=600.0) as started:
        yield started


class Done(NamedTuple):
    """Of one rank: where it ended, the shares that it saw, and what was counted."""

    weight: Tensor
    shares: list[list[int]]
    staleness: dict[int, int]
    clocks: list[list[int]]
    loss: float


def numbers() -> tuple[Tensor, Tensor]:
    """Whole numbers, so that their sums are exact; and which samples they are."""
    inputs = torch.randint(-8, 9, (SAMPLES, WIDTH), generator=torch.Generator().manual_seed(1))
    return inputs.double(), torch.arange(SAMPLES)


def linear() -> nn.Linear:
    net = nn.Linear(WIDTH, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    return net


def engine_in(model: nn.Module) -> HogwildEngine:
    engine = engine_of(model)
    assert isinstance(engine, HogwildEngine)
    return engine


Act = Callable[[str], None]


class Script:
    """What ranks do and wait for, by names in their store: "rank reads step" and "rank ends step"."""

    def __init__(self, world: shoal.World, name: str, awaited: dict[str, str]) -> None:
        self._store = world.store(f"test/{name}")
        self._awaited = awaited

    def at(self, moment: str) -> None:
        self._store.set(moment, "")
        if moment in self._awaited:
            self._store.wait([self._awaited[moment]])


def sum_up(
    world: shoal.World, strategy: shoal.Hogwild, steps: int, name: str, awaited: dict[str, str]
) -> Done:
    """Steps on a loss whose gradient is the inputs, wherever the parameters are."""
    script = Script(world, name, awaited)
    model = shoal.parallelize(linear(), world, strategy)
    engine = engine_in(model)
    shares: list[list[int]] = []
    clocks: list[list[int]] = []

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        if torch.is_grad_enabled():  # and not in the trial before the first step
            shares.append(batch[1].tolist())
            clocks.append(engine._commons.clocks())
            script.at(f"{world.rank} reads {len(shares)}")
        return output.sum(), len(output)

    late = engine._late

    def held(bound: int) -> list[int]:
        found = late(bound)
        if found:
            script.at(f"{world.rank} waits")
        return found

    engine._late = held  # type: ignore[method-assign]
    step = shoal.Step(
        model, torch.optim.SGD(model.parameters(), lr=RATE), shoal.Task(loss, inputs=lambda b: b[0])
    )
    loader = shoal.Loader(numbers(), world, batch_size=BATCH)
    for batch in loader.epochs(100):
        step(batch)
        script.at(f"{world.rank} ends {step.number}")
        if step.number == steps:
            break
    evaluated = shoal.evaluate(step, numbers())["loss"]
    return Done(model.weight.detach().clone(), shares, engine.staleness, clocks, evaluated)


def sum_of(found: list[Done]) -> Tensor:
    """Where the weight ends if no update is lost."""
    inputs, _ = numbers()
    means = [inputs[share].mean(0) for each in found for share in each.shares]
    return -RATE * torch.stack(means).sum(0, keepdim=True)


def turns(steps: int) -> dict[str, str]:
    """Rank 0 and rank 1 step one after the other."""
    first = {f"0 reads {n}": f"1 ends {n - 1}" for n in range(2, steps + 1)}
    return first | {f"1 reads {n}": f"0 ends {n}" for n in range(1, steps + 1)}


@pytest.mark.compat
@pytest.mark.parametrize("server", PLACES)
def test_every_update_is_there(server: bool, ranks: Ranks) -> None:
    """One after the other none can be lost, though each is computed before the other's is there."""
    steps = 6
    strategy = shoal.Hogwild(server=server)
    found = ranks.call(sum_up, strategy, steps, f"turns {server}", turns(steps))
    for each in found:
        assert torch.equal(each.weight, sum_of(found))
        assert sum(each.staleness.values()) == steps
        assert each.loss == found[0].loss


def test_staleness_is_counted_exactly(ranks: Ranks) -> None:
    """Rank 1 ends three steps while rank 0 is in its first one, and so on."""
    awaited = {
        "1 reads 1": "0 reads 1",
        "0 reads 1": "1 reads 4",  # three updates have come since
        "1 reads 4": "0 reads 3",  # two
        "0 reads 3": "1 ends 4",  # one
    }
    first, second = ranks.call(sum_up, shoal.Hogwild(), 4, "counted", awaited)
    assert first.staleness == {0: 2, 1: 1, 3: 1}
    assert second.staleness == {0: 3, 2: 1}
    assert torch.equal(first.weight, sum_of([first, second]))


@pytest.mark.parametrize("server", [PLACES[0], pytest.param(True, id="served", marks=pytest.mark.full)])
def test_who_is_ahead_waits_at_the_bound(server: bool, ranks: Ranks) -> None:
    """Rank 1 reads and does nothing until rank 0 waits for it, which it does after three steps."""
    strategy = shoal.Hogwild(max_staleness=2, server=server)
    found = ranks.call(sum_up, strategy, 5, f"bound {server}", {"1 reads 1": "0 waits"})
    first, _ = found
    assert first.clocks[2] == [2, 0]
    assert first.clocks[3][1] >= 1
    for rank, each in enumerate(found):
        assert all(clocks[rank] - min(clocks) <= 2 for clocks in each.clocks)


@pytest.mark.full
def test_without_a_lock_few_updates_are_lost() -> None:
    """Two that add to the same number in the same moment may lose one; most don't."""
    with Ranks(4, timeout=600.0) as four:
        found = four.call(sum_up, shoal.Hogwild(), 100, "free", {})
    expected = sum_of(found)
    lost = float((found[0].weight - expected).abs().sum() / expected.abs().sum())
    assert lost < 0.2
    assert sum(len(each.shares) for each in found) == sum(
        sum(each.staleness.values()) for each in found
    )


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1)).double()


def curve() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(1)).double()
    return inputs, inputs.sin().sum(1, keepdim=True)


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


class Trained(NamedTuple):
    """Of one rank that lived to the end."""

    before: float
    after: float
    samples: int
    steps: int
    ranks: tuple[int, int]
    parameters: list[Tensor]
    moments: list[Tensor]


def train(
    world: shoal.World,
    strategy: shoal.Hogwild,
    directory: Path,
    epochs: int,
    dies: dict[int, int] | None = None,
) -> Trained:
    """With AdamW and a Run; rank R is killed after step `dies[R]`."""
    me = world.rank
    model = shoal.parallelize(network(), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = shoal.Step(model, optimizer, shoal.Task(squares))
    loader = shoal.Loader(curve(), world, batch_size=12)
    before = shoal.evaluate(step, curve())["loss"]
    with shoal.Run(directory, step, loader, trackers=()) as run:
        run.restore()
        for batch in loader.epochs(epochs):
            step(batch)
            run.tick(every=8)
            if dies is not None and dies.get(me) == step.number:
                os.kill(os.getpid(), signal.SIGKILL)
        result = shoal.evaluate(step, curve())
        run.save()
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    return Trained(
        before,
        result["loss"],
        result["samples"],
        step.number,
        (world.rank, world.size),
        [p.detach().clone() for p in model.parameters()],
        moments,
    )


def same(found: list[Trained]) -> bool:
    """Whether ranks ended with the same parameters and moments."""
    first = found[0].parameters + found[0].moments
    return all(
        torch.equal(a, b)
        for each in found
        for a, b in zip(first, each.parameters + each.moments, strict=True)
    )


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(shoal.Hogwild(), marks=pytest.mark.full),
        pytest.param(shoal.Hogwild(server=True, max_staleness=1), marks=pytest.mark.full),
    ],
)
def test_it_learns_and_goes_on_with_another_number_of_workers(
    strategy: shoal.Hogwild, ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.call(train, strategy, tmp_path, 3)
    assert all(each.after < each.before for each in found)
    assert same(found)
    assert found[0].samples == 96
    assert found[0].steps == 24
    with shoal.init(device="cpu") as world:
        alone = train(world, shoal.Hogwild(), tmp_path, 4)
    assert alone.steps == 32
    assert alone.after < found[0].before


@pytest.mark.parametrize(
    ("after", "server"),
    [
        pytest.param(11, False, marks=pytest.mark.full),
        pytest.param(11, True, marks=pytest.mark.long),
        pytest.param(31, False, marks=pytest.mark.long),
        pytest.param(32, True, marks=pytest.mark.full),
    ],
)
def test_who_is_killed_does_not_stop_the_others(
    after: int, server: bool, mortals: Ranks, tmp_path: Path
) -> None:
    """Beside a bound that would let the others wait for it; after its last step, too."""
    strategy = shoal.Hogwild(server=server, max_staleness=3)
    found = mortals.attempt(train, strategy, tmp_path, 4, {1: after})
    assert isinstance(found[1], RankError)
    living = [each for each in found if isinstance(each, Trained)]
    assert [each.ranks for each in living] == [(0, 2), (1, 2)], found
    assert same(living)
    assert [each.samples for each in living] == [96, 96]
    assert living[0].steps == 32
    assert living[0].after < living[0].before
    with shoal.init(device="cpu") as world:
        assert train(world, shoal.Hogwild(), tmp_path, 5).steps == 40


@pytest.mark.full
def test_a_server_that_is_killed_is_an_error_at_once(mortals: Ranks, tmp_path: Path) -> None:
    """And not after ten minutes, this world's time limit."""
    found = mortals.attempt(train, shoal.Hogwild(server=True), tmp_path, 4, {0: 5})
    for each in found[1:]:
        assert isinstance(each, RankError)
        assert isinstance(each.error, shoal.StepError), each.text
        assert "does not answer any more" in each.error.found


def train_for(world: shoal.World, seconds: float) -> int:
    """Steps whose time goes into calls, and no meeting."""
    model = shoal.parallelize(nn.Linear(1000, 1000), world, shoal.Hogwild(server=True))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=1e-6), shoal.Task(squares))
    samples = torch.zeros(4, 1000), torch.zeros(4, 1000)
    until = time.monotonic() + seconds
    for batch in shoal.Loader(samples, world, batch_size=2).epochs(10**9):
        step(batch)
        if time.monotonic() > until:
            return step.number
    raise AssertionError("unreachable")


@pytest.mark.long
def test_workers_that_are_answered_do_not_hang_however_long_they_do_not_meet() -> None:
    with Ranks(2, timeout=3, prepare_timeout=600) as two:
        assert min(two.call(train_for, 10.0)) > 1


def look_around(world: shoal.World) -> tuple[bool, bool, list[str]]:
    """Whether shared memory is mapped while there is a model, and after; what there is by name."""
    model = shoal.parallelize(linear(), world, shoal.Hogwild(server=False))
    during = mapped()
    named = os.listdir("/dev/shm")
    del model
    gc.collect()
    return during, mapped(), named


def mapped() -> bool:
    return "memfd:shoal" in Path("/proc/self/maps").read_text()


def test_the_memory_goes_with_those_that_use_it(ranks: Ranks) -> None:
    """It never has a name that could be left behind by whoever is killed."""
    for during, after, named in ranks.call(look_around):
        assert during
        assert not after
        assert not [name for name in named if "shoal" in name]


def listening(world: shoal.World) -> set[str]:
    """At which addresses others can reach this rank since there is a server."""
    process = psutil.Process()

    def found() -> set[tuple[str, int]]:
        sockets = process.net_connections("tcp")
        return {one.laddr for one in sockets if one.status == psutil.CONN_LISTEN}

    before = found()
    model = shoal.parallelize(linear(), world, shoal.Hogwild(server=True))
    del model
    return {address for address, _ in found() - before}


@pytest.mark.full
def test_on_one_machine_nobody_else_can_call() -> None:
    with Ranks(2) as started:
        for addresses in started.call(listening):
            assert addresses == {"127.0.0.1"}


@pytest.mark.parametrize("server", [None, False, True])
def test_alone_it_trains_wherever_the_parameters_would_be(server: bool | None) -> None:
    with shoal.init() as world:
        model = shoal.parallelize(linear(), world, shoal.Hogwild(server=server, max_staleness=0))
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=1e-3), shoal.Task(squares))
        samples = torch.ones(8, WIDTH).double(), torch.ones(8, 1).double()
        losses = [step(batch).loss for batch in shoal.Loader(samples, world, batch_size=4).epochs(2)]
    assert losses[-1] < losses[0]


def lie(world: shoal.World, server: bool | None) -> str:
    """Rank 0 says that it is another process, as if it were on another machine."""
    real = os.getpid
    shared_parameters.os.getpid = lambda: 1  # type: ignore[attr-defined]
    try:
        model = shoal.parallelize(linear(), world, shoal.Hogwild(server=server))
    finally:
        shared_parameters.os.getpid = real  # type: ignore[attr-defined]
    return type(engine_in(model)._commons).__name__


def test_ranks_that_share_no_memory_have_a_server(ranks: Ranks) -> None:
    assert ranks.call(lie, None) == ["SharedMemory", "Client"]
    for refused in ranks.attempt(lie, False):
        assert isinstance(refused.error, shoal.StepError), refused
        assert "rank 1 cannot map the memory of rank 0" in refused.error.found


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: shoal.Hogwild(max_staleness=-1), r"staleness=-1"),
        (lambda: shoal.Hogwild(max_staleness=0.5), r"staleness=0.5"),  # type: ignore[arg-type]
        (lambda: shoal.Hogwild(max_staleness=True), r"staleness=True"),
        (lambda: shoal.Hogwild(server="node1"), r"server='node1'"),  # type: ignore[arg-type]
    ],
)
def test_bad_options_are_refused(make: Any, said: str) -> None:
    with pytest.raises(shoal.StepError, match=said):
        make()


@pytest.mark.parametrize(
    ("model", "strategy", "said"),
    [
        (nn.ReLU, shoal.Hogwild(), "without trainable parameters"),
        (linear, [shoal.Hogwild(), shoal.DDP()], "no strategy can follow it"),
        (linear, [shoal.FSDP(), shoal.Hogwild()], "no strategy can follow it"),
    ],
)
def test_what_it_can_not_spread_is_refused(model: Any, strategy: Any, said: str) -> None:
    with shoal.init(device="cpu") as world, pytest.raises(shoal.StepError, match=said):
        shoal.parallelize(model(), world, strategy)


def test_steps_that_it_can_not_take_are_refused() -> None:
    with shoal.init(device="cpu") as world:
        model = shoal.parallelize(network(), world, shoal.Hogwild())
        data = shoal.Loader(curve(), world, batch_size=12)
        batch = next(data.epochs(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        half = shoal.Step(model, optimizer, shoal.Task(squares), precision="fp16")
        with pytest.raises(shoal.StepError, match="precision='fp16'"):
            half(batch)
        micro = next(iter(batch))
        total, count = squares(model(micro[0]), micro)
        with pytest.raises(shoal.StepError, match=r"step = shoal\.Step"):
            batch.backward(total=total, count=count)


def test_complex_parameters_are_shared_too() -> None:
    with shoal.init(device="cpu") as world:
        model = shoal.parallelize(nn.Linear(2, 1, dtype=torch.complex64), world, shoal.Hogwild())
        inputs = torch.ones(4, 2, dtype=torch.complex64)

        def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
            return output.abs().square().sum(), len(output)

        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
        losses = [step(batch).loss for batch in shoal.Loader((inputs,), world, batch_size=4).epochs(3)]
        assert losses[2] < losses[0]


def averaged(world: shoal.World, met: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Averages of parameters before they are evaluated and after, and the parameters then."""
    model = shoal.parallelize(network(), world, shoal.Hogwild())
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(squares))
    ema = shoal.EMA(model, decay=0.9)
    for batch in shoal.Loader(curve(), world, batch_size=12).epochs(1):
        step(batch)
        ema.update()
    mean = [average.clone() for average in ema.state_dict()["averages"].values()]
    for average in mean:
        world.all_reduce(average).div_(world.size)
    if met:
        shoal.evaluate(step, curve())
    with ema.applied():
        shoal.evaluate(step, curve())
    shoal.evaluate(step, curve())
    after = [average.clone() for average in ema.state_dict()["averages"].values()]
    return mean, after, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("met", [False, True])
def test_averaged_parameters_are_evaluated_and_kept(met: bool, ranks: Ranks) -> None:
    """Each worker has averages of its own, of which the mean is evaluated, and gone on from."""
    found = ranks.call(averaged, met)
    for mean, after, parameters in found:
        pairs = zip(mean, after, found[0][1], strict=True)
        assert all(torch.allclose(a, b) and torch.equal(b, c) for a, b, c in pairs)
        assert all(torch.equal(a, b) for a, b in zip(parameters, found[0][2], strict=True))
        assert not any(torch.allclose(a, b) for a, b in zip(parameters, after, strict=True))

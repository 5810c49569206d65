"""LocalSGD and DiLoCo do what the papers say: beside replicas simulated in one process."""

from __future__ import annotations

import contextlib
import copy
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from shoal.strategies import engine_of
from shoal.strategies.data_parallel.local_sgd import AveragingEngine

pytestmark = pytest.mark.processes

RANKS, WIDTH, SAMPLES, BATCH = 3, 4, 25, 6
RATE = 0.05
CLOSE = 1e-12


class Trained(NamedTuple):
    """What a rank saw, step by step, and where it ended."""

    seen: list[list[int]]
    parameters: list[Tensor]
    own: list[Tensor]
    bytes: int
    loss: float


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def data() -> tuple[Tensor, Tensor, Tensor]:
    """The last batch of an epoch has one sample: all ranks but one have none."""
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    return inputs, inputs.sin().sum(1, keepdim=True), torch.arange(SAMPLES)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


def train(world: shoal.World, strategy: Any, optimizer: str, steps: int, run: Path | None) -> Trained:
    net = network()
    if world.rank:
        nn.init.zeros_(net[0].weight)  # type: ignore[arg-type]  # rank 0's count
    model = shoal.parallelize(net, world, strategy)
    engine = engine_of(model)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=RATE)
    step = shoal.Step(model, made, shoal.Task(loss))
    loader = shoal.Loader(data(), world, batch_size=BATCH)
    seen = []
    with shoal.Run(run, step, loader) if run else contextlib.nullcontext() as opened:
        if opened:
            opened.restore()
        for batch in loader.epochs(10):
            seen.append([int(i) for micro in batch.micros if micro.weight for i in micro.value[2]])
            step(batch)
            if opened:
                opened.tick(every=4)
            if step.number == steps:
                break
    if not isinstance(engine, AveragingEngine):
        raise TypeError(type(engine))
    sent = engine.sent
    own = [p.detach().clone() for p in model.parameters()]
    evaluated = shoal.evaluate(step, data())["loss"]
    return Trained(seen, [p.detach().clone() for p in model.parameters()], own, sent, evaluated)


class Replicas:
    """The ranks in one process, with torch alone; they meet when told."""

    def __init__(self, optimizer: str) -> None:
        first = network()
        self.models = [copy.deepcopy(first) for _ in range(RANKS)]
        self.optimizers = [
            getattr(torch.optim, optimizer)(m.parameters(), lr=RATE) for m in self.models
        ]
        self.anchors = [p.detach().clone() for p in first.parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.anchors]

    def step(self, shares: list[list[int]]) -> None:
        inputs, targets, _ = data()
        for model, optimizer, share in zip(self.models, self.optimizers, shares, strict=True):
            if share:
                optimizer.zero_grad()
                (model(inputs[share]) - targets[share]).square().sum().div(len(share)).backward()
                optimizer.step()

    def means(self) -> list[Tensor]:
        own = zip(*(m.parameters() for m in self.models), strict=True)
        return [torch.stack([p.detach() for p in each]).mean(0) for each in own]

    def put(self, values: list[Tensor]) -> None:
        for model in self.models:
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.data.copy_(value)

    def average(self) -> None:
        self.put(self.means())

    def outer_step(self, rate: float, momentum: float) -> None:
        for anchor, velocity, mean in zip(self.anchors, self.velocity, self.means(), strict=True):
            way = anchor - mean
            velocity.mul_(momentum).add_(way)
            anchor.sub_(rate * (way + momentum * velocity))
        self.put(self.anchors)


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=CLOSE) for a, b in pairs)


STRATEGIES = [
    (shoal.LocalSGD(sync_every=4), lambda step: step % 4 == 0),
    (shoal.LocalSGD(sync_every=5, warmup_steps=3), lambda step: step % 5 == 0 or step <= 3),
    (shoal.DiLoCo(sync_every=3, lr=0.6, momentum=0.8), lambda step: step % 3 == 0),
]


@pytest.mark.parametrize(("strategy", "meets"), STRATEGIES, ids=lambda v: str(v)[:20])
@pytest.mark.parametrize("optimizer", [pytest.param("SGD", marks=pytest.mark.full), "AdamW"])
def test_ranks_do_what_replicas_in_one_process_do(
    strategy: Any, meets: Any, optimizer: str, ranks: Ranks
) -> None:
    steps = 14
    found = ranks.call(train, strategy, optimizer, steps, None)
    replicas = Replicas(optimizer)
    meetings = 0
    for number in range(1, steps + 1):
        shares = [each.seen[number - 1] for each in found]
        assert sum(map(len, shares)) == (1 if number % 5 == 0 else BATCH)
        replicas.step(shares)
        if meets(number):
            meetings += 1
            if isinstance(strategy, shoal.DiLoCo):
                replicas.outer_step(strategy.lr, strategy.momentum)
            else:
                replicas.average()
    for each, model in zip(found, replicas.models, strict=True):
        assert close(each.own, [p.detach() for p in model.parameters()])
        assert close(each.parameters, replicas.means())  # evaluating has averaged them
        assert each.loss == found[0].loss
        once = sum(p.nbytes for p in model.parameters()) * 2 * (RANKS - 1) // RANKS
        assert each.bytes == meetings * once


@pytest.mark.compat
def test_averaged_after_each_step_it_is_one_process(ranks: Ranks) -> None:
    """Plain SGD is linear in the gradients, and the ranks' shares are equal."""
    found = ranks.call(train, shoal.LocalSGD(sync_every=1), "SGD", 4, None)
    model, (inputs, targets, _) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number in range(4):
        batch = [index for each in found for index in each.seen[number]]
        optimizer.zero_grad()
        (model(inputs[batch]) - targets[batch]).square().mean().backward()
        optimizer.step()
    assert close(found[0].own, [p.detach() for p in model.parameters()])


@pytest.mark.compat
@pytest.mark.full
@pytest.mark.parametrize("strategy", [shoal.LocalSGD(sync_every=3), shoal.DiLoCo(sync_every=3)])
def test_a_resumed_run_ends_bit_equal(strategy: Any, ranks: Ranks, tmp_path: Path) -> None:
    """Step 8 is saved between two meetings; what was saved is what the ranks go on from."""
    whole = ranks.call(train, strategy, "AdamW", 13, tmp_path / "whole")
    ranks.call(train, strategy, "AdamW", 10, tmp_path / "parts")
    parts = ranks.call(train, strategy, "AdamW", 13, tmp_path / "parts")
    for one, other in zip(whole, parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.own, other.own, strict=True))


@pytest.mark.full
def test_it_goes_on_with_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.call(train, shoal.DiLoCo(sync_every=3), "AdamW", 8, tmp_path)
    with Ranks(2) as fewer:
        first, second = fewer.call(train, shoal.DiLoCo(sync_every=3), "AdamW", 13, tmp_path)
    assert close(first.parameters, second.parameters)
    assert first.loss < 4


def filled(world: shoal.World, late: bool) -> list[Tensor]:
    """Trained from other values than the model was made with, which it gets before or after."""
    model = network()
    if late:
        shoal.parallelize(model, world, shoal.DiLoCo(sync_every=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.3)
    if not late:
        shoal.parallelize(model, world, shoal.DiLoCo(sync_every=2))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=RATE), shoal.Task(loss))
    for batch in shoal.Loader(data(), world, batch_size=BATCH).epochs(1):
        step(batch)
    return [p.detach().clone() for p in model.parameters()]


def test_weights_may_be_loaded_into_a_model_that_is_parallelized(ranks: Ranks) -> None:
    for before, after in zip(ranks.call(filled, False), ranks.call(filled, True), strict=True):
        assert close(before, after)


def after(world: shoal.World, first: Any, second: Any, run: Path) -> list[list[Tensor]]:
    """Parameters that a run with `second` has from one with `first`, and where it goes on to."""
    found = []
    for number, strategy in enumerate((first, second, second)):
        model = shoal.parallelize(network(), world, strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        step = shoal.Step(model, optimizer, shoal.Task(loss))
        loader = shoal.Loader(data(), world, batch_size=BATCH)
        with shoal.Run(run, step, loader, trackers=()) as opened:
            opened.restore()
            if number:
                found.append([p.detach().clone() for p in model.parameters()])
            for batch in loader.epochs(number + 1):
                step(batch)
            opened.save()
            found.append([p.detach().clone() for p in model.parameters()])
    return found


@pytest.mark.parametrize(
    "first",
    [
        shoal.DDP(),
        pytest.param(shoal.DDP(compression="int8"), marks=pytest.mark.full),
        pytest.param(shoal.LocalSGD(sync_every=3), marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    "second",
    [pytest.param(shoal.LocalSGD(sync_every=4), marks=pytest.mark.full), shoal.DiLoCo(sync_every=4)],
)
def test_it_goes_on_from_another_strategy(
    first: Any, second: Any, ranks: Ranks, tmp_path: Path
) -> None:
    for saved, begun, trained, again, end in ranks.call(after, first, second, tmp_path):
        assert close(begun, saved)
        assert close(again, trained)
        assert not close(trained, saved)
        assert not close(end, trained)


def thawed(world: shoal.World, directory: Path) -> list[int]:
    """Steps of a run of which some parameters are trained only after it was resumed."""
    numbers = []
    for frozen in (True, False):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 1)).double()
        net[0].requires_grad_(not frozen)
        model = shoal.parallelize(net, world, shoal.DiLoCo(sync_every=3))
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=RATE), shoal.Task(loss))
        loader = shoal.Loader(data(), world, batch_size=BATCH)
        with shoal.Run(directory, step, loader, trackers=()) as run:
            run.restore()
            for batch in loader.epochs(1 if frozen else 2):
                step(batch)
            run.save()
        numbers.append(step.number)
    return numbers


def test_what_was_frozen_sets_out_from_where_it_is(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.call(thawed, tmp_path) == [[5, 10]] * RANKS


class Experts(nn.Module):
    """Of which a rank uses one, with parameters of other shapes than the others'; and a table."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, 5).double()
        self.rest = nn.ModuleList(nn.Sequential(nn.Linear(5, n), nn.Linear(n, 1)) for n in (2, 3, 4))
        self.rest.double()
        self.table = nn.Parameter(torch.tensor([2**24 + 1, 2**53 + 1]), requires_grad=False)
        self._rank = rank

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.rest[self._rank](torch.tanh(self.first(inputs)))
        return found


def with_experts(world: shoal.World, strategy: Any) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The moments of what all ranks use, of what this one alone uses, and the table."""
    model = shoal.parallelize(Experts(world.rank), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    for batch in shoal.Loader(data(), world, batch_size=BATCH).epochs(1):
        step(batch)
    net: Any = model
    used = [*net.first.parameters(), *net.rest[world.rank].parameters()]
    before = [optimizer.state[p]["exp_avg"].clone() for p in used]
    shoal.evaluate(step, data())
    moments = [optimizer.state[p]["exp_avg"].clone() for p in used]
    assert all(torch.equal(a, b) for a, b in zip(before[2:], moments[2:], strict=True))
    return before[:2], moments[:2], net.table.tolist()


@pytest.mark.parametrize("strategy", [shoal.LocalSGD(sync_every=2), shoal.Hogwild()])
def test_moments_that_not_all_have_and_whole_numbers_stay(strategy: Any, ranks: Ranks) -> None:
    found = ranks.call(with_experts, strategy)
    means = [torch.stack(each).mean(0) for each in zip(*(own for own, _, _ in found), strict=True)]
    for _, averaged, table in found:
        assert close(averaged, means)
        assert table == [2**24 + 1, 2**53 + 1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: shoal.LocalSGD(sync_every=0), r"LocalSGD\(sync_every=0\)"),
        (lambda: shoal.LocalSGD(warmup_steps=-1), r"warmup_steps=-1"),
        (lambda: shoal.DiLoCo(sync_every=1.5), r"sync_every=1.5"),  # type: ignore[arg-type]
        (lambda: shoal.DiLoCo(momentum=1.0), r"momentum=1.0"),
        (lambda: shoal.DiLoCo(lr=0.0), r"lr=0.0"),
        (lambda: shoal.DiLoCo(lr=math.inf), r"lr=inf"),
        (lambda: shoal.DiLoCo(lr="0.7"), r"lr='0.7'"),  # type: ignore[arg-type]
        (lambda: shoal.DiLoCo(momentum=None), r"momentum=None"),  # type: ignore[arg-type]
    ],
)
def test_bad_options_are_refused(make: Any, said: str) -> None:
    with pytest.raises(shoal.StepError, match=said):
        make()

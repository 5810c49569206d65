"""A checkpoint of any layout goes on in any other, each to each: bit for bit, then like one process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import shoal
from helpers import pipeline_model as staged
from helpers import reference as specification
from helpers.ranks import Ranks
from helpers.reference import PLAN, SEED, TOLERANCE, Row, Trained, distance
from shoal.strategies.dtensor import is_divided, share

pytestmark = pytest.mark.processes

SAVED, AFTER = 3, 5
"""Steps before the save, and after the restore: over the short batch that ends an epoch of 4."""
BATCH, RATE, CLIP, DECAY = 16, 1e-2, 0.5, 0.8
SCHEDULE, TOTAL = shoal.LRSchedule(warmup_steps=2), 20
ROW = Row("transformer", staged.SAMPLES, True, 4, False, CLIP)


class Problem(NamedTuple):
    """A model in float64, the same each time, its samples, and its loss as sum and count."""

    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Any], tuple[Tensor, int | Tensor]]


two_blocks = functools.partial(staged.build, 2)

PROBLEMS = {
    # Blocks, a parameter and a buffer of the model's own; 2, 3 and 4 divide some sizes and not others.
    "blocks": Problem(two_blocks, staged.dataset, staged.loss),
    # Attention, and an embedding that is the head.
    "tied": Problem(
        functools.partial(specification.build, ROW),
        functools.partial(specification.dataset, ROW),
        lambda output, batch: specification.loss(ROW, output, batch[1]),
    ),
}

ZERO_2 = shoal.FSDP(reshard_after_forward=False, accumulate="whole")
BLOCKS = shoal.TensorParallel(plan={"blocks.*.wide": "column", "blocks.*.narrow": "row"})
TIED = shoal.TensorParallel(plan=PLAN)
FOLDED = shoal.Pipeline(split_points=specification.CUT["transformer"], schedule="zbv")


def stages(*begin: str) -> shoal.Pipeline:
    return shoal.Pipeline(split_points=begin)


TABLES: dict[str, dict[str, tuple[str, Any]]] = {
    "blocks": {
        "one": ("replicate=1", None),
        **{f"DDP {n}": (f"replicate={n}", None) for n in (2, 3, 4)},
        **{f"ZeRO-3 {n}": (f"shard={n}", shoal.FSDP()) for n in (2, 3, 4)},
        "ZeRO-2 3": ("shard=3", ZERO_2),
        "HSDP 4": ("replicate=2,shard=2", shoal.FSDP()),
        **{f"Tensor {n}": (f"tensor={n}", BLOCKS) for n in (2, 3, 4)},
        "Tensor, FSDP 4": ("shard=2,tensor=2", [BLOCKS, shoal.FSDP()]),
        "Pipeline 2": ("pipeline=2", stages("blocks.1")),
        "Pipeline 3": ("pipeline=3", stages("blocks.1", "head")),
        "Pipeline 4": ("pipeline=4", stages("blocks.0", "blocks.1", "head")),
        "replicated Pipeline 4": ("replicate=2,pipeline=2", stages("blocks.1")),
        "replicated Tensor 4": ("replicate=2,tensor=2", BLOCKS),
        "sharded Pipeline 4": ("shard=2,pipeline=2", stages("blocks.1")),
        "Tensor, Pipeline 4": ("tensor=2,pipeline=2", [BLOCKS, stages("blocks.1")]),
    },
    "tied": {
        "one": ("replicate=1", None),
        "DDP 3": ("replicate=3", None),
        "ZeRO-3 3": ("shard=3", shoal.FSDP(modules=("block",))),
        "Tensor 2": ("tensor=2", TIED),
        "Tensor, FSDP 4": ("shard=2,tensor=2", [TIED, shoal.FSDP(modules=("block",))]),
        "Pipeline 2": ("pipeline=2", FOLDED),
    },
}
"""Layouts and strategies, each of which is restored in each."""

RINGS = [
    ("blocks", ("one", "Tensor 2", "ZeRO-3 3"), False),
    ("blocks", ("Tensor 2", "DDP 3", "Pipeline 2"), True),
    ("blocks", ("Tensor, FSDP 4", "replicated Tensor 4", "sharded Pipeline 4", "Pipeline 3"), True),
]
"""A model, ways of which each is restored by the next and the last by the first, and whether only
`make test-all` goes through them."""


Array = np.ndarray[Any, Any]


class Piece(NamedTuple):
    """What one rank holds of a tensor: where in the whole it begins, and its values."""

    shape: tuple[int, ...]
    begin: tuple[int, ...]
    values: Array


Pieces = dict[str, Piece]


class State(NamedTuple):
    """All that a checkpoint keeps: this rank's pieces of tensors, and numbers."""

    tensors: Pieces
    plain: dict[str, Any]


class After(NamedTuple):
    """The state just restored, and what came of the steps after it."""

    state: State
    parameters: Pieces
    norms: list[float]
    losses: list[float]


class Parts(NamedTuple):
    """What belongs to a run."""

    step: shoal.Step
    ema: shoal.EMA
    data: shoal.Loader

    def open(self, directory: Path) -> shoal.Run:
        return shoal.Run(directory, self.step, self.data, state={"ema": self.ema}, trackers=())


def made(
    world: shoal.World,
    problem: Problem,
    strategy: Any,
    *,
    wrong: bool = False,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Parts:
    """`wrong`: with other values than a training begins with, so that a restore has to bring all."""
    built = problem.build()
    if wrong:
        with torch.no_grad():
            for tensor in {*built.parameters(), *built.buffers()}:
                tensor.mul_(-0.5)
    divided = shoal.parallelize(built, world, strategy)
    optimizer = kind([*divided.parameters()], lr=RATE)  # type: ignore[call-arg]
    schedule = SCHEDULE(optimizer, TOTAL)
    step = shoal.Step(divided, optimizer, shoal.Task(problem.loss), clip=CLIP, schedule=schedule)
    micro_batches = 4 if world.layout.pipeline > 1 else 1
    data = shoal.Loader(problem.data(), world, batch_size=BATCH, micro_batches=micro_batches, seed=SEED)
    return Parts(step, shoal.EMA(divided, decay=DECAY), data)


def advance(run: shoal.Run, parts: Parts, steps: int) -> list[tuple[float, float]]:
    """Norm and loss of each step."""
    found = []
    for batch in itertools.islice(parts.data.epochs(9), steps):
        result = parts.step(batch)
        found.append((result.norm, result.loss))
        parts.ema.update()
        run.tick()
    return found


def pieces(tensors: Iterable[tuple[str, Tensor]]) -> Pieces:
    found = {}
    for name, tensor in tensors:
        begin = (0,) * tensor.ndim
        if is_divided(tensor):
            layout = tensor.device_mesh, tensor.placements
            begin = compute_local_shape_and_global_offset(tensor.shape, *layout)[1]
        values = share(tensor.detach()).numpy().copy()
        found[name] = Piece(tuple(tensor.shape), tuple(begin), values)
    return found


def state(parts: Parts) -> State:
    step, model = parts.step, parts.step.model
    assert step.schedule is not None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    averages = parts.ema.state_dict()["averages"]
    tensors |= {f"average of {name}": average for name, average in averages.items()}
    for name, parameter in model.named_parameters():
        moments = step.optimizer.state[parameter]
        tensors |= {f"{key} of {name}": value for key, value in moments.items()}
    plain = {
        "number": step.number,
        "rates": [group["lr"] for group in step.optimizer.param_groups],
        "schedule": step.schedule.last_epoch,
        "position": parts.data.position,
        "epoch": parts.data.epoch,
        "updates": parts.ema.updates,
    }
    return State(pieces(tensors.items()), plain)


def save(world: shoal.World, model: str, way: str, directory: Path) -> State:
    parts = made(world, PROBLEMS[model], TABLES[model][way][1])
    with parts.open(directory) as run:
        advance(run, parts, SAVED)
        run.save()
    return state(parts)


def go_on(world: shoal.World, model: str, way: str, directories: list[Path]) -> list[After]:
    """From one checkpoint after the other; each finds what the one before has left."""
    parts, found = made(world, PROBLEMS[model], TABLES[model][way][1], wrong=True), []
    for directory in directories:
        with parts.open(directory) as run:
            assert run.restore() is not None
            restored = state(parts)
            norms, losses = zip(*advance(run, parts, AFTER), strict=True)
        parameters = pieces(parts.step.model.named_parameters())
        found.append(After(restored, parameters, [*norms], [*losses]))
    return found


def joined(parts: list[Pieces]) -> dict[str, Array]:
    """The whole tensors; where several ranks hold the same, it is the same bit for bit."""
    whole: dict[str, Array] = {}
    known: dict[str, Array] = {}
    for name, piece in itertools.chain(*(part.items() for part in parts)):
        there = whole.setdefault(name, np.zeros(piece.shape, piece.values.dtype))
        seen = known.setdefault(name, np.zeros(piece.shape, bool))
        spans = zip(piece.begin, piece.values.shape, strict=True)
        at = tuple(slice(begin, begin + size) for begin, size in spans)
        assert identical(there[at][seen[at]], piece.values[seen[at]]), name
        there[at], seen[at] = piece.values, True
    assert all(seen.all() for seen in known.values())
    return whole


def identical(left: Array, right: Array) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@functools.cache
def expected(model: str) -> Trained:
    """The steps after the restore in plain torch: one process, whole batches, one mean."""
    problem = PROBLEMS[model]
    net, (inputs, labels) = problem.build(), problem.data()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    norms, losses = [], []
    for number in range(SAVED + AFTER):
        epoch, at = divmod(number, math.ceil(len(inputs) / BATCH))
        order = shoal.Permutation(len(inputs), seed=SEED, epoch=epoch).indices(0, len(inputs))
        chosen = torch.from_numpy(order)[at * BATCH : (at + 1) * BATCH]
        batch = inputs[chosen], labels[chosen]
        total, count = problem.loss(net(batch[0]), batch)
        mean = total / count
        mean.backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        losses.append(mean.item())
        optimizer.param_groups[0]["lr"] = RATE * SCHEDULE.factor(number, TOTAL)
        optimizer.step()
        optimizer.zero_grad()
    values = {name: tensor.detach().numpy() for name, tensor in net.named_parameters()}
    return Trained(values, norms[SAVED:], losses[SAVED:])


class Saved(NamedTuple):
    """A checkpoint, and the state that it was made of."""

    directory: Path
    tensors: dict[str, Array]
    plain: dict[str, Any]


class Groups:
    """Processes by their number, divided as asked; and what each way saved, which it does once."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._running: dict[int, tuple[str, Ranks]] = {}
        self._saved: dict[tuple[str, str], Saved] = {}

    def ranks(self, layout: str) -> Ranks:
        size = shoal.Layout.parse(layout).size
        if size not in self._running:
            started = self._stack.enter_context(Ranks(size, layout=layout, seed=SEED))
            self._running[size] = layout, started
        current, ranks = self._running[size]
        if current != layout:
            ranks.divide(layout)
            self._running[size] = layout, ranks
        return ranks

    def saved(self, model: str, way: str) -> Saved:
        if (model, way) not in self._saved:
            directory = self._folder / model / way
            found: list[State] = self.ranks(TABLES[model][way][0]).call(save, model, way, directory)
            whole = joined([each.tensors for each in found])
            self._saved[model, way] = Saved(directory, whole, found[0].plain)
        return self._saved[model, way]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    with contextlib.ExitStack() as stack:
        yield Groups(tmp_path_factory.mktemp("saved"), stack)


def rows() -> list[Any]:
    found = []
    for model, ring, full in RINGS:
        for source, target in zip(ring, (*ring[1:], ring[0]), strict=True):
            name, marks = f"{model}: {source} -> {target}", [pytest.mark.full] * full
            found.append(pytest.param(model, (source,), target, id=name, marks=marks))
    for model, table in TABLES.items():
        for target in table:
            name, marks = f"{model}: all -> {target}", [pytest.mark.long]
            found.append(pytest.param(model, tuple(table), target, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("model", "sources", "target"), rows())
def test_a_checkpoint_goes_on_in(
    groups: Groups, model: str, sources: tuple[str, ...], target: str
) -> None:
    begun = [groups.saved(model, source) for source in sources]
    ranks = groups.ranks(TABLES[model][target][0])
    found = ranks.call(go_on, model, target, [saved.directory for saved in begun])
    for source, saved, *afters in zip(sources, begun, *found, strict=True):
        assert_restored(afters, saved, source)
        assert_goes_on(afters, expected(model), source)


def assert_restored(afters: list[After], saved: Saved, source: str) -> None:
    restored = joined([after.state.tensors for after in afters])
    assert restored.keys() == saved.tensors.keys(), source
    for name, value in saved.tensors.items():
        assert identical(restored[name], value), f"{source}: {name}"
    assert all(after.state.plain == saved.plain for after in afters), source


def assert_goes_on(afters: list[After], one: Trained, source: str) -> None:
    together = joined([after.parameters for after in afters])
    for after in afters:
        trained = Trained(together, after.norms, after.losses)
        assert distance(trained, one, RATE) < TOLERANCE, source


def other_head() -> nn.Module:
    net = staged.build(2)
    net.head = nn.Linear(staged.WIDTH, 5).double()
    return net


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A run that is not the one that saved, and what is said."""

    build: Callable[[], nn.Module] = two_blocks
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    averaged: bool = True
    given: str
    found: str


MISFITS = {
    "deeper": Misfit(
        build=functools.partial(staged.build, 3),
        given="Net with 18 tensors",
        found="missing: blocks.2.wide.weight",
    ),
    "head": Misfit(
        build=other_head, given="Net with", found=r"head.weight: \(3, 8\) instead of \(5, 8\)"
    ),
    "optimizer": Misfit(
        optimizer=torch.optim.SGD, given="Step with SGD", found="the checkpoint has the state of AdamW"
    ),
    "averages": Misfit(averaged=False, given=r"state \[\]", found=r"state \['ema'\]"),
}


def misfit(world: shoal.World, strategy: Any, what: str, directory: Path) -> tuple[Any, bool]:
    """The error, and whether nothing has changed by it."""
    given = MISFITS[what]
    problem = PROBLEMS["blocks"]._replace(build=given.build)
    parts = made(world, problem, strategy, kind=given.optimizer)
    before = pieces(parts.step.model.state_dict().items())
    state = {"ema": parts.ema} if given.averaged else {}
    with (
        shoal.Run(directory, parts.step, parts.data, state=state, trackers=()) as run,
        pytest.raises(shoal.CheckpointError) as caught,
    ):
        run.restore()
    after = pieces(parts.step.model.state_dict().items())
    same = all(identical(after[name].values, piece.values) for name, piece in before.items())
    untouched = same and not parts.step.optimizer.state and (run.step, parts.data.position) == (0, 0)
    return (caught.value.given, caught.value.found, caught.value.fix), untouched


@pytest.mark.parametrize("what", MISFITS)
@pytest.mark.parametrize(
    "way", ["Pipeline 2", *(pytest.param(w, marks=pytest.mark.full) for w in ("ZeRO-3 2", "Tensor 2"))]
)
def test_what_does_not_fit_is_refused_by_all_ranks(groups: Groups, way: str, what: str) -> None:
    saved = groups.saved("blocks", "one")
    layout, strategy = TABLES["blocks"][way]
    found = groups.ranks(layout).call(misfit, strategy, what, saved.directory)
    (given, said, fix), _ = found[0]
    assert re.search(MISFITS[what].given, given)
    assert re.search(MISFITS[what].found, said)
    assert "shoal.Run('runs/b', …)" in fix or "another directory" in fix
    assert found == [found[0], (found[0][0], True)]

"""A signal to any rank at any moment: all save the same step, and the same training goes on from it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoal
from helpers.killed_training import same
from helpers.ranks import Ranks
from helpers.small_training import cross_entropy
from shoal.distributed.cluster_env import REQUEUE
from shoal.telemetry import events
from shoal.training.preemption import PreemptionHandler, StoppedExit

pytestmark = pytest.mark.processes

RANKS = 3
SAMPLES = 24
BATCH = 6
EPOCHS = 3
STEPS = EPOCHS * SAMPLES // BATCH
AT = 3
"""The step in which signals are sent."""
SETTLED_WITHIN = 30.0

INPUTS = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.arange(SAMPLES) % 3


@dataclass(frozen=True, kw_only=True)
class Told:
    """At which moment of step AT which ranks are sent what, each by itself."""

    moment: str
    ranks: tuple[int, ...] = (1,)
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)


@dataclass
class Signals:
    """Sends the signals when their moment has come, and stays there until all ranks have agreed.

    So it is their threads that agree, whatever the main threads are in.
    """

    told: Told | None
    rank: int
    stopping: PreemptionHandler | None = None
    step: shoal.Step | None = None
    sent: bool = False
    leaving: list[str] = field(default_factory=list)

    def at(self, moment: str) -> None:
        if self.told is None or self.stopping is None or self.step is None:
            return
        if self.stopping._told:
            self.leaving.append(moment)
            for signum in (signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), signum)  # once more, in the save: nothing comes of it
        if self.sent or moment != self.told.moment or self.step.number != AT:
            return
        if self.rank in self.told.ranks:
            self.sent = True
            for signum in self.told.signals:
                os.kill(os.getpid(), signum)
            assert self.stopping._settled.wait(SETTLED_WITHIN)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples, the reading of which is a moment."""

    def __init__(self, signals: Signals, moment: str) -> None:
        self._signals = signals
        self._moment = moment

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._signals.at(self._moment)
        return INPUTS[index], LABELS[index]


class Kept:
    """User state, the taking of which is a moment."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    def state_dict(self) -> dict[str, Any]:
        self._signals.at("save")
        return {"value": 1}

    def load_state_dict(self, state: Any) -> None:
        assert state == {"value": 1}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How it went on one rank: the exit code it stopped with, the step, the moments while it left."""

    code: int | None
    step: int
    leaving: list[str]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()


def train(world: shoal.World, directory: Path, told: Told | None, workers: int = 0) -> Ended:
    signals = Signals(told, world.rank)
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(build(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.register_forward_pre_hook(lambda *_: signals.at("forward"))
    next(iter(model.parameters())).register_hook(lambda _: signals.at("backward"))
    step = shoal.Step(model, optimizer, shoal.Task(cross_entropy))
    data = shoal.Loader(Samples(signals, "data"), world, batch_size=BATCH, num_workers=workers)
    code = None
    try:
        with shoal.Run(directory, step, data, state={"kept": Kept(signals)}) as run:
            run.restore()
            signals.stopping, signals.step = run._stopping, step
            for batch in data.epochs(EPOCHS):
                step(batch)
                if step.number == AT:
                    shoal.evaluate(step, Samples(signals, "evaluation"))
                    with world.rank_zero_first():
                        signals.at("first")
                    signals.at("group")
                run.tick(every=AT)
            run.save()
    except StoppedExit as stopped:
        code = stopped.code
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert isinstance(code, int | None)
    return Ended(
        code=code,
        step=step.number,
        leaving=signals.leaving,
        model=state,
        optimizer=optimizer.state_dict(),
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    ended: list[Ended] = ranks.call(train, tmp_path_factory.mktemp("undisturbed"), None)
    assert [each.step for each in ended] == [STEPS] * RANKS
    return ended


def assert_all_stopped_and_go_on(
    ranks: Ranks, ended: list[Ended], undisturbed: list[Ended], directory: Path
) -> None:
    """All in the same step, which is there; then the same training ends as the undisturbed one did."""
    assert {each.code for each in ended} == {REQUEUE}
    (step,) = {each.step for each in ended}
    assert AT <= step <= AT + 2
    saved = (path.name for path in (directory / "checkpoints").glob("step-*"))
    assert max(saved, key=lambda name: int(name.removeprefix("step-"))) == f"step-{step}"
    for rank in range(len(ended)):
        written = list(events.read_events(directory / "events" / f"rank-{rank}.jsonl"))
        assert [event["step"] for event in written if event["event"] == "preempted"] == [step]
    again = ranks.call(train, directory, None)
    assert [each.code for each in again] == [None] * len(ended)
    for ours, theirs in zip(again, undisturbed, strict=True):
        assert same(ours.model, theirs.model)
        assert same(ours.optimizer, theirs.optimizer)


@pytest.mark.parametrize(
    "moment",
    [
        "forward",
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ("save", "backward", "evaluation", "data", "first")
        ),
    ],
)
def test_one_rank_is_told_at_any_moment(
    moment: str, ranks: Ranks, undisturbed: list[Ended], tmp_path: Path
) -> None:
    """FAILURES 8: rank 0 alone runs the first part of the section that the others wait for."""
    told = Told(moment=moment, ranks=(0,) if moment == "first" else (1,))
    ended = ranks.call(train, tmp_path, told)
    assert_all_stopped_and_go_on(ranks, ended, undisturbed, tmp_path)


@pytest.mark.full
def test_all_ranks_are_told_again_and_again(
    ranks: Ranks, undisturbed: list[Ended], tmp_path: Path
) -> None:
    """Two signals to each at the same time, and more in the save that follows: they do no harm."""
    both = (signal.SIGTERM, signal.SIGUSR2)
    told = Told(moment="backward", ranks=tuple(range(RANKS)), signals=both)
    ended = ranks.call(train, tmp_path, told)
    assert ["save" in each.leaving for each in ended] == [True] * RANKS
    assert_all_stopped_and_go_on(ranks, ended, undisturbed, tmp_path)


def test_told_after_the_last_tick(ranks: Ranks, tmp_path: Path) -> None:
    """It ends as it would have ended, and the next Run of the process is not stopped for it."""
    assert ranks.call(told_late, tmp_path) == [(STEPS, False)] * RANKS


def told_late(world: shoal.World, directory: Path) -> tuple[int, bool]:
    before = signal.getsignal(signal.SIGTERM)
    for name in ("first", "second"):
        model = shoal.parallelize(build(), world)
        step = shoal.Step(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), shoal.Task(cross_entropy)
        )
        data = shoal.Loader(Samples(Signals(None, 0), ""), world, batch_size=BATCH)
        with shoal.Run(directory / name, step, data) as run:
            for batch in data.epochs(EPOCHS):
                step(batch)
                run.tick()
            if name == "first" and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            run.save()
        assert signal.getsignal(signal.SIGTERM) is before
    return step.number, run._stopping._asked


@pytest.mark.full
def test_workers_leave_the_end_to_their_rank(
    ranks: Ranks, undisturbed: list[Ended], tmp_path: Path
) -> None:
    """A scheduler signals all processes of a job: workers of a data loader too."""
    ended = ranks.call(group_told, tmp_path)
    assert_all_stopped_and_go_on(ranks, ended, undisturbed, tmp_path)


def group_told(world: shoal.World, directory: Path) -> Ended:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    assert os.getpgrp() == os.getpid()
    next_group = world.gather(os.getpgrp())[world.rank - 1]
    whole = Told(moment="group", ranks=tuple(range(RANKS)), signals=())
    original = Signals.at

    def at(self: Signals, moment: str) -> None:
        if moment == "group" and not self.sent and self.step is not None and self.step.number == AT:
            assert len(psutil.Process().children()) == 2
            for signum in (signal.SIGTERM, signal.SIGUSR1):  # by another rank: a worker heeds its own
                os.killpg(next_group, signum)
        original(self, moment)

    Signals.at = at  # type: ignore[method-assign]
    try:
        ended = train(world, directory, whole, workers=2)
    finally:
        Signals.at = original  # type: ignore[method-assign]
    assert psutil.Process().children() == []
    return ended


@pytest.mark.full
def test_the_loop_given_stops_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    straight = ranks.call(loop, tmp_path / "straight", None)
    assert ranks.call(loop, tmp_path / "told", 1) == [REQUEUE] * RANKS
    again = ranks.call(loop, tmp_path / "told", None)
    assert same(again, straight)


def loop(world: shoal.World, directory: Path, victim: int | None) -> Any:
    def tell(moment: shoal.TrainingStatus) -> None:
        stopping = moment.run._stopping
        if moment.kind == "step" and moment.run.step == AT and not stopping._asked:
            if world.rank == victim:
                os.kill(os.getpid(), signal.SIGTERM)
            assert victim is None or stopping._settled.wait(SETTLED_WITHIN)

    world.reseed("weights", by_rank=False)
    try:
        trained = shoal.train(
            build,
            shoal.Task(cross_entropy),
            (INPUTS, LABELS),
            directory=directory,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
            batch_size=BATCH,
            epochs=EPOCHS,
            validation=shoal.Validation(dataset=(INPUTS, LABELS), every=AT),
            ema=0.9,
            world=world,
            callbacks=[tell],
        )
    except StoppedExit as stopped:
        return stopped.code
    return [trained.model.state_dict(), trained.best]

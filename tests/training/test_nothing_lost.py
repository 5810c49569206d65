"""Kill any process at any moment: the same training function again ends as if nothing had happened."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from helpers.killed_training import (
    EPOCH_STEPS,
    EPOCHS,
    LEARNING_RATE,
    SAMPLES,
    STEPS,
    Ended,
    Training,
    buckets,
    same,
    samples,
    train,
)
from helpers.ranks import Ranks
from shoal.telemetry import events

pytestmark = pytest.mark.processes

RANKS = 3
# Moments of one step: 4 or fewer samples, 2 forwards, 6 parameters twice, 2 of the update, 2 between.
STEP_MOMENTS = 22


@dataclass(frozen=True)
class Undisturbed:
    directory: Path
    ended: list[Ended]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run that nobody disturbed, of several buckets."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with Ranks(RANKS) as ranks:
        ended = ranks.call(train, Training(directory=directory))
        assert ranks.call(buckets) == [3] * RANKS
    return Undisturbed(directory, ended)


def attempt(training: Training, ranks: int = RANKS) -> list[Ended] | None:
    with Ranks(ranks) as started:
        return started.call_until_killed(train, training)


def kill(training: Training) -> None:
    assert attempt(training) is None, f"nobody was killed: {training}"


def assert_nothing_lost(training: Training, undisturbed: Undisturbed) -> list[Ended]:
    """Run to the end; then nothing may tell this run from the one that nobody disturbed."""
    ended = attempt(training)
    assert ended is not None
    for rank, (ours, theirs) in enumerate(zip(ended, undisturbed.ended, strict=True)):
        assert same(ours.model, theirs.model), rank
        assert same(ours.optimizer, theirs.optimizer), rank
        assert same(ours.random, theirs.random), rank
    taken, expected = (
        events.steps_by_rank(d / "events") for d in (training.directory, undisturbed.directory)
    )
    for step, of_rank in taken.items():
        assert of_rank[0]["loss"] == expected[step][0]["loss"]
    assert_each_sample_once(training.directory)
    return ended


def assert_each_sample_once(directory: Path) -> None:
    """By the events each position, and by the dataset each sample of each epoch."""
    consumed: Counter[int] = Counter()
    given: Counter[tuple[int, int]] = Counter()
    taken = events.steps_by_rank(directory / "events")
    assert sorted(taken) == [("step", step) for step in range(1, STEPS + 1)]
    for (_, step), of_rank in taken.items():
        for rank, event in of_rank.items():
            consumed.update(range(*event["share"]))
            epoch = (step - 1) // EPOCH_STEPS
            given.update((epoch, index) for index in samples(directory, rank)[step])
    assert consumed == Counter(range(EPOCHS * SAMPLES))
    assert given == Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))


@pytest.mark.timeout(900)
@pytest.mark.long
def test_killed_at_every_operation_of_a_save(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """FAILURES 5: more than 50 kills; after each, the next attempt loads and saves."""
    operations = [ended.operations for ended in undisturbed.ended]
    kinds = {operation.split()[0] for operation in operations[0]}
    assert kinds == {
        *("make_directory", "create", "reserve", "write", "sync", "sync_directory"),
        *("rename", "unlink", "remove_directory"),
    }
    points = [(victim, n) for victim in range(RANKS) for n in range(len(operations[victim]))]
    assert len(points) > 50
    random.Random(0).shuffle(points)
    attempt(Training(directory=tmp_path, epochs=1))  # so that the first save has one to remove
    for victim, number in points:
        kill(Training(directory=tmp_path, victim=victim, operation=number))
        # But for the order in which a directory lists its files.
        assert (tmp_path / "death").read_text().split()[0] == operations[victim][number].split()[0]
    assert_nothing_lost(Training(directory=tmp_path), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.long if s > 0 else pytest.mark.full) for s in range(6)]
)
def test_killed_at_random_moments(seed: int, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """In the restore, in forward, in backward, in the update, between: what is lost is done again."""
    chance = random.Random(seed)
    training = Training(directory=tmp_path, every=3, keep=2, waits=False)
    for _ in range(12):
        moment = chance.randrange(4 * STEP_MOMENTS)
        kill(replace(training, victim=chance.randrange(RANKS), moment=moment))
    assert_nothing_lost(training, undisturbed)


@pytest.mark.full
def test_killed_three_times_in_one_epoch(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """FAILURES 4: the order is that of the run that nobody disturbed."""
    training = Training(directory=tmp_path)
    for victim in range(RANKS):  # each in the second step after its start
        kill(replace(training, victim=victim, moment=STEP_MOMENTS * 3 // 2))
    for ended in assert_nothing_lost(training, undisturbed):
        assert ended.restored == 3


def distance(found: Ended, expected: Ended) -> float:
    """The largest difference of a parameter, relative to the largest of its tensor."""
    return max(
        float((found.model[name] - value).abs().max()) / max(float(value.abs().max()), LEARNING_RATE)
        for name, value in expected.model.items()
    )


@pytest.mark.full
@pytest.mark.parametrize("last", [3, pytest.param(8, marks=pytest.mark.long)])
def test_another_number_of_ranks_in_mid_epoch(last: int, tmp_path: Path) -> None:
    """FAILURES 3: 4, then 2, then 3 or 8 ranks. Both times more had been done than was saved."""
    exact = Training(directory=tmp_path / "resized", noise=0, every=3)
    assert attempt(replace(exact, victim=2, moment=5 * STEP_MOMENTS), ranks=4) is None
    assert attempt(replace(exact, victim=1, operation=2), ranks=4) is None
    assert attempt(replace(exact, victim=1, moment=5 * STEP_MOMENTS), ranks=2) is None
    assert attempt(replace(exact, victim=0, operation=2), ranks=2) is None
    # 12 samples are too few for two micro-batches on each of 8 ranks.
    ended = attempt(replace(exact, micro_batches=2 if last == 3 else 1), ranks=last)
    assert ended is not None

    assert_each_sample_once(exact.directory)
    taken = events.steps_by_rank(exact.directory / "events")
    sizes = [len(of_rank) for _, of_rank in sorted(taken.items())]
    assert sizes == [4] * 3 + [2] * 3 + [last] * (STEPS - 6)
    alone = attempt(replace(exact, directory=tmp_path / "alone"), ranks=1)
    assert alone is not None
    for rank in ended:
        assert distance(rank, alone[0]) < 1e-9

"""Checkpoints in a store that fails, or whose writers don't know of each other: whole or none."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoint_files import names
from helpers.object_store import (
    Bucket,
    DeadError,
    Failing,
    begin,
    damaged,
    nothing,
    restored,
    save,
    state,
)
from shoal.checkpoint import AnyPath, Fence, path_from
from shoal.util.errors import CheckpointError


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in order, now and afterwards."""
    monkeypatch.setattr(Bucket, "before", staticmethod(nothing))
    monkeypatch.setattr(Bucket, "after", staticmethod(nothing))
    monkeypatch.setattr(Bucket, "torn", False)


FAILURES: dict[str, tuple[str, Callable[[], BaseException]]] = {
    "refused": ("before", lambda: PermissionError("no")),
    "cut": ("before", lambda: ValueError("broken stream")),
    "done, but not told": ("after", lambda: TimeoutError("no answer")),
    "dead": ("before", DeadError),
    "dead right after": ("after", DeadError),
}


def failing_save(folder: Path, failing: Failing, hook: str) -> bool:
    """Whether the save of step 2, over steps 1 and an older 2, got through."""
    place = path_from(f"bucket://{folder}/run")
    checkpoints = begin(place, keep=1)
    checkpoints.restore()
    setattr(Bucket, hook, failing)
    try:
        checkpoints.save(2, state(3), {}, {})
    except (CheckpointError, DeadError):
        return False
    finally:
        setattr(Bucket, hook, staticmethod(nothing))
    return True


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(
    ("torn", "stride"),
    [
        (False, 9),
        pytest.param(True, 6, marks=pytest.mark.full),
        pytest.param(False, 1, marks=pytest.mark.full),
        pytest.param(True, 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:an old checkpoint can't be removed")
def test_any_operation_may_fail(failure: str, torn: bool, stride: int, tmp_path: Path) -> None:
    """The save before stays until the new one is whole; whatever is restored is what was saved."""
    Bucket.torn = torn
    hook, make = FAILURES[failure]
    whole = tmp_path / "whole"
    save(begin(path_from(f"bucket://{whole}/run")), 1, 2)
    counted = Failing(None, make())
    failing_save(shutil.copytree(whole, tmp_path / "counted"), counted, hook)
    assert set(counted.done) >= {"list", "look", "complete", "remove"}
    seen = set()
    for number in range(1, len(counted.done), stride):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        saved = failing_save(folder, Failing(number, make()), hook)
        place = path_from(f"bucket://{folder}/run")
        if not torn:  # then a manifest may be half there, and is passed over
            assert damaged(place) == [], number
        version = restored(place)
        assert version in ((2, 2), (2, 3)), number
        assert version == (2, 3) or not saved, number
        seen.add((saved, version))
        # The next attempt goes on, and what was left behind is gone.
        after = begin(place, keep=1)
        after.restore()
        save(after, 3)
        assert names(place / "checkpoints") == ["step-3.a3"], number
        assert restored(place) == (3, 3)
        shutil.rmtree(folder)
    assert {(False, (2, 2)), (not failure.startswith("dead"), (2, 3))} <= seen


def test_a_store_that_can_not_be_reached_is_no_damaged_checkpoint(tmp_path: Path) -> None:
    """Else a run would go back, and keep what it then saves."""
    place = path_from(f"bucket://{tmp_path}/run")
    save(begin(place), 1, 2)
    counted = Failing(None, OSError())
    Bucket.before = staticmethod(counted)
    restored(place)
    outcomes: list[tuple[int, int] | str] = []
    for number in range(len(counted.done)):
        Bucket.before = staticmethod(Failing(number, ConnectionError("unreachable")))
        try:
            outcomes.append(restored(place))
        except CheckpointError as error:
            outcomes.append(f"{error.found} {error.fix}")
    told = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(told) > 5
    assert all("unreachable" in each and "fsspec" in each for each in told)
    assert {*outcomes} - {*told} <= {(2, 2)}  # where what fails is the tidying


def list_late(lacking: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let listings lack what matches and exists now."""
    old = {str(path) for path in folder.rglob("*") if re.search(lacking, str(path))}
    assert old
    listed = Bucket._list

    def late(store: Bucket, key: str) -> list[dict[str, Any]]:
        return [each for each in listed(store, key) if each["name"] not in old]

    monkeypatch.setattr(Bucket, "_list", late)


def test_a_listing_that_lacks_the_latest_checkpoint_costs_no_other(tmp_path: Path) -> None:
    """The run resumes at the one before, and saves the same step under another name."""
    place = path_from(f"bucket://{tmp_path}/run")
    save(begin(place, keep=2), 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        list_late(r"step-2\.a1$", tmp_path, patch)
        assert restored(place) == (1, 1)
        again = begin(place, keep=2)
        again.restore()
        save(again, 2, version=20)
    assert damaged(place) == []
    assert restored(place) == (2, 20)
    assert "step-2.a1" in names(place / "checkpoints")


def test_a_listing_that_lacks_all_checkpoints_costs_none(tmp_path: Path) -> None:
    """The run begins again, and its saves leave those that it does not see."""
    place = path_from(f"bucket://{tmp_path}/run")
    save(begin(place, keep=2), 1, 2, 3)
    with pytest.MonkeyPatch.context() as patch:
        list_late(r"step-\d\.a1$", tmp_path, patch)
        again = begin(place, keep=2)
        assert again.restore() is None
        save(again, 1, version=10)
    assert damaged(place) == []
    assert names(place / "checkpoints") == ["step-1.a2", "step-2.a1", "step-3.a1"]
    assert restored(place) == (3, 3)


def test_an_attempt_that_is_listed_late_loses_no_checkpoint(tmp_path: Path) -> None:
    """The next one takes the same number. Its save of the same step fails, and later ones succeed."""
    place = path_from(f"bucket://{tmp_path}/run")
    save(begin(place, keep=2), 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        list_late(r"step-2\.a1$|/1-\w+\.json$", tmp_path, patch)
        again = begin(place, keep=2)
        again.restore()
        with pytest.raises(CheckpointError, match=r"complete checkpoint and can't be replaced"):
            save(again, 2, version=20)
        save(again, 3)
    assert damaged(place) == []
    assert names(place / "checkpoints") == ["step-1.a1", "step-2.a1", "step-3.a1"]
    assert restored(place) == (3, 3)


def taken_over_at(number: int, folder: Path) -> str | None:
    """In a save of attempt 1, after its look at the fence, attempt 2 goes on and saves; then the first
    one does what it was about to do. Its operation, or None if it has no more."""
    place = path_from(f"bucket://{folder}/run")
    old = begin(place, keep=1)
    save(old, 1, 2)
    done: list[str] = []
    went_on = []
    told = r"attempt 2, process .* has taken over"

    def at(operation: str, key: str) -> None:
        done.append(operation)
        if len(done) - 1 == number:
            Bucket.before = staticmethod(nothing)
            new = begin(place, keep=1)
            went_on.append(new.restore())
            save(new, 3, version=30)

    Bucket.before = staticmethod(at)
    with suppress(CheckpointError):
        save(old, 3, version=31)
    Bucket.before = staticmethod(nothing)
    if not went_on:
        return None
    assert went_on[0] is not None
    with pytest.raises(CheckpointError, match=told):
        save(old, 5)
    assert restored(place) == (3, 30)
    third = begin(place, keep=1)
    third.restore()
    save(third, 4)
    assert names(place / "checkpoints") == ["step-4.a3"]
    return done[number]


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore:an old checkpoint can't be removed")
def test_an_attempt_that_was_taken_over_spoils_nothing(stride: int, tmp_path: Path) -> None:
    """Not even between its look at the fence and its operation."""
    operations: list[str] = []
    for number in itertools.count(0, stride):
        operation = taken_over_at(number, tmp_path / str(number))
        if operation is None:
            break
        operations.append(operation)
    assert {"complete", "remove", "list"} <= set(operations)


def taken_at(number: int, folder: AnyPath) -> list[int]:
    """The number that an attempt takes, and the one that another takes at an operation of this."""
    done: list[str] = []
    others: list[int] = []

    def at(operation: str, key: str) -> None:
        done.append(operation)
        if len(done) - 1 == number:
            Bucket.before = staticmethod(nothing)
            others.append(Fence(folder).take())

    Bucket.before = staticmethod(at)
    mine = Fence(folder).take()
    Bucket.before = staticmethod(nothing)
    return [mine, *others]


def test_no_two_attempts_have_one_number(tmp_path: Path) -> None:
    """Wherever in the taking of a number another attempt takes one."""
    found = [taken_at(at, path_from(f"bucket://{tmp_path}/{at}/attempts")) for at in range(9)]
    for numbers in found:
        assert sorted({*numbers}) == sorted(numbers)
    assert [len(numbers) for numbers in found].count(2) > 3

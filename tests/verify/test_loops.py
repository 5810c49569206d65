"""Scripts whose ranks have other loaders, or that build loaders and schedulers in their loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.audits import SCRIPTS, audit
from shoal.tools.verify.operations import PropertyFinding
from shoal.tools.verify.properties import EVALUATION, ORDER, SAMPLES, SCHEDULE, WORLD

pytestmark = pytest.mark.processes


LINES = (SCRIPTS / "loops_script.py").read_text().splitlines()


def line(mark: str) -> str:
    number = next(n for n, text in enumerate(LINES, 1) if text.endswith(f"# line: {mark}"))
    return f"loops_script.py:{number}"


def answers(home: Path, way: str, ranks: tuple[int, ...] = (2,)) -> dict[str, PropertyFinding]:
    report = audit(home, "loops_script.py", way, ranks=ranks)
    return {finding.name: finding for finding in report.findings}


@pytest.mark.parametrize(
    ("way", "held"),
    [
        ("subset", (SAMPLES, EVALUATION)),
        ("nested subset", (SAMPLES,)),
        ("split", (SAMPLES,)),
    ],
)
def test_samples_of_a_subset_are_those_of_its_dataset(
    home: Path, way: str, held: tuple[str, ...]
) -> None:
    found = answers(home, way, ranks=(1, 2))
    assert [f for f in found.values() if f.verdict == "refuted"] == []
    assert {found[name].verdict for name in held} == {"held"}


def test_a_rank_may_build_more_loaders_than_others(home: Path) -> None:
    found = answers(home, "rank 0 evaluates", ranks=(1, 2))
    assert [f for f in found.values() if f.verdict == "refuted"] == []
    assert (found[SAMPLES].verdict, found[EVALUATION].verdict) == ("held", "held")


@pytest.mark.parametrize("way", ["two schedulers", "two optimizers"])
def test_each_scheduler_is_counted_by_itself(home: Path, way: str) -> None:
    assert answers(home, way, ranks=(1,))[SCHEDULE].verdict == "held"


def test_the_scheduler_that_is_stepped_twice_is_found(home: Path) -> None:
    found = answers(home, "second scheduler twice", ranks=(1,))[SCHEDULE]
    assert "2 scheduler steps" in found.evidence
    assert found.cause is not None
    assert found.cause.line == line("twice")


@pytest.mark.parametrize(
    ("way", "cause", "mark"),
    [
        ("sampler in loop", "set_epoch forgotten", "sampler"),
        ("generator in loop", "generator seeded again in each epoch", "generator"),
    ],
)
def test_loaders_that_are_built_in_each_epoch_have_an_order_of_epochs(
    home: Path, way: str, cause: str, mark: str
) -> None:
    found = answers(home, way)[ORDER]
    assert found.cause is not None
    assert (found.cause.name, found.cause.line) == (cause, line(mark))


@pytest.mark.parametrize(
    ("way", "verdict"), [("epoch in loop", "held"), ("part in loop", "not decidable")]
)
def test_an_order_may_be_equal_in_another_dataset(home: Path, way: str, verdict: str) -> None:
    assert answers(home, way)[ORDER].verdict == verdict


@pytest.mark.parametrize("way", ["other seeds", "other epochs"])
def test_samples_that_ranks_repeat_are_no_padding_if_the_ranks_divide_their_number(
    home: Path, way: str
) -> None:
    cause = answers(home, way)[SAMPLES].cause
    assert cause is not None
    assert cause.name == "different seed or epoch of the samplers on the ranks"
    assert cause.line == line("others")


def test_clipping_after_the_reduction_is_no_cause(home: Path) -> None:
    found = answers(home, "sum, then clip", ranks=(1, 2))[WORLD]
    assert found.verdict == "refuted"
    assert found.cause is None or "clipped" not in found.cause.name

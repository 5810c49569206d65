"""`shoal verify --against`: a plain script and its conversion."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from helpers.audits import unseen
from helpers.cli import refused, shoal
from helpers.forked_runs import ForkedRuns
from shoal.tools.verify import run_servers
from shoal.tools.verify.against import (
    LossReport,
    compare_losses,
    loss_document,
    relative_difference,
)
from shoal.tools.verify.observations import TIMED_OUT
from shoal.tools.verify.run_servers import RunServers
from shoal.tools.verify.variants import VerifyRequest
from shoal.util.errors import LaunchError

PLAIN, CONVERTED = "plain_script.py", "converted_script.py"


def compare(
    home: Path,
    *args: str,
    ranks: tuple[int, ...] = (1,),
    size: int = 1,
    steps: int = 40,
    script: str = CONVERTED,
    servers: RunServers | None = None,
) -> LossReport:
    scratch = home.parent / "scratch"
    scratch.mkdir()
    request = VerifyRequest(
        script=script, args=args, ranks=ranks, steps=steps, limit=60.0, scratch=scratch
    )
    servers = ForkedRuns() if servers is None else servers
    return compare_losses(request, PLAIN, size=size, servers=servers, progress=unseen())


class TestRuns:
    pytestmark = pytest.mark.processes

    @pytest.mark.parametrize(
        ("args", "size"),
        [
            ((), 1),
            pytest.param(("accumulation",), 1, marks=pytest.mark.full),
            pytest.param(("loop",), 1, marks=pytest.mark.full),
            pytest.param(("loop", "accumulation"), 1, marks=pytest.mark.full),
            pytest.param(("ddp",), 2, marks=pytest.mark.full),
        ],
    )
    def test_a_converted_script_has_the_same_losses(
        self, home: Path, args: tuple[str, ...], size: int
    ) -> None:
        report = compare(home, *args, ranks=(1, 2), size=size)
        assert report.same
        assert max(report.differences) < 1e-5
        assert "the losses of 12 steps are the same in " in report.verdict
        old = PLAIN if size == 1 else f"{PLAIN}, 2 ranks"
        assert {name: len(each) for name, each in report.losses.items()} == {
            old: 12,
            "1 rank": 12,
            "2 ranks": 12,
        }

    @pytest.mark.parametrize(
        ("args", "first", "found", "advice"),
        [
            (("sum",), 1, "is the sum over the 8 samples or tokens of a step", "divide the loss"),
            *(
                pytest.param(*row, marks=pytest.mark.full)
                for row in [
                    (("sum", "corrected"), 1, "is the sum over the 8 samples", "divide the loss"),
                    (("undivided",), 1, "adds the losses of 2 backward passes", "by 2"),
                    (
                        ("factor", "corrected"),
                        1,
                        "3 times that of converted_script.py in all",
                        "elements",
                    ),
                    (("factor",), 1, "3 times that of converted_script.py in step 1", "elements"),
                    (("shuffle",), 1, "step 1 trains with 8 samples, [", "set shuffle=False"),
                    (("seed",), 1, "the initial parameters differ", "the same number"),
                    (("dropout",), 1, "Dropout draws other numbers", "rate 0"),
                    (("rate",), 2, "rate of step 1 is 0.02 in plain_script.py, 0.01", "optimizer"),
                    (("clip",), 2, "learning rates do not explain the difference", "clipping"),
                ]
            ),
        ],
    )
    def test_a_difference_is_explained(
        self, home: Path, args: tuple[str, ...], first: int, found: str, advice: str
    ) -> None:
        report = compare(home, *args)
        assert not report.same
        assert report.first == first
        ((text, change),) = report.causes
        assert found in text
        assert advice in change

    @pytest.mark.full
    def test_a_difference_on_two_ranks_only_is_not_of_the_conversion(self, home: Path) -> None:
        report = compare(home, "ranks", ranks=(1, 2), steps=2)
        assert report.first == 1
        assert report.causes == [
            (
                f"1 rank: the losses of {PLAIN}",
                f"`shoal verify {CONVERTED}` finds what depends on the number of ranks",
            )
        ]

    @pytest.mark.full
    @pytest.mark.parametrize(("args", "steps"), [((), 1), ((), 3), (("loop",), 1), (("loop",), 3)])
    def test_runs_end_after_the_steps_that_are_asked_for(
        self, home: Path, args: tuple[str, ...], steps: int
    ) -> None:
        report = compare(home, *args, steps=steps)
        assert report.same
        assert [len(each) for each in report.losses.values()] == [steps, steps]

    @pytest.mark.full
    def test_a_script_that_ends_earlier_is_not_the_same(self, home: Path) -> None:
        report = compare(home, "shorter")
        assert report.first is None
        assert not report.same
        assert "numbers of steps differ: plain_script.py 9, 1 rank 12" in report.verdict

    @pytest.mark.full
    def test_runs_that_were_stopped_are_compared_as_far_as_they_came(self, home: Path) -> None:
        class Slow(ForkedRuns):
            def run(self, *args: Any, **named: Any) -> int:
                assert super().run(*args, **named) == 0
                return TIMED_OUT

        report = compare(home, "shorter", servers=Slow())
        assert report.same
        assert {len(each) for each in report.losses.values()} == {9}
        assert f"ended after 60 seconds: {PLAIN}" in report.notes

    @pytest.mark.full
    @pytest.mark.parametrize(
        ("old", "found"),
        [
            ("print('nothing')", "without a call of Optimizer.step"),
            (None, "no scalar whose backward pass ran before Optimizer.step"),
        ],
    )
    def test_losses_that_can_not_be_observed_are_an_error(
        self, home: Path, old: str | None, found: str
    ) -> None:
        if old is not None:
            (home / PLAIN).write_text(old)
        with pytest.raises(LaunchError) as error:
            compare(home, "vector")
        assert found in error.value.found

    def test_the_command_prints_losses_side_by_side(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run_servers, "RunServers", ForkedRuns)
        command = ("verify", "--against", PLAIN, "--ranks", "1", "--html", "a.html")
        done = shoal(*command, CONVERTED, "seed")
        assert done.exit_code == 1, done.output
        assert f"{PLAIN} and {CONVERTED} seed: the losses differ from step 1 on" in done.output
        page = (home / "a.html").read_text()
        assert "largest relative difference" in page
        done = shoal(*command, "--json", CONVERTED)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert found["same"]
        assert len(found["losses"][PLAIN]) == len(found["differences"]) == 12


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--against", "missing.py", CONVERTED), "there is no file"),
        (("--against", "../old.py", CONVERTED), "outside of the current directory"),
        (("--against", PLAIN, "--kills", "1", CONVERTED), "a meaning only without --against"),
        (("--against", PLAIN, "--restart-args", "r", CONVERTED), "a meaning only without --against"),
        (("--against-ranks", "2", CONVERTED), "a meaning only with --against"),
    ],
)
def test_what_can_not_be_compared_is_an_error(
    home: Path, arguments: tuple[str, ...], found: str
) -> None:
    (home.parent / "old.py").touch()
    assert found in refused("verify", *arguments).found


@pytest.mark.parametrize(
    ("losses", "difference"),
    [
        ((2.0, 1.0), 0.5),
        ((-1.0, 1.0), 2.0),
        ((1e-9, 0.0), 1e-7),  # of the least loss
        ((0.0, 0.0), 0.0),
        ((math.inf, math.inf), 0.0),
        ((math.nan, math.nan), math.inf),
        ((1.0, math.inf), math.inf),
    ],
)
def test_differences_are_relative(losses: tuple[float, float], difference: float) -> None:
    assert relative_difference(*losses, least=0.01) == pytest.approx(difference)


def report_of(*runs: list[float], differences: list[float], first: int | None) -> LossReport:
    return LossReport(
        command="train.py",
        against="old.py",
        losses=dict(zip(("old.py", "1 rank"), runs, strict=True)),
        differences=differences,
        first=first,
        causes=[],
        notes=[],
        versions={},
    )


@pytest.mark.parametrize(
    ("difference", "digits"), [(0.0, "all digits"), (9e-10, "9 digits"), (9e-6, "5 digits")]
)
def test_the_verdict_has_the_digits_of_the_largest_difference(difference: float, digits: str) -> None:
    report = report_of([1.0, 2.0], [1.0, 2.0], differences=[0.0, difference], first=None)
    assert report.verdict == f"the losses of 2 steps are the same in {digits}"


def test_the_table_has_the_first_steps_those_around_the_difference_and_the_last() -> None:
    losses = [float(n) for n in range(1, 41)]
    report = report_of(losses, losses, differences=[0.0] * 40, first=20)
    (table,) = loss_document(report).sections[0].blocks
    assert [row[0] for row in table.rows] == ["1", "2", "3", "19", "20", "21", "40"]  # type: ignore[attr-defined]

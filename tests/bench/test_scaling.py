"""Scaling studies without processes: what is asked for, the plan, figures, diagnosis, comparison."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from helpers.synthetic_runs import simulate, write
from shoal.cli.main import app
from shoal.tools.bench.scaling import compare, directory, format, jobs
from shoal.tools.bench.scaling import configurations as grid
from shoal.tools.bench.scaling import study as scaling
from shoal.tools.bench.scaling.aggregate import (
    Repeat,
    ScalingPoint,
    StepTimes,
    all_notes,
    scaling_points,
    summarize,
)
from shoal.tools.bench.scaling.compare import (
    curve_labels,
    describe_scaling,
    diagnose_curves,
    find_causes,
)
from shoal.tools.bench.scaling.configurations import (
    BuiltIn,
    Configuration,
    Factory,
    ScriptSubject,
    StudyOptions,
    parse_subject,
    throughput_unit,
)
from shoal.tools.report import read_history
from shoal.tools.report.html import write_csv
from shoal.util.errors import CheckpointError, LaunchError
from shoal.util.python import shoal_command


def test_a_model_is_read_with_its_sizes_and_written_back() -> None:
    gpt = parse_subject("gpt:layers=8,width=512")
    assert isinstance(gpt, BuiltIn)
    assert (gpt.sizes["layers"], gpt.sizes["context"]) == (8, 128)
    assert parse_subject(str(gpt)) == gpt
    assert throughput_unit(gpt) == ("tokens", 128)
    assert throughput_unit(parse_subject("resnet18")) == ("images", 1)
    assert parse_subject("nets.big:make") == Factory(module="nets.big", name="make")
    # What is no model is refused with what would be.
    for text, told in (
        ("resnet19", "neither a built-in model"),
        ("gpt:depth=3", "'depth=3' is not one of its sizes"),
        ("gpt:layers=0", "not a number above 0"),
        ("gpt:width=100,heads=7", "heads=5"),
        ("a b:c", "neither a built-in model"),
    ):
        with pytest.raises(LaunchError, match=told):
            parse_subject(text)


FULL = StudyOptions(
    model="dense",
    processes=(1, 2, 4),
    scalings=("strong", "weak"),
    backends=("gloo", "mpi"),
    batch=8,
    rounds=2,
)


def test_one_process_runs_once_for_all_curves_and_weak_batches_grow() -> None:
    found = grid.list_configurations(FULL)
    assert [(each.processes, each.batch, each.backend) for each in found] == [
        (1, 8, "none"),
        *[(n, b, backend) for n in (2, 4) for b in (8, 8 * n) for backend in ("gloo", "mpi")],
    ]
    assert len({each.key for each in found}) == len(found)
    # Curves are called by what tells them apart.
    names = ["strong, gloo", "strong, mpi", "weak, gloo", "weak, mpi"]
    assert list(curve_labels(grid.list_curves(FULL)).values()) == names
    one = replace(FULL, scalings=("weak",), backends=("mpi",))
    assert list(curve_labels(grid.list_curves(one)).values()) == ["weak"]


@given(count=st.integers(1, 12), pair=st.integers(0, 40))
def test_over_two_rounds_each_configuration_stands_at_the_same_place(count: int, pair: int) -> None:
    first, second = grid.round_order(count, 2 * pair), grid.round_order(count, 2 * pair + 1)
    assert sorted(first) == sorted(second) == list(range(count))
    assert {first.index(each) + second.index(each) for each in range(count)} == {count - 1}
    assert count < 2 or grid.round_order(count, 2 * pair + 2) != first


def test_what_cannot_be_studied_is_refused(tmp_path: Path) -> None:
    for changed, told in (
        ({"backends": ("gloo", "tcp")}, "--backends is one of"),
        ({"batch": 3}, "--batch 4"),
        ({"warmup": 0}, "--warmup 1"),
        ({"args": ("--x",)}, "only a script accepts"),
        ({"processes": (0, 1)}, "1 or more"),
        ({"model": "missing.py"}, "there is no file"),
    ):
        with pytest.raises(LaunchError, match=told):
            grid.check_study_options(replace(FULL, **changed))
    # A script has to be told what the study varies.
    script = tmp_path / "train.py"
    script.write_text("")
    options = replace(FULL, model=str(script), backends=("gloo",), args=("--run={run}",))
    with pytest.raises(LaunchError, match="varies the batch, but no argument"):
        grid.check_study_options(options)
    options = replace(options, args=("--run={run}", "-b", "{batch}", "{steps}"))
    grid.check_study_options(options)
    chosen = grid.make_configuration(options, grid.list_curves(options)[1], 4)
    assert isinstance(options.subject, ScriptSubject)
    assert grid.fill_arguments(options, chosen, "here") == ["--run=here", "-b", "32", "40"]


def times(**milliseconds: list[float]) -> dict[str, Any]:
    """For each rank what a part takes in each of four steps, in seconds."""
    return {
        part: np.array([[value / 1e3] * 4 for value in each]) for part, each in milliseconds.items()
    }


def summary(wall: float, **milliseconds: list[float]) -> StepTimes:
    ranks = len(next(iter(milliseconds.values())))
    hosts = [f"node{rank}" for rank in range(ranks)]
    walls = np.full((ranks, 4), wall / 1e3)
    return summarize(walls, times(**milliseconds), samples=[8] * 4, hosts=hosts, loss=1.0)


def test_the_parts_of_a_typical_rank_add_up_and_the_slow_rank_is_named() -> None:
    found = summary(
        100, wait=[1, 1, 31], forward=[20, 20, 20], backward=[30, 30, 30], communication=[40, 42, 12]
    )
    assert sum(found.parts.values()) == pytest.approx(0.1)
    assert found.parts["communication"] == pytest.approx(0.012)
    assert found.parts["waiting"] == pytest.approx(0.028, abs=0.003)
    assert found.blame is not None
    assert (found.blame.rank, found.blame.host, found.blame.part) == (2, "node2", "wait")
    assert found.rate == pytest.approx(80)
    # Ranks that are late in turn blame nobody.
    communication = np.array([[0.01, 0.03, 0.01, 0.03], [0.03, 0.01, 0.03, 0.01]])
    own = {"communication": communication, "forward": 0.06 - communication}
    found = summarize(np.full((2, 4), 0.1), own, samples=[8] * 4, hosts=["a", "a"], loss=None)
    assert found.blame is None
    assert found.parts["waiting"] == pytest.approx(0.01)


def repeat(key: str, number: int, measured: StepTimes | None, **more: Any) -> Repeat:
    return Repeat(key=key, round=number, began=0.0, seconds=1.0, measured=measured, **more)


def study_of(*, strong: dict[int, StepTimes | None], **more: Any) -> list[ScalingPoint]:
    options = StudyOptions(
        model="dense", processes=tuple(strong), batch=8, rounds=1, backends=("gloo",)
    )
    curve = grid.list_curves(options)[0]
    jobs = {size: grid.make_configuration(options, curve, size).key for size in strong}
    return scaling_points(
        options,
        [repeat(jobs[size], 0, found, **(more if size > 1 else {})) for size, found in strong.items()],
    )


ONE = summary(100, forward=[30], backward=[60], update=[10])


def test_planted_causes_are_named_with_their_shares_which_add_up_to_what_is_lost() -> None:
    two = summary(80, forward=[15, 25], backward=[35, 35], update=[10, 10], communication=[20, 10])
    base, row = study_of(strong={1: ONE, 2: two})
    found = {cause.text: cause.share for cause in find_causes(row, base)}
    lost = 1 - 50 / 80
    assert row.efficiency is not None
    assert sum(found.values()) == pytest.approx(lost)
    assert found["exposed all-reduce"] == pytest.approx(10 / 80)
    assert found["waiting for rank 1 on node1 (forward)"] == pytest.approx(10 / 80)
    assert found["optimizer (the same work on each rank)"] == pytest.approx(5 / 80)
    assert found["forward and backward"] == pytest.approx(5 / 80)
    assert describe_scaling(row, base).startswith("2 processes give 1.25x (62 %): 12 % ")
    # What is gained is told too.
    two = summary(50, forward=[10, 10], backward=[25, 25], update=[5, 5], communication=[10, 10])
    base, row = study_of(strong={1: ONE, 2: two})
    assert describe_scaling(row, base) == (
        "2 processes give 2.00x (100 %): 20 % exposed all-reduce, 20 % gained in forward and backward"
    )


def test_a_sentence_names_only_what_is_above_the_spread_of_the_rounds() -> None:
    """Communication is lost in each round; the forward pass is slower in one and faster in another."""
    options = StudyOptions(model="dense", processes=(1, 2), batch=8, rounds=3, backends=("gloo",))
    one, two = (each.key for each in grid.list_configurations(options))
    repeats = [repeat(one, number, ONE) for number in range(3)]
    for number, forward in enumerate((12, 15, 21)):
        own = summary(
            forward + 45,
            forward=[forward] * 2,
            backward=[30, 30],
            update=[5, 5],
            communication=[10 + number % 2] * 2,
        )
        repeats.append(repeat(two, number, own))
    base, row = scaling_points(options, repeats)
    told = describe_scaling(row, base)
    assert "exposed all-reduce" in told
    assert "forward" not in told
    clear = {cause.text: cause.clear for cause in find_causes(row, base) if abs(cause.share) > 0.01}
    assert not clear["forward and backward"]


def test_a_failed_size_is_a_row_and_the_rest_goes_on() -> None:
    found = study_of(strong={1: ONE, 2: ONE, 4: None}, reason="out of memory")
    assert [row.rate is None for row in found] == [False, False, True]
    [(_, text)] = diagnose_curves(found)
    assert "2 processes give 1.00x" in text
    assert text.endswith("; 4 processes failed: out of memory")
    assert "failed" in format.curve_cells(found[-1], 1, format.format_spread)


def test_speed_up_is_taken_within_rounds_so_that_drift_cancels() -> None:
    options = StudyOptions(model="dense", processes=(1, 2), batch=8, rounds=2, backends=("gloo",))
    configurations = grid.list_configurations(options)
    rounds = enumerate((ONE, summary(200, forward=[200])))
    repeats = [repeat(each.key, at, found) for at, found in rounds for each in configurations]
    _, two = scaling_points(options, repeats)
    assert two.speedup is not None
    assert (two.speedup.low, two.speedup.high) == (1.0, 1.0)


def test_more_processes_than_cores_or_gpus_and_busy_machines_are_said() -> None:
    many = {"hosts": ("a",) * 4, "devices": ("cpu",) * 4, "cores": 2}
    row = study_of(strong={1: ONE, 4: ONE}, **many)[1]
    assert row.notes == ("more processes than cores: 4 on 2 cores of a",)
    busy = [repeat("a", 0, ONE, cores=2, others=0.1), repeat("a", 1, ONE, cores=2, others=1.5)]
    assert "up to 1.5 of 2 cores" in all_notes([row], busy)[1]
    assert all_notes([row], busy[:1]) == list(row.notes)
    many = {"hosts": ("a", "a"), "devices": ("cuda:0", "cuda:0"), "cores": 16}
    row = study_of(strong={1: ONE, 2: ONE}, **many)[1]
    assert row.notes == ("more processes than GPUs: 2 on 1 GPU of a",)


def test_the_reason_of_a_failure_is_one_line() -> None:
    for code, log, told in (
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n", "out of memory: OutOf"),
        (2, "given: x\nfound: no such layer\nfix:   y\n", "no such layer (exit code 2)"),
        (1, "  File x\nValueError: bad\x1b[2J shape\n", "ValueError: bad\\x1b[2J shape"),
        (-9, "step 3\n", "killed (SIGKILL)"),
        (3, "", "no output (exit code 3)"),
    ):
        found = jobs.reason_of(code, log)
        assert told in found, code
        assert "\n" not in found, code


def test_a_study_goes_on_where_it_was_killed_and_refuses_to_become_another(tmp_path: Path) -> None:
    study = directory.begin_study(tmp_path / "a", FULL)
    total = len(study.missing())
    number, first = study.missing()[0]
    study.job(first, number).mkdir(parents=True)
    (study.job(first, number) / "result.partial").write_text('{"half')
    assert len(study.missing()) == total
    study.keep(first, repeat(first.key, number, ONE, hosts=("a",)))
    again = directory.begin_study(tmp_path / "a", FULL)
    assert len(again.missing()) == total - 1
    assert again.repeats() == [repeat(first.key, number, ONE, hosts=("a",))]
    with pytest.raises(CheckpointError, match="batch 8, now 16"):
        directory.begin_study(tmp_path / "a", replace(FULL, batch=16))
    with (
        directory.lock_study(again),
        pytest.raises(CheckpointError, match="running already"),
        directory.lock_study(study),
    ):
        pass
    assert not (tmp_path / "a" / directory.LOCK).stat().st_mode & 0o007  # who reads it can't lock it
    # A job that failed is run again.
    study = directory.begin_study(tmp_path / "b", FULL)
    (number, first), *rest = study.missing()
    study.keep(first, repeat(first.key, number, None, reason="a model that was mended since"))
    assert study.missing() == rest
    assert study.missing(failed=True) == [(number, first), *rest]
    study.keep(first, repeat(first.key, number, ONE))
    assert study.missing(failed=True) == rest


def test_a_study_in_which_nothing_succeeded_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[StepTimes | None] = [None, ONE]

    def run(study: directory.Study, configuration: Configuration, number: int, _: str) -> Repeat:
        return repeat(configuration.key, number, found.pop(0), reason="no reason")

    monkeypatch.setattr(jobs, "run_job", run)
    monkeypatch.setattr(scaling, "show_study", lambda *_: None)
    words = ["bench", "scaling", "dense", "-n", "1", "--rounds", "1", "--study", str(tmp_path)]
    assert [CliRunner().invoke(app, words).exit_code for _ in range(3)] == [1, 0, 0]


def test_a_result_that_says_nothing_or_is_somebody_elses_is_named(tmp_path: Path) -> None:
    study = directory.begin_study(tmp_path, FULL)
    number, first = study.missing()[0]
    plain = asdict(repeat(first.key, number, ONE))
    wrong = [
        {**plain, "measured": {**plain["measured"], **changed}}
        for changed in ({"seconds": 0}, {"walls": [0.1]}, {"seconds": None})
    ]
    for result in (*wrong, {"key": "x"}):
        directory.write_json(study.job(first, number) / directory.RESULT, result)
        with pytest.raises(CheckpointError, match=r"rm .*result.json"):
            study.repeats()
    (tmp_path / directory.FILE).write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"study\.json"):
        directory.load_study(tmp_path)


def test_steps_that_took_no_time_are_no_result(tmp_path: Path) -> None:
    nothing = {part: values * 0 for part, values in simulate(1, 20).items()}
    history = read_history(write(tmp_path, nothing))
    with pytest.raises(LaunchError, match="took no time"):
        jobs.measure_attempt(history.attempts[0], 5, 10)


def complete(path: Path, options: StudyOptions, seconds: dict[int, float]) -> directory.Study:
    study = directory.begin_study(path, options)
    for number, each in study.missing():
        wall = seconds[each.processes] * 1e3
        study.keep(each, repeat(each.key, number, summary(wall, forward=[wall] * each.processes)))
    return study


def test_two_studies_are_compared_where_they_did_the_same(tmp_path: Path) -> None:
    options = StudyOptions(model="dense", processes=(1, 2), batch=8, backends=("gloo",))
    quad = complete(tmp_path / "quad", options, {1: 0.2, 2: 0.1})
    octo = complete(tmp_path / "octo", replace(options, threads=2), {1: 0.1, 2: 0.1})
    one, two = compare.match_studies(quad, octo)
    assert (one.ratio.median, two.ratio.median) == (2.0, 1.0)
    assert one.clear
    assert not two.clear
    told = compare.describe_pair(one, "quad", "octo")
    assert told == "octo gives 2.00x of quad at 1 process: 100 ms less forward"
    assert compare.study_differences(quad, octo) == ["threads: 1 and 2"]
    other = complete(tmp_path / "other", replace(options, batch=16, model="gpt"), {1: 1, 2: 1})
    with pytest.raises(LaunchError, match=r"the model: 'dense' and 'gpt'; the batch size: 8 and 16"):
        compare.match_studies(quad, other)
    apart = complete(tmp_path / "apart", replace(options, precisions=("bf16",)), {1: 1, 2: 1})
    with pytest.raises(LaunchError, match="no configuration was measured by both"):
        compare.match_studies(quad, apart)


def test_backends_stand_side_by_side_for_each_number_of_processes() -> None:
    options = StudyOptions(
        model="dense", processes=(1, 2, 4), batch=8, rounds=1, backends=("nccl", "gloo")
    )
    two = summary(80, forward=[20, 20], backward=[40, 40], communication=[20, 20])
    repeats = [
        repeat(each.key, 0, ONE if each.processes == 1 else two)
        for each in grid.list_configurations(options)
        if (each.processes, each.backend) != (4, "gloo")
    ]
    found = scaling_points(options, repeats)
    rates, times = format.comparison_tables(
        found, curve_labels(grid.list_curves(options)), "samples", 1
    )
    assert [list(row) for row in rates.rows] == [
        ["1", "80.0 (1.00x)", "80.0 (1.00x)"],
        ["2", "100 (1.25x)", "100 (1.25x)"],
        ["4", "100 (1.25x)", ""],
    ]
    assert rates.head == times.head == ("n", "nccl", "gloo")
    assert list(times.rows[1]) == ["2", "80.0 (20.0)", "80.0 (20.0)"]
    assert format.comparison_tables(study_of(strong={1: ONE, 2: two}), {}, "samples", 1) == []


def test_the_csv_has_every_row_and_no_formula(tmp_path: Path) -> None:
    rows = study_of(strong={1: ONE, 2: None}, reason="=1+1")
    write_csv(tmp_path / "rows.csv", format.csv_rows(parse_subject("resnet18"), rows))
    text = (tmp_path / "rows.csv").read_text()
    one, two = csv.DictReader(io.StringIO(text))
    assert float(one["images_per_second"]) == pytest.approx(80)
    assert float(one["backward"]) == pytest.approx(0.06)
    assert (two["speedup"], two["reason"]) == ("", "'=1+1")


def test_a_command_starts_what_the_backend_needs(tmp_path: Path) -> None:
    study = directory.begin_study(tmp_path, FULL)
    configurations = {each.backend: each for each in grid.list_configurations(FULL)}
    found = {
        backend: jobs.command_of(study, each, tmp_path / "job", "mpirun --bind-to none")
        for backend, each in configurations.items()
    }
    assert found["mpi"][:5] == ["mpirun", "--bind-to", "none", "-n", "4"]
    assert found["gloo"][:5] == [*shoal_command("run"), "-n", "4"]
    made = jobs.prepare_job(study, configurations["gloo"], 1)
    assert found["gloo"][-1] == str(tmp_path / "job" / jobs.ORDER)
    given = json.loads((made / jobs.ORDER).read_text())
    assert Configuration(**given["configuration"]) == configurations["gloo"]
    assert given["run"] == str(made / jobs.RUN)

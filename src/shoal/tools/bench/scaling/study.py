"""A scaling study from its first job to its page: run missing jobs, then show all results."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from shoal.tools.bench.scaling import compare as comparing
from shoal.tools.bench.scaling import format, jobs, submission
from shoal.tools.bench.scaling.aggregate import Repeat, all_notes, scaling_points
from shoal.tools.bench.scaling.allocations import Allocation, ClusterRequest
from shoal.tools.bench.scaling.configurations import (
    StudyOptions,
    check_study_options,
    list_configurations,
)
from shoal.tools.bench.scaling.diagnosis import curve_labels, diagnose_curves
from shoal.tools.bench.scaling.directory import Study, begin_study, load_study, lock_study
from shoal.tools.bench.scaling.page import compare_page, ratio_cells, study_page
from shoal.tools.bench.scaling.subject import throughput_unit
from shoal.tools.report.html import save_page, to_csv
from shoal.tools.submit.site import Site
from shoal.tools.submit.submit import Submission
from shoal.tools.submit.times import spell_time
from shoal.util.errors import LaunchError
from shoal.util.tables import plain_console, print_line, print_path, print_rows
from shoal.util.units import counted, three_digits

CSV, PAGE = "results.csv", "index.html"


def run_study(
    path: Path, options: StudyOptions, mpirun: str | None, tell: Callable[[str], None]
) -> Study:
    """Run the missing jobs of a study, and report each one that ends."""
    check_study_options(options)
    study = begin_study(path, options)
    with lock_study(study), jobs.end_job_on_signals():
        missing = study.missing(failed=True)
        total = len(list_configurations(options)) * options.rounds
        if len(missing) < total:
            tell(f"{total - len(missing)} of {total} jobs are already done")
        needs = any(configuration.backend == "mpi" for _, configuration in missing)
        command = (mpirun or jobs.find_mpirun()) if needs else ""
        word, each = throughput_unit(options.subject)
        for done, (number, configuration) in enumerate(missing, total - len(missing) + 1):
            repeat = jobs.run_job(study, configuration, number, command)
            study.keep(configuration, repeat)
            outcome = _outcome(repeat, word, each)
            tell(f"{done} of {total}, round {number + 1}: {configuration}: {outcome}")
    return study


def _outcome(repeat: Repeat, word: str, each: int) -> str:
    if repeat.measured is None:
        return f"failed: {repeat.reason}"
    return f"{three_digits(repeat.measured.rate * each)} {word}/s"


def print_study(study: Study, console: Console) -> None:
    """Print the results of a study, the diagnosis first, and write its page, plots and CSV.

    Raises LaunchError if no job has run.
    """
    repeats = study.repeats()
    found = scaling_points(study.options, repeats)
    if not found:
        raise LaunchError(
            given=str(study.path),
            found="none of its jobs has a result yet",
            fix=f"shoal bench scaling {study.options.model} … --study {study.path}",
        )
    word, each = throughput_unit(study.options.subject)
    told = diagnose_curves(found)
    names = curve_labels([curve for curve, _ in told])
    print_line(console, *(f"{names[curve]}: {text}" for curve, text in told))
    notes = all_notes(found, repeats)
    print_line(console, *notes)
    console.print()
    head = format.curve_headers(word)
    for curve, _ in told:
        lines = [
            format.curve_cells(row, each, format.format_spread) for row in found if row.curve == curve
        ]
        print_rows(console, f"{study.options.model}: {curve}", head, lines, right=head)
    for scaling in dict.fromkeys(curve.scaling for curve, _ in told):
        own = [row for row in found if row.curve.scaling == scaling]
        for table in format.comparison_tables(own, names, word, each):
            print_rows(console, table.caption, table.head, table.rows, right=table.right)
    path = study.path / CSV
    path.write_text(to_csv(format.csv_table(found, word, each).lines))
    written = save_page(study_page(study, found, notes), study.path / PAGE, option="-o DIR")
    print_line(console, f"{written[0]}, with plots and {path.name} next to it")


def print_planned_jobs(path: Path, options: StudyOptions, asked: ClusterRequest, site: Site) -> None:
    """Print the batch scripts that `submit` would submit, with their names on stderr."""
    console, notes = plain_console(stderr=True), dict[str, None]()
    for allocation, done in submission.plan_jobs(path, options, asked, site):
        plain_console().out(done.script, end="", highlight=False)
        print_line(console, f"job: {_size(allocation, done)}")
        notes |= dict.fromkeys(done.notes)
    print_line(console, *(f"note: {note}" for note in notes))


def submit_study(
    path: Path, options: StudyOptions, asked: ClusterRequest, site: Site, console: Console
) -> bool:
    """Submit the missing jobs of a study, or show it if none are missing.

    Return whether anything was submitted, or nothing is missing.
    """
    notes, submitted = dict[str, None](), False
    for allocation, done in submission.submit_jobs(path, options, asked, site):
        print_line(console, f"job {', '.join(done.jobs)}: {_size(allocation, done)}")
        notes |= dict.fromkeys(done.notes)
        submitted = True
    print_line(console, *(f"note: {note}" for note in notes))
    if not submitted:
        return collect_study(load_study(path), console)
    console.print()
    print_path(console, f"to show the results: shoal bench collect {shlex.quote(str(path))}")
    return True


def _size(allocation: Allocation, done: Submission) -> str:
    nodes = counted(allocation.nodes, "node")
    gpus = f" with {done.job.gpus} GPU(s)" if done.job.gpus else ""
    sizes = ", ".join(map(str, allocation.sizes))
    count = len(allocation.trainings)
    time = spell_time(done.job.time)
    return f"{nodes}{gpus}, {count} training(s) on {sizes} process(es), {time} at most"


def collect_study(study: Study, console: Console) -> bool:
    """Show the results so far, and list trainings without one; return whether there are none."""
    submission.gather_results(study)
    if study.repeats():
        print_study(study, console)
        console.print()
    left = submission.list_waiting(study)
    if left:
        total = len(list_configurations(study.options)) * study.options.rounds
        count = sum(each.trainings for each in left)
        print_line(console, f"{count} of {total} training runs have no result yet:")
        for each in left:
            job = f"job {', '.join(each.numbers)}: " if each.numbers else ""
            print_path(console, f"{job}{each.trainings} {each.state}: {each.more}")
    return not left


def compare_studies(first: Study, second: Study, out: Path, console: Console) -> None:
    """Print the comparison of two studies, and write a page into the directory `out`.

    Raises LaunchError if they did different work, or if they have no configuration in common.
    """
    found = comparing.match_studies(first, second)
    called = first.path.resolve().name, second.path.resolve().name
    if called[0] == called[1]:
        called = str(first.path), str(second.path)
    word, each = throughput_unit(first.options.subject)
    names = curve_labels(list(dict.fromkeys(pair.curve for pair in found)))
    for pair in comparing.largest_pairs(found):
        print_line(console, f"{names[pair.curve]}: {comparing.describe_pair(pair, *called)}")
    console.print()
    head = ("curve", "n", *(f"{name} {word}/s" for name in called), "ratio")
    lines = ratio_cells(found, names, each)
    title = f"{first.options.model}: {called[1]} by {called[0]}"
    print_rows(console, title, head, lines, right=head[1:])
    print_line(
        console, *(f"they differ in {line}" for line in comparing.study_differences(first, second))
    )
    written = save_page(compare_page(first, second, found, called), out / PAGE, option="-o DIR")
    print_line(console, str(written[0]))

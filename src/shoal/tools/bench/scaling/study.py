"""A scaling study from its first job to its page: run missing jobs, then show all results."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.tools.bench.scaling import format, jobs, submission
from shoal.tools.bench.scaling.aggregate import Repeat, ScalingPoint, all_notes, scaling_points
from shoal.tools.bench.scaling.compare import (
    compare_document,
    curve_labels,
    diagnose_curves,
    find_causes,
)
from shoal.tools.bench.scaling.configurations import (
    ScalingCurve,
    StudyOptions,
    check_study_options,
    list_configurations,
    threads_for,
    throughput_unit,
)
from shoal.tools.bench.scaling.directory import Study, begin_study, load_study, lock_study
from shoal.tools.bench.scaling.format import parts_figure, scaling_figures
from shoal.tools.bench.scaling.submission import Allocation, ClusterRequest, node_capacity
from shoal.tools.report.html import save_page, write_csv
from shoal.tools.submit.site_catalog import choose
from shoal.tools.submit.submit import Submission
from shoal.tools.submit.times import spell_time
from shoal.util.clock import utc_time
from shoal.util.document import Document, DocumentBlock, KeyNumbers, Section, Table, Text, to_plain
from shoal.util.errors import LaunchError
from shoal.util.tables import plain_console, print_document, print_line, print_path
from shoal.util.units import counted, three_digits

TOLD = 0.005
"""Minimum fraction of a step for a cause to be in the table."""
FACTS = ("host", "site", "cores", "torch")


def study_document(study: Study, rows: Sequence[ScalingPoint]) -> Document:
    """Return the results of a study, from at least one row."""
    word, each = throughput_unit(study.options.subject)
    told = diagnose_curves(rows)
    names = curve_labels([curve for curve, _ in told])
    verdict, *rest = (f"{names[curve]}: {text}." for curve, text in told)
    notes = (f"{note[:1].upper()}{note[1:]}." for note in all_notes(rows, study.repeats()))
    return Document(
        title=f"How {study.options.model} scales",
        verdict=verdict,
        about="shoal bench scaling, started "
        f"{utc_time(study.began, '%Y-%m-%d %H:%M UTC')} on {study.where}",
        sections=[
            Section(
                heading="Diagnosis",
                blocks=[
                    *(Text(text=text) for text in (*rest, *notes)),
                    *format.curve_tables(rows, study.options.model, word, each, only="terminal"),
                    _causes(rows, names),
                    Table(
                        caption="Failures.",
                        head=("configuration", "reason"),
                        rows=[(str(row.configuration), row.reason) for row in rows if row.reason],
                        only="page",
                    ),
                ],
            ),
            Section(heading="Throughput and step time", blocks=_scalings(rows, names, word, each)),
            Section(heading="Where a step's time goes", blocks=[_time(rows, names)]),
            Section(
                heading="All figures",
                blocks=[
                    *format.curve_tables(rows, study.options.model, word, each, only="page"),
                    Text(
                        text=f"n: processes. batch: of all of them. {word}/s, speed-up and eff.: the "
                        "median of the rounds (lowest to highest), each against the smallest n of the "
                        "same round. ms/step: the median of all steps (quartiles). sync: the time per "
                        "step inside collectives, including waiting. runs: jobs that succeeded.",
                        only="page",
                    ),
                ],
            ),
            Section(heading="Circumstances", blocks=_circumstances(study)),
        ],
    )


def _causes(rows: Sequence[ScalingPoint], names: Mapping[ScalingCurve, str]) -> Table:
    bases = {(row.curve, row.configuration): row for row in rows}
    pairs = [(row, bases[row.curve, row.base]) for row in rows if row.base is not None]
    found = [
        (names[row.curve], str(row.processes), f"{cause.share * 100:.1f}", cause.text)
        for row, base in pairs
        if row is not base
        for cause in find_causes(row, base)
        if abs(cause.share) >= TOLD
    ]
    return Table(
        caption="The time of a step beyond perfect scaling, in percent of the step; negative values "
        "are gains. For each number n of processes, the values and the efficiency add up to 100 %, "
        "except for causes below half a percent.",
        head=("curve", "n", "% of a step", "cause"),
        rows=found,
        right=("n", "% of a step"),
        only="page",
    )


def _scalings(
    rows: Sequence[ScalingPoint], names: Mapping[ScalingCurve, str], word: str, each: int
) -> list[DocumentBlock]:
    blocks: list[DocumentBlock] = []
    for scaling in dict.fromkeys(row.curve.scaling for row in rows):
        own = [row for row in rows if row.curve.scaling == scaling and row.rate is not None]
        if own:
            blocks += format.comparison_tables(own, names, word, each)
            blocks += scaling_figures(scaling, own, names, word, each)
    return blocks


def _time(rows: Sequence[ScalingPoint], names: Mapping[ScalingCurve, str]) -> DocumentBlock:
    labelled: dict[str, ScalingPoint] = {}
    for row in rows:
        if row.parts is not None:
            alone = f"{row.processes}, batch {row.configuration.batch}"
            shared = row.base == row.configuration  # by all curves
            labelled.setdefault(alone if shared else f"{row.processes} {names[row.curve]}", row)
    if not labelled:
        return Text(text="No job has run.", only="page")
    return parts_figure("parts", labelled, "Milliseconds of a step by part, on a typical process.")


def _circumstances(study: Study) -> list[DocumentBlock]:
    options = to_plain(study.options)
    args = options.pop("args")
    asked = [
        (name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in options.items()
        if name != "model"
    ]
    asked += [("arguments", " ".join(args))] if args else []
    head = ("what", "value")
    facts = [(name, study.machine[name]) for name in FACTS if name in study.machine]
    return [
        KeyNumbers(pairs=facts, only="page"),
        Table(caption="Options.", head=head, rows=asked, only="page"),
        Table(caption="The machine.", head=head, rows=list(study.machine.items()), only="page"),
    ]


CSV, PAGE = "results.csv", "index.html"


def measure_study(
    path: Path | None, options: StudyOptions, threads: int | None, mpirun: str | None
) -> bool:
    """Run the missing jobs of a study, and show it; return whether any job has succeeded.

    Without `threads`, the processes share the cores.
    """
    console = plain_console()
    if threads is None:
        threads = threads_for(options.processes, len(os.sched_getaffinity(0)))
    options = replace(options, threads=threads)
    folder = path or study_directory(options)
    study = _run_study(folder, options, mpirun, lambda line: print_line(console, line))
    console.print()
    show_study(study)
    return any(repeat.measured for repeat in study.repeats())


def study_directory(options: StudyOptions) -> Path:
    """Return the usual directory of a study, studies/MODEL.

    There `gpt:layers=8` becomes `gpt-layers=8`, and `a/train.py` becomes `train`.
    """
    name = Path(options.model).stem if options.model.endswith(".py") else options.model
    return Path("studies", "".join(sign if sign.isalnum() or sign in "=-_." else "-" for sign in name))


def _run_study(
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


def show_study(study: Study) -> None:
    """Print the results of a study, the diagnosis first, and write its page, plots and CSV.

    Raises LaunchError if no job has run.
    """
    found = scaling_points(study.options, study.repeats())
    if not found:
        raise LaunchError(
            given=str(study.path),
            found="none of its jobs has a result yet",
            fix=f"shoal bench scaling {study.options.model} … --study {study.path}",
        )
    write_csv(study.path / CSV, format.csv_rows(study.options.subject, found))
    _show(study_document(study, found), study.path / PAGE, f", with plots and {CSV} next to it")


def _show(document: Document, page: Path, rest: str = "") -> None:
    print_document(plain_console(), document)
    save_page(document, page, option="-o DIR")
    print_path(plain_console(), f"{page}{rest}")


def submit_study(
    path: Path | None,
    options: StudyOptions,
    threads: int | None,
    asked: ClusterRequest,
    *,
    dry: bool,
) -> bool:
    """Submit the missing jobs of a study, or show it if none are missing.

    If `dry`, only print the batch scripts, with their names on stderr. Without `threads`, a process
    has as many as cores. Return whether anything was submitted, or nothing is missing.
    """
    site = choose(asked.site).value
    if threads is None:
        threads = node_capacity(site, asked).cpus or 1
    options = replace(options, threads=threads)
    path = path or study_directory(options)
    console, notes, numbers = plain_console(stderr=dry), dict[str, None](), list[str]()
    chosen = submission.plan_jobs if dry else submission.submit_jobs
    for allocation, done in chosen(path, options, asked, site):
        if dry:
            plain_console().out(done.script, end="", highlight=False)
        numbers += done.jobs
        print_line(console, f"job {', '.join(done.jobs)}".rstrip() + f": {_size(allocation, done)}")
        notes |= dict.fromkeys(done.notes)
    print_line(console, *(f"note: {note}" for note in notes))
    if not dry and not numbers:
        return collect_study(path)
    if not dry:
        print_path(console, f"\nto show the results: shoal bench collect {shlex.quote(str(path))}")
    return True


def _size(allocation: Allocation, done: Submission) -> str:
    nodes = counted(allocation.nodes, "node")
    gpus = f" with {done.job.gpus} GPU(s)" if done.job.gpus else ""
    sizes = ", ".join(map(str, allocation.sizes))
    count = len(allocation.trainings)
    time = spell_time(done.job.time)
    return f"{nodes}{gpus}, {count} training(s) on {sizes} process(es), {time} at most"


def collect_study(path: Path) -> bool:
    """Show the results so far, and list trainings without one; return whether there are none."""
    console, study = plain_console(), load_study(path)
    submission.gather_results(study)
    if study.repeats():
        show_study(study)
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


def compare_studies(first: Path, second: Path, out: Path) -> None:
    """Print the comparison of two studies, and write a page into the directory `out`.

    Raises LaunchError if they did different work, or if they have no configuration in common.
    """
    _show(compare_document(load_study(first), load_study(second)), out / PAGE)

"""Print what `shoal submit`, `status` and `sites` report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console

from shoal.tools.submit.job import Job
from shoal.tools.submit.job_directory import JobEnd
from shoal.tools.submit.site_catalog import SiteEntry, load
from shoal.tools.submit.status import Status, outcome
from shoal.tools.submit.submit import Submission
from shoal.tools.submit.times import gpu_hours, spell_time
from shoal.util.clock import CLOCK
from shoal.util.tables import (
    add_row,
    make_table,
    print_line,
    print_pairs,
    print_path,
    print_table,
)
from shoal.util.units import age

_SHOWN = 5
_ROOM_FOR_FILES = 90


def print_script(console: Console, done: Submission) -> None:
    """Print only the batch script, since the output may go into a file."""
    console.out(done.script, end="", highlight=False)


def print_submission(console: Console, done: Submission, *, out: Path | None) -> None:
    """Print what was submitted, and the commands with which to continue."""
    if done.jobs:
        print_line(console, f"job {', '.join(done.jobs)}: {_size(done.job)}")
    else:
        print_path(console, f"written, not submitted: {done.program} {shlex.quote(str(out))}")
    _remarks(console, done)
    run = shlex.quote(_short(done.run))
    if done.jobs:
        print_pairs(
            console,
            "",
            [
                ("follow", f"shoal logs -f {run}"),
                ("status", f"shoal status {run}"),
                ("cancel", f"shoal cancel {run}"),
                ("resume", "run the same command again when it has ended"),
                ("files", _short(done.folder)),
            ],
        )


def print_dry_run(console: Console, done: Submission) -> None:
    """Print what a dry run would submit."""
    print_line(console, f"job: {_size(done.job)}")
    _remarks(console, done)


def _remarks(console: Console, done: Submission) -> None:
    """Print the notes about a job."""
    print_line(console, *(f"note: {note}" for note in done.notes))
    if done.linked:
        names = _some(done.linked)
        print_line(console, f"note: linked and not copied, so changes affect the job: {names}")


def print_status(console: Console, found: Status) -> None:
    """Print the state of the jobs of a run, and the progress of its training."""
    record = found.record
    what = f"{record.command} on {record.site}, submitted {_ago(record.submitted)}"
    table = make_table("job", "state", "ran", "limit", "where or why")
    for each in found.queued:
        add_row(table, each.job, each.state.lower(), each.ran, each.limit, each.reason)
    for end in found.ends:
        add_row(table, end.job, outcome(end.code), "", "", _ended(end))
    if not found.queued and not found.ends:
        why = f"{found.scheduler} does not list it any more"
        add_row(table, ", ".join(record.jobs), "gone", "", "", why)
    print_table(console, f"{_short(found.folder)}: {what}", table)
    print_line(console, *_stuck(found), *found.failure, *_progress(found))


def print_overview(console: Console, found: Iterable[Status]) -> None:
    """Print one line per run: the state of its newest job, and the progress of its training."""
    table = make_table("run", "job", "state", "step", "where or why")
    for each in found:
        number, state, why = ", ".join(each.record.jobs), "gone", ""
        for end in each.ends[-1:]:
            number, state, why = end.job, outcome(end.code), _ended(end)
        for queued in each.queued[:1]:
            number, state, why = queued.job, queued.state.lower(), queued.never_starts or queued.reason
        step = "" if each.step is None else each.step.get("step")
        add_row(table, _short(each.folder.parents[1].resolve()), number, state, str(step), why)
    print_table(console, "newest jobs", table)


def _stuck(found: Status) -> Iterator[str]:
    for each in found.queued:
        if each.never_starts:
            yield f"job {each.job} can never start: {each.never_starts} ({each.reason.strip('()')})"


def _progress(found: Status) -> Iterator[str]:
    if found.step is not None:
        loss = found.step.get("loss")
        shown = f", loss {loss:.6g}" if isinstance(loss, float) else ""
        yield f"step {found.step.get('step')}{shown}, {_ago(found.step.get('t'))}"
    if found.saved is not None:
        yield f"saved step {found.saved.get('step')}, {_ago(found.saved.get('t'))}"


def print_sites(console: Console, entries: Iterable[SiteEntry]) -> None:
    """Print all sites with their partitions, and their files if the terminal is wide enough."""
    files = ["file"] if console.width >= _ROOM_FOR_FILES else []
    table = make_table("site", "description", "partitions", "tested on", *files)
    for entry in entries:
        site = load(entry)
        partitions = ", ".join(site.partitions) or "any"
        shown = [entry.file] if files else []
        add_row(table, site.name, site.about, partitions, site.tried or "untested", *shown)
    console.print(table)


def print_site_file(console: Console, entry: SiteEntry) -> None:
    """Print the text of a site file."""
    console.out(entry.text, end="", highlight=False)


def _size(job: Job) -> str:
    nodes = f"{job.nodes} node" + "s" * (job.nodes > 1)
    each = f" with {job.gpus} GPU" + "s" * (job.gpus > 1) if job.gpus else ""
    times = f", {job.chain} in a chain" if job.chain > 1 else ""
    times += f", {job.elements} elements" if job.elements else ""
    count = job.nodes * job.gpus * job.chain * max(1, job.elements)
    cost = f", at most {gpu_hours(count, job.time)}" if job.gpus else ""
    return f"{nodes}{each}, {job.processes} process(es), {spell_time(job.time)}{times}{cost}"


def _ended(end: JobEnd) -> str:
    again = f", after {end.restarts} requeue(s)" if end.restarts else ""
    return f"{_ago(end.when)}{again}"


def _ago(moment: object) -> str:
    if not isinstance(moment, int | float):
        return "at an unknown time"
    return f"{age(CLOCK.wall() - moment)} ago"


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(map(json.dumps, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _short(path: Path) -> str:
    """Return a path as a user would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)

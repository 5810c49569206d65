"""The reports of `shoal submit`, `status` and `sites` as documents."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.tools.submit.scheduler import Job
from shoal.tools.submit.site_catalog import SiteEntry, load
from shoal.tools.submit.status import JobEnd, Status, outcome
from shoal.tools.submit.submit import Submission
from shoal.tools.submit.times import gpu_hours, spell_time
from shoal.util.clock import CLOCK
from shoal.util.document import Document, DocumentBlock, KeyNumbers, Section, Table, Text
from shoal.util.units import age, counted, first_few

_SHOWN = 5


def submission_document(done: Submission, out: Path | None) -> Document:
    """Return what was submitted, or written to `out`, or only tried, and how to continue."""
    text = f"job: {_size(done.job)}"
    if done.jobs:
        text = f"job {', '.join(done.jobs)}: {_size(done.job)}"
    elif out is not None:
        text = f"written, not submitted: {done.program} {shlex.quote(str(out))}"
    notes = list(done.notes)
    if done.linked:
        linked = first_few([*map(json.dumps, done.linked)], _SHOWN)
        notes.append(f"linked and not copied, so changes affect the job: {linked}")
    run = shlex.quote(_short(done.run))
    commands = [
        ("follow", f"shoal logs -f {run}"),
        ("status", f"shoal status {run}"),
        ("cancel", f"shoal cancel {run}"),
        ("resume", "run the same command again when it has ended"),
        ("files", _short(done.folder)),
    ]
    blocks: list[DocumentBlock] = [
        Text(text=text, whole=out is not None),
        *(Text(text=f"note: {note}") for note in notes),
    ]
    return _document("submit", *blocks, *([KeyNumbers(pairs=commands)] if done.jobs else []))


def status_document(found: Status) -> Document:
    """Return the state of the jobs of a run, and the progress of its training."""
    record = found.record
    rows = [(each.job, each.state.lower(), each.ran, each.limit, each.reason) for each in found.queued]
    rows += [(end.job, outcome(end.code), "", "", _ended(end)) for end in found.ends]
    gone = (", ".join(record.jobs), "gone", "", "", f"{found.scheduler} does not list it any more")
    table = Table(
        caption=f"{_short(found.folder)}: {record.command} on {record.site}, "
        f"submitted {_ago(record.submitted)}",
        head=("job", "state", "ran", "limit", "where or why"),
        rows=rows or [gone],
    )
    stuck = [
        f"job {each.job} can never start: {each.never_starts} ({each.reason.strip('()')})"
        for each in found.queued
        if each.never_starts
    ]
    lines = (*stuck, *found.failure, *_progress(found))
    return _document("status", table, *(Text(text=line) for line in lines))


def overview_document(found: Iterable[Status]) -> Document:
    """Return one line per run: the state of its newest job, and the progress of its training."""
    rows = []
    for each in found:
        number, state, why = ", ".join(each.record.jobs), "gone", ""
        for end in each.ends[-1:]:
            number, state, why = end.job, outcome(end.code), _ended(end)
        for queued in each.queued[:1]:
            number, state, why = queued.job, queued.state.lower(), queued.never_starts or queued.reason
        step = "" if each.step is None else str(each.step.get("step"))
        rows.append((_short(each.folder.parents[1].resolve()), number, state, step, why))
    head = ("run", "job", "state", "step", "where or why")
    return _document("status", Table(caption="newest jobs", head=head, rows=rows))


def sites_document(entries: Iterable[SiteEntry]) -> Document:
    """Return all sites with their partitions and files."""
    rows = []
    for entry in entries:
        site = load(entry)
        partitions = ", ".join(site.partitions) or "any"
        rows.append((site.name, site.about, partitions, site.tried or "untested", entry.file))
    head = ("site", "description", "partitions", "tested on", "file")
    return _document("sites", Table(caption="", head=head, rows=rows, wide=("file",)))


def _document(command: str, *blocks: DocumentBlock) -> Document:
    return Document(title=f"shoal {command}", sections=[Section(blocks=blocks)])


def _progress(found: Status) -> Iterator[str]:
    if found.step is not None:
        loss = found.step.get("loss")
        shown = f", loss {loss:.6g}" if isinstance(loss, float) else ""
        yield f"step {found.step.get('step')}{shown}, {_ago(found.step.get('t'))}"
    if found.saved is not None:
        yield f"saved step {found.saved.get('step')}, {_ago(found.saved.get('t'))}"


def _size(job: Job) -> str:
    each = f" with {counted(job.gpus, 'GPU')}" if job.gpus else ""
    times = f", {job.chain} in a chain" if job.chain > 1 else ""
    times += f", {job.elements} elements" if job.elements else ""
    count = job.nodes * job.gpus * job.chain * max(1, job.elements)
    cost = f", at most {gpu_hours(count, job.time)}" if job.gpus else ""
    processes = counted(job.processes, "process", "es")
    return f"{counted(job.nodes, 'node')}{each}, {processes}, {spell_time(job.time)}{times}{cost}"


def _ended(end: JobEnd) -> str:
    again = f", after {counted(end.restarts, 'requeue')}" if end.restarts else ""
    return f"{_ago(end.when)}{again}"


def _ago(moment: object) -> str:
    if not isinstance(moment, int | float):
        return "at an unknown time"
    return f"{age(CLOCK.wall() - moment)} ago"


def _short(path: Path) -> str:
    """Return a path as a user would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)

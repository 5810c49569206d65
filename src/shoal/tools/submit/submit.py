"""`shoal submit`: decide, check, copy the source, write the batch script, submit it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.distributed import env_vars
from shoal.launcher.entry_point import find_script
from shoal.telemetry.stop_time import stopping_seconds
from shoal.tools.submit.check import check_interpreter, check_job, notes, without_secrets, workers_of
from shoal.tools.submit.decide import decide
from shoal.tools.submit.scheduler import MARK, Job, JobContext, JobRequest, Scheduler
from shoal.tools.submit.site_catalog import Site, site_scheduler
from shoal.tools.submit.source_snapshot import SourceFiles, copy_source, find_source, import_paths
from shoal.tools.submit.status import (
    SubmittedJob,
    active_jobs,
    add_submitted_run,
    make_folder,
    missing_folders,
    next_folder,
    remove_folder,
    runs_file,
    write_record,
)
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError, raised_as
from shoal.util.python import this_python
from shoal.util.units import first_few

_HEAD, _SHOWN = 8192, 3


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The result of `submit`: the job, its batch script, notes for the user, the ids of the jobs.

    There are no ids if no job was submitted. `program` is the scheduler's command that submits a
    script. `linked` are files that are linked to and not copied.
    """

    job: Job
    script: str
    notes: tuple[str, ...]
    run: Path
    folder: Path
    program: str
    jobs: tuple[str, ...]
    linked: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """Options of a submission. `run` is the run directory, None being runs/NAME of NAME.py.

    A dry run creates no files. With `out` the script is written there and not submitted. With `copy`
    the job runs a copy of the source; with `force` it is submitted in spite of objections.
    """

    run: Path | None = None
    dry: bool = False
    out: Path | None = None
    copy: bool = True
    force: bool = False


def submit(request: JobRequest, site: Site, options: SubmitOptions) -> Submission:
    """Submit a job, or do what `options` select instead.

    Raises LaunchError if the script is missing, if there are objections to the job, or if the scheduler
    rejects it; then no files are left behind.
    """
    scheduler = site_scheduler(site)
    script = Path(request.script)
    find_script(request.script, "shoal submit … train.py")
    run = (options.run or Path("runs") / script.stem).resolve()
    if script.resolve().is_relative_to(run):
        raise LaunchError(
            given=f"--run {options.run}",
            found=f"{script} is in it, and would be copied with all files of the run",
            fix=f"use a separate directory: --run {run / 'run'}",
        )
    with raised_as(
        LaunchError, given=str(script), fix="make it readable for you by chmod u+r, or copy it"
    ):
        text = script.read_text(errors="replace")
    request = replace(request, workers=workers_of(text, request.args))
    job = decide(request, site, save=stopping_seconds(run))
    if not options.force:
        check_interpreter(job, text)
        check_job(request, site, job)
        if not options.dry and options.out is None:
            _check_alone(run)
            scheduler.check_queue(job)
    source = find_source(script, without=run) if options.copy else None
    made = missing_folders(run)
    jobs: tuple[str, ...] = ()
    with raised_as(
        LaunchError,
        given=f"the run directory {run}",
        fix="pass --run DIR with a directory that you can write to, and that all nodes share",
    ):
        folder = next_folder(run) if options.dry else make_folder(run)
        try:
            text = scheduler.render(job, _place(job, site, run, folder, source))
            if not options.dry and source is not None:
                copy_source(source, folder)
            if not options.dry and options.out is not None:
                _keep(text, options.out)
            elif not options.dry:
                jobs = _submit_all(_write(text, folder / scheduler.profile.file), job, scheduler)
                write_record(folder, _record(jobs, request, site, job))
        except BaseException as error:
            if isinstance(error, OSError) and jobs:  # the user would not know of them
                scheduler.cancel(jobs)
                jobs = ()
            if not options.dry and not jobs:
                remove_folder(folder, made)
            raise
    unlisted = _list(run) if jobs else ()
    return Submission(
        job=job,
        script=text,
        notes=(*notes(request, site, job), *unlisted),
        run=run,
        folder=folder,
        program=scheduler.profile.submit_program,
        jobs=jobs,
        linked=tuple(map(str, source.linked)) if source else (),
    )


def _list(run: Path) -> tuple[str, ...]:
    """Add a run to the user's list; return a note if that fails, since the job is submitted."""
    try:
        add_submitted_run(run)
    except OSError as error:
        return (f"not in the list of `shoal status`: {runs_file()}: {error.strerror}",)
    return ()


def _check_alone(run: Path) -> None:
    """Raise LaunchError if a job of this run waits or runs already."""
    others = active_jobs(run)
    if others:
        names = first_few([f"{each.job} ({each.state.lower()})" for each in others], _SHOWN)
        raise LaunchError(
            given=f"--run {run}",
            found=f"job {names} of this run has not ended: if two jobs use one directory, the "
            "older job fails and loses its progress since its last save",
            fix=f"run shoal cancel {shlex.quote(str(run))} first, or use --run DIR with another "
            "directory (--force submits it anyway)",
        )


def _write(text: str, path: Path) -> Path:
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    path.chmod(0o700)
    return path


def _keep(text: str, path: Path) -> Path:
    """Write a text where the user wants it, but overwrite only one of Shoal's own."""
    with raised_as(LaunchError, given=f"-o {path}", fix="pass -o FILE with a writable file"):
        if path.exists() and MARK.encode() not in path.read_bytes()[:_HEAD]:
            raise LaunchError(
                given=f"-o {path}",
                found="it exists already, and `shoal submit` has not written it",
                fix="choose another name; `shoal logs` prints the log of a job",
            )
        return _write(text, path)


def _submit_all(script: Path, job: Job, scheduler: Scheduler) -> tuple[str, ...]:
    """Submit the job, or all jobs of a chain; if one of these is rejected, cancel the others."""
    jobs: list[str] = []
    try:
        for _ in range(job.chain):
            jobs.append(scheduler.submit(script, after=jobs[-1] if jobs else None))
    except BaseException:
        if jobs:
            scheduler.cancel(jobs)
        raise
    return tuple(jobs)


def _place(job: Job, site: Site, run: Path, folder: Path, source: SourceFiles | None) -> JobContext:
    script = Path(job.script).resolve()
    paths: tuple[str, ...] = ()
    if source is not None:
        copy = folder / "source"
        script = copy / source.script.relative_to(source.root)
        paths = import_paths(source.root, copy, env_vars.python_path())
    # An image contains its own Python.
    python = this_python() if job.container is None else "python"
    return JobContext(
        folder=str(folder),
        directory=os.getcwd(),
        run=str(run),
        script=str(script),
        args=job.args,
        sweep=job.sweep,
        python=job.python or site.python or python,
        image=job.container,
        python_path=paths,
        stage=staged(job.stage),
        variables=job.variables,
    )


def staged(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths to stage, absolute. Raises LaunchError for paths that can't be staged."""
    found: dict[str, str] = {}
    for path in paths:
        whole = os.path.abspath(path)
        name = os.path.basename(whole)
        if not name or not os.path.exists(whole):
            why = f"there is no {whole}" if name else "it is the root of the file system"
            raise LaunchError(
                given=f"--stage {path}",
                found=why,
                fix="pass --stage with a file or a directory that exists",
            )
        if name in found:
            raise LaunchError(
                given=f"--stage {found[name]}, --stage {whole}",
                found=f"both would be {name} on a node",
                fix="rename one of them, or stage a directory that contains both",
            )
        found[name] = whole
    return tuple(found.values())


def _record(jobs: tuple[str, ...], request: JobRequest, site: Site, job: Job) -> SubmittedJob:
    return SubmittedJob(
        jobs=jobs,
        scheduler=site.scheduler,
        submitted=CLOCK.wall(),
        site=site.name,
        command=shlex.join((request.script, *without_secrets(request.args))),
        nodes=job.nodes,
        gpus=job.gpus,
        processes=job.processes,
        time=job.time,
        signal=job.signal,
        to_batch=job.to_batch,
        elements=job.elements,
    )

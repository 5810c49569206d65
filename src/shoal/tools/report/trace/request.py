"""`shoal report RUN --trace a:b`: merge records, request one, or draw a timeline from the events."""

from __future__ import annotations

from pathlib import Path

from shoal.telemetry.profiler.window import (
    FOLDER,
    MOST,
    Window,
    check_length,
    parse_window,
    trace_path,
    write_request,
)
from shoal.tools.report import read_history
from shoal.tools.report.attempts import outcome_of
from shoal.tools.report.trace.coarse import write_coarse_trace
from shoal.tools.report.trace.merge import merge_traces
from shoal.util.errors import CheckpointError, raised_as


def make_timeline(run: str, steps: str) -> str:
    """Write the timeline of a run's steps "first:last", or request a record; return the text to print.

    Raises StepError for steps that can't be recorded, CheckpointError for steps that do not exist.
    """
    wanted = parse_window(steps, f"shoal report {run} --trace {steps}")
    if not (Path(run) / "events").is_dir():
        raise CheckpointError(
            given=f"shoal report {run} --trace {steps}",
            found=f"{run} is not a run directory: it has no events",
            fix="use the directory that the script passes to shoal.Run",
        )
    with raised_as(
        CheckpointError,
        given=f"a timeline in {Path(run) / FOLDER}",
        fix=f"use a run directory that you can write to: see ls -ld {run}",
    ):
        return _made(run, wanted)


def _made(run: str, wanted: Window) -> str:
    folder = Path(run) / FOLDER
    found = list(folder.glob(trace_path(folder, "*", wanted).name))
    if found:
        path = merge_traces(run, *wanted)
        return f"{path}: steps {wanted} of {len(found)} rank(s); open it in ui.perfetto.dev"
    history = read_history(run)
    newest = history.latest
    taken = newest.last if newest is not None else 0
    if taken < wanted.first - 1:
        if newest is not None and outcome_of(newest) is not None:
            raise CheckpointError(
                given=f"shoal report {run} --trace {wanted}",
                found=f"the run has ended, and its last step is {taken:,}",
                fix="use steps that it has taken; or record them when it resumes: "
                f"shoal.Run(…, profile=({wanted.first}, {wanted.last}))",
            )
        return _request(Path(run), wanted, taken)
    path = write_coarse_trace(history, wanted)
    few = (wanted.first, min(wanted.last, wanted.first + MOST - 1))
    so_far = f" up to {taken:,}" if taken < wanted.last else ""
    return (
        f"{path}: steps {wanted}{so_far}, coarse, from the events, since there is no profiler record "
        f"of them; for one, use shoal.Run(…, profile={few}). Open it in ui.perfetto.dev"
    )


def _request(run: Path, wanted: Window, taken: int) -> str:
    write_request(run, check_length(wanted, f"shoal report {run} --trace {wanted}"))
    return (
        f"the run is at step {taken:,}; requested a record of steps {wanted}. "
        "Run the same command again when it has taken them"
    )

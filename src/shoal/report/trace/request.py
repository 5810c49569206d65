"""What `shoal report RUN --trace a:b` does: merge, ask for a record, or draw what the events have."""

from __future__ import annotations

from pathlib import Path

from shoal.report.trace.coarse import current_step, read_rank_steps, write_coarse_trace
from shoal.report.trace.merge import merge_traces
from shoal.telemetry.profiler.window import (
    FOLDER,
    MOST,
    Window,
    check_length,
    parse_window,
    trace_path,
    write_request,
)
from shoal.util.errors import CheckpointError


def make_timeline(run: str, steps: str) -> str:
    """Write the timeline of a run's steps "first:last", or ask the run for it; what to tell of it.

    Raises StepError for steps that can't be recorded, CheckpointError for those that are not there.
    """
    wanted = parse_window(steps, f"shoal report {run} --trace {steps}")
    if not (Path(run) / "events").is_dir():
        raise CheckpointError(
            given=f"shoal report {run} --trace {steps}",
            found=f"{run} is no run directory: it has no events",
            fix="the directory that shoal.Run was given",
        )
    try:
        return _made(run, wanted)
    except OSError as error:
        raise CheckpointError(
            given=f"a timeline in {Path(run) / FOLDER}",
            found=str(error),
            fix=f"where you may write: see ls -ld {run}",
        ) from None


def _made(run: str, wanted: Window) -> str:
    folder = Path(run) / FOLDER
    found = list(folder.glob(trace_path(folder, "*", wanted).name))
    if found:
        path = merge_traces(run, *wanted)
        return f"{path}: the steps {wanted} of {len(found)} rank(s); open it in ui.perfetto.dev"
    ranks = read_rank_steps(Path(run))
    taken, over = current_step(ranks)
    if taken < wanted.first - 1:
        if over:
            raise CheckpointError(
                given=f"shoal report {run} --trace {wanted}",
                found=f"the run has ended, and its newest step is {taken:,}",
                fix="steps that it has taken; or before it goes on "
                f"shoal.Run(…, profile=({wanted.first}, {wanted.last}))",
            )
        return _request(Path(run), wanted, taken)
    path = write_coarse_trace(run, *wanted)
    few = (wanted.first, min(wanted.last, wanted.first + MOST - 1))
    so_far = f" as far as {taken:,}" if taken < wanted.last else ""
    return (
        f"{path}: the steps {wanted}{so_far}, coarse, from the events: there is no record of them, "
        f"for which there is shoal.Run(…, profile={few}); "
        "open it in ui.perfetto.dev"
    )


def _request(run: Path, wanted: Window, taken: int) -> str:
    write_request(run, check_length(wanted, f"shoal report {run} --trace {wanted}"))
    return (
        f"the run is at step {taken:,}; it was asked to record the steps {wanted} when it comes to "
        "them. Then give the same command again"
    )

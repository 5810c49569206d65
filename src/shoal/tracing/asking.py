"""What `shoal report RUN --trace a:b` does: merge, ask for a record, or draw what the events have."""

from __future__ import annotations

from pathlib import Path

from shoal.tracing.coarse import coarse, newest, ranks_of
from shoal.tracing.merging import merge
from shoal.tracing.windows import FOLDER, Window, ask, file_of, window


def trace(run: str, steps: str) -> str:
    """The timeline of a run's steps "first:last", or a request for it; what to tell about it.

    Raises StepError for steps that can't be recorded, CheckpointError for those that are not there.
    """
    wanted = window(steps, f"shoal report {run} --trace {steps}")
    folder = Path(run) / FOLDER
    found = list(folder.glob(file_of(folder, "*", wanted).name))
    if found:
        path = merge(run, *wanted)
        return f"{path}: the steps {wanted} of {len(found)} rank(s); open it in ui.perfetto.dev"
    taken = newest(ranks_of(Path(run)))
    if taken < wanted.first - 1:
        return _request(Path(run), wanted, taken)
    path = coarse(run, *wanted)
    return (
        f"{path}: the steps {wanted}, coarse, from the events: nobody recorded them, "
        f"for which there is shoal.Run(…, profile=({wanted.first}, {wanted.last})); "
        "open it in ui.perfetto.dev"
    )


def _request(run: Path, wanted: Window, taken: int) -> str:
    ask(run, wanted)
    return (
        f"the run is at step {taken:,}; it was asked to record the steps {wanted} when it comes to "
        "them. Then give the same command again"
    )

"""Check from a run's events that every sample was consumed exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shoal.telemetry.events import path_of, read_events, steps_by_rank
from shoal.util.errors import CheckpointError


class Coverage(NamedTuple):
    """Sample positions that a run consumed: all up to `end`, minus `missed`, with `repeated` twice.

    A position counts samples since the start of training. Within an epoch it is one sample of the
    dataset.

    Attributes:
        end: First position after all that were consumed.
        missed: Ranges `(start, stop)` of positions below `end` that no rank consumed, `stop` excluded.
        repeated: Ranges `(start, stop)` of positions that were consumed more than once, `stop`
            excluded.
        left_out: Ranges `(start, stop)` of positions of steps that `shoal.BadSteps` skipped, or left
            out after a rollback, `stop` excluded. They count neither as missed nor as repeated.
    """

    end: int
    missed: list[tuple[int, int]]
    repeated: list[tuple[int, int]]
    left_out: list[tuple[int, int]]

    @property
    def exact(self) -> bool:
        """Whether each position was consumed exactly once, or left out."""
        return not self.missed and not self.repeated


def coverage(directory: str | Path, *, step: str | None = None) -> Coverage:
    """Return the sample positions that a run consumed, over all its ranks and attempts.

    The positions come from the events of the run. Steps that a killed attempt took after its last
    checkpoint count once, for the attempt that repeated them.

    Args:
        directory: The run directory.
        step: Name of the Step to check, for runs with several. `None`: the first Step in the events.
            Default: None.

    Returns:
        The end of the consumed positions, with the missed, the repeated and the left-out ranges. The
        end is 0 if the directory has no events.

    Raises:
        CheckpointError: If there is no such directory.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> def loss(output, batch):
        ...     return output.square().sum(), len(output)
        >>> task = shoal.Task(loss, inputs=lambda batch: batch)
        >>> options = dict(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        >>> options |= dict(batch_size=8, epochs=1)
        >>> with TemporaryDirectory() as run:  # doctest: +ELLIPSIS
        ...     result = shoal.train(
        ...         torch.nn.Linear(2, 1), task, torch.ones(8, 2), directory=run, **options
        ...     )
        ...     shoal.coverage(run)
        100 % · step 1 · ...
        Coverage(end=8, missed=[], repeated=[], left_out=[])
    """
    if not Path(directory).is_dir():
        raise CheckpointError(
            given=f"shoal.coverage({str(directory)!r})",
            found="there is no such directory",
            fix="shoal.coverage('runs/first') with the directory of a Run",
        )
    taken = steps_by_rank(Path(directory) / "events")
    name = step if step is not None else next((key for key, _ in taken), "step")
    left_out = _left_out(path_of(directory, 0), name)
    # Ranks that process the same samples, as tensor-parallel ones do, record the same range.
    shares = {
        (number, start, stop)
        for (of, number), ranks in taken.items()
        if of == name
        for event in ranks.values()
        for start, stop in zip(event["share"][::2], event["share"][1::2], strict=True)
        if start < stop and not any(begin <= start < end for begin, end in left_out)
    }
    shares |= {(-1, start, stop) for start, stop in left_out}
    end, missed, repeated = 0, [], []
    for _, start, stop in sorted(shares, key=lambda share: share[1:]):
        if start > end:
            missed.append((end, start))
        if start < end:
            repeated.append((start, min(stop, end)))
        end = max(end, stop)
    return Coverage(end, missed, repeated, left_out)


def _left_out(path: Path, name: str) -> list[tuple[int, int]]:
    """Return the ranges of positions that the events of rank 0 leave out, joined where they touch."""
    found: set[tuple[int, int]] = set()
    resumed = False
    for event in read_events(path) if path.is_file() else ():
        kind, position = event["event"], event.get("position")
        if kind == "start":
            found, resumed = found if resumed else set(), False
        elif kind == "restore" and isinstance(position, int):
            found, resumed = {each for each in found if each[0] < position}, True
        if kind in ("restore", "rollback") or (kind == "bad_step" and event.get("name") == name):
            found |= {(start, stop) for start, stop in event.get("left_out", ())}
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(found):
        if joined and joined[-1][1] >= start:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined

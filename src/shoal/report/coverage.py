"""Check from a run's events that every sample was consumed exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shoal.telemetry.events import steps_by_rank


class Coverage(NamedTuple):
    """Sample positions that a run consumed: all up to `end`, minus `missed`, with `repeated` twice.

    A position counts samples since the start of training. Within an epoch it is one sample of the
    dataset.

    Attributes:
        end: First position after all that were consumed.
        missed: Ranges `(start, stop)` of positions below `end` that no rank consumed, `stop` excluded.
        repeated: Ranges `(start, stop)` of positions that were consumed more than once, `stop`
            excluded.
    """

    end: int
    missed: list[tuple[int, int]]
    repeated: list[tuple[int, int]]

    @property
    def exact(self) -> bool:
        """Whether each position was consumed exactly once."""
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
        The end of the consumed positions, with the missed and the repeated ranges. The end is 0 if the
        directory has no events.

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
        Coverage(end=8, missed=[], repeated=[])
    """
    taken = steps_by_rank(Path(directory) / "events")
    name = step if step is not None else next((key for key, _ in taken), "step")
    # Ranks that process the same samples, as tensor-parallel ones do, record the same range.
    shares = sorted(
        {
            (number, start, stop)
            for (of, number), ranks in taken.items()
            if of == name
            for event in ranks.values()
            for start, stop in zip(event["share"][::2], event["share"][1::2], strict=True)
            if start < stop
        },
        key=lambda share: share[1:],
    )
    end, missed, repeated = 0, [], []
    for _, start, stop in shares:
        if start > end:
            missed.append((end, start))
        if start < end:
            repeated.append((start, min(stop, end)))
        end = max(end, stop)
    return Coverage(end, missed, repeated)

"""Was every sample seen, and only once? What the events of a run say."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shoal.telemetry.events import steps_by_rank


class Coverage(NamedTuple):
    """The positions that a run consumed: up to `end`, but for `missed`, and `repeated` ones twice.

    Each is a list of ranges [start, stop) in samples since the start of training. Within an epoch a
    position is one sample of the dataset.
    """

    end: int
    missed: list[tuple[int, int]]
    repeated: list[tuple[int, int]]

    @property
    def exact(self) -> bool:
        """Whether each position was consumed once and only once."""
        return not self.missed and not self.repeated


def coverage(directory: str | Path, *, step: str | None = None) -> Coverage:
    """What a run consumed, over all its ranks and attempts, by the shares that its events record.

    `directory` is the run's; `step` names one of several Steps, the first unless given. What a killed
    attempt did after its last checkpoint counts as the attempt after it did it.
    """
    taken = steps_by_rank(Path(directory) / "events")
    name = step if step is not None else next((key for key, _ in taken), "step")
    # Ranks that share samples, as tensor-parallel ones do, record the same share.
    shares = sorted(
        {
            (number, *event["share"])
            for (of, number), ranks in taken.items()
            if of == name
            for event in ranks.values()
            if event["share"][0] < event["share"][1]
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

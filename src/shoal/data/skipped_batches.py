"""Batches that a run leaves out: which of the upcoming ones they are, and where epochs end then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.util.errors import DataError


class LeftOutBatch(NamedTuple):
    """The positions [start, stop) of a batch to leave out, and whether it was the last of an epoch."""

    start: int
    stop: int
    ends_epoch: bool


def is_left_out(left_out: Sequence[LeftOutBatch], first: int, size: int) -> bool:
    """Return whether the batch of `size` samples from position `first` on is to be left out.

    Raises DataError if only some of its samples are.
    """
    stop = first + size
    over = sum(max(0, min(each.stop, stop) - max(each.start, first)) for each in left_out)
    if over in (0, size):
        return over > 0
    raise DataError(
        given=f"the batch at samples {first:,} to {stop - 1:,}",
        found=f"after a rollback, the run leaves out {over:,} of its {size:,} samples, which were "
        "batches of another size",
        fix="use the batch_size that the run had at the rollback until these samples have passed",
    )


def ends_epoch(left_out: Sequence[LeftOutBatch], position: int) -> bool:
    """Return whether only batches that are left out follow `position` in its epoch."""
    for each in sorted(left_out):
        if each.start == position:
            if each.ends_epoch:
                return True
            position = each.stop
    return False

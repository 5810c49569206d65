"""Check the offsets between the clocks of the hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypedDict

from shoal.telemetry import clock_offset
from shoal.tools.doctor.findings import CheckResult, RankFacts, describe_ranks, failure, ok, warning
from shoal.util.clock import CLOCK

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_APART = 0.1
_FAR_APART = 60.0


class ClockError(TypedDict):
    """The offset of a rank's clock ahead of rank 0's, and its uncertainty; in seconds."""

    offset: float
    error: float


def measure_clock_offsets(
    store: Store, *, rank: int, asking: Sequence[int], limit: float
) -> ClockError:
    """Return the offset of this rank's clock; rank 0 answers the ranks `asking`, in their order."""
    if rank == 0:
        clock_offset.answer_trips(store, asking, CLOCK.wall_ns, timedelta(seconds=limit))
    elif rank in asking:
        found = clock_offset.ask_offset(store, rank, CLOCK.wall_ns, timedelta(seconds=limit))
        return ClockError(offset=-found.offset / 1e9, error=found.uncertainty / 1e9)
    return ClockError(offset=0.0, error=0.0)


def check_clocks(ranks: Sequence[RankFacts[ClockError]]) -> Iterator[CheckResult]:
    """Yield clocks with a certain offset: files, timelines and certificates depend on them."""
    apart = [one for one in ranks if _certain(one.facts) > _APART]
    for one in apart:
        offset = one.facts["offset"]
        text = (
            f"{describe_ranks([one])} is {abs(offset):.3g} s {'ahead of' if offset > 0 else 'behind'} "
        )
        text += f"rank 0 ({ranks[0].host})"
        fix = f"run chronyc tracking (or ntpq -p, timedatectl) on {one.host}; ask the administrators"
        far = _certain(one.facts) > _FAR_APART
        yield (failure if far else warning)("clock", text, fix)
    if not apart:
        most = max(abs(one.facts["offset"]) + one.facts["error"] for one in ranks)
        yield ok("clock", f"within {1000 * most:.1f} ms of rank 0's on every host")


def _certain(clock: ClockError) -> float:
    return abs(clock["offset"]) - clock["error"]

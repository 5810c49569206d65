"""Virtual ranks: a fixed number of parts of each global batch, on any number of ranks.

Each rank computes consecutive virtual ranks, one micro-batch each. EasyScale (Li et al., SC 2023) calls
them EasyScaleThreads: the work of one rank of a fixed world size.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.distributed.layout import Layout
from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import LayoutError

VIRTUAL_RANKS = 8
"""The default number: each of 1, 2, 4 or 8 ranks computes equally many."""

BITS = "bits"
EXACT = ("rounding", BITS)


class VirtualRanks(NamedTuple):
    """The virtual ranks [start, stop) of `total` that one rank computes."""

    total: int
    start: int
    stop: int


def virtual_ranks_of(rank: int, *, ranks: int, total: int) -> VirtualRanks:
    """Return the virtual ranks of `rank`. The numbers of two ranks differ by at most one."""
    return VirtualRanks(total, rank * total // ranks, (rank + 1) * total // ranks)


def choose_virtual_ranks(
    layout: Layout, rank: int, virtual_ranks: int | None
) -> tuple[VirtualRanks | None, list[Decision[int]]]:
    """Return the virtual ranks of `rank`, and the decision about them; None without exact="bits".

    Raises LayoutError unless the layout is data parallelism over at most as many ranks.
    """
    if virtual_ranks is None:
        return None, []
    size = layout.size
    if layout.degree("replicate") != size:
        raise LayoutError(
            given=f"shoal.init(exact='bits', layout='{layout}')",
            found="only data parallelism sums in an order that does not depend on the number of ranks",
            fix="shoal.init(exact='bits', layout='replicate=-1')",
        )
    if virtual_ranks < size:
        raise LayoutError(
            given=f"shoal.init(exact='bits', virtual_ranks={virtual_ranks}) on {size} ranks",
            found=f"{size - virtual_ranks} rank(s) would have no virtual rank",
            fix=f"start at most {virtual_ranks} ranks; or begin a new run with virtual_ranks={size}",
        )
    reason = "the default" if virtual_ranks == VIRTUAL_RANKS else GIVEN
    decision = Decision(
        what="virtual ranks", value=virtual_ranks, reason=f"{reason}, with exact='bits'"
    )
    return virtual_ranks_of(rank, ranks=size, total=virtual_ranks), [decision]

"""The comparison of the checksums of ranks that hold the same tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DifferingTensor:
    """A tensor that ranks with the same model hold with different values.

    `odd` are the ranks that differ from the majority; without a majority, all ranks that hold it, and
    `outvoted` is False.
    """

    name: str
    odd: tuple[int, ...]
    outvoted: bool


def differing_tensors(
    groups: Sequence[Sequence[int]], ranks: Sequence[Mapping[str, int]]
) -> list[DifferingTensor]:
    """Return the tensors whose checksums differ within a group, in the order of their names.

    `ranks` has the checksums of each rank by name. A tensor that a rank lacks differs.
    """
    found = []
    for group in groups:
        names = dict.fromkeys(name for rank in group for name in ranks[rank])
        for name in names:
            values = {rank: ranks[rank].get(name) for rank in group}
            (usual, most), *rest = Counter(values.values()).most_common()
            if not rest:
                continue
            outvoted = 2 * most > len(group)
            odd = tuple(rank for rank in group if not outvoted or values[rank] != usual)
            found.append(DifferingTensor(name=name, odd=odd, outvoted=outvoted))
    return found

"""The votes of ranks on tensors that must be the same: which rank is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Sums: TypeAlias = Mapping[str, int]
"""The checksums of one computation, by the name of the tensor."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The ranks that have other values than the majority, and the tensors that differ.

    Without a majority, `ranks` are those that differed first or all that hold the tensor, and
    `outvoted` is False.
    """

    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    outvoted: bool


def judge_gradients(first: Mapping[int, Sums], again: Sequence[Sums]) -> Verdict:
    """Return which ranks were wrong about the gradients of the same samples.

    `first` has the differing results of two ranks by rank, and `again` those of a second computation
    on all ranks. The result of more than half of all computations is right.
    """
    results = [*first.items(), *enumerate(again)]
    one, other = first.values()
    tensors = tuple(name for name in one if one[name] != other[name])
    (usual, most), *_ = Counter(tuple(sums.items()) for _, sums in results).most_common()
    if 2 * most <= len(results):
        return Verdict(ranks=tuple(sorted(first)), tensors=tensors, outvoted=False)
    wrong = {rank for rank, sums in results if tuple(sums.items()) != usual}
    return Verdict(ranks=tuple(sorted(wrong)), tensors=tensors, outvoted=True)


def differing_tensors(groups: Sequence[Sequence[int]], ranks: Sequence[Sums]) -> list[Verdict]:
    """Return a verdict for each tensor whose checksums differ within a group, by name.

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
            found.append(Verdict(ranks=odd, tensors=(name,), outvoted=outvoted))
    return found

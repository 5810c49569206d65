"""The vote on gradients that several ranks have computed: which rank was wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Sums: TypeAlias = Mapping[str, int]
"""The checksums of one computation, by the name of the tensor."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The ranks that computed other gradients than the majority, and the tensors that differed.

    Without a majority, `ranks` are the two that differed first, and `outvoted` is False.
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

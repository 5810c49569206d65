"""How evenly the routers of a run use their experts, and whether one has collapsed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.distributed.layout import AXES, Layout
from shoal.tools.report.causes import Finding, join_names
from shoal.tools.report.history import Array, Event, History, integer_in, text_in
from shoal.util.errors import LayoutError
from shoal.util.units import percent

COLLAPSED = 0.5
"""Part of the experts from which on down the effective number of experts is a collapse."""
_MOST = 1 << 20
"""More experts than any layer has."""


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """The choices of one router in the last interval that all its ranks have recorded, up to a step.

    `tokens` are the choices by expert, over all ranks, and `dropped` those of no expert. `imbalance` is
    the number of tokens of the rank that computes most, divided by the mean; None if each rank has all
    experts.
    """

    layer: str
    step: int
    tokens: tuple[int, ...]
    dropped: int
    imbalance: float | None

    @property
    def busiest(self) -> float:
        """The fraction of the choices that the most chosen expert has."""
        return max(self.tokens) / max(1, sum(self.tokens))

    @property
    def idle(self) -> int:
        """The number of experts without any choice."""
        return self.tokens.count(0)

    @property
    def dropped_share(self) -> float:
        """The fraction of the choices that were dropped."""
        return self.dropped / max(1, sum(self.tokens) + self.dropped)

    @property
    def effective(self) -> float:
        """The effective number of experts: the exponential of the entropy of their fractions.

        It is the number of experts if all get the same number of tokens, and 1 if one gets all.
        """
        fractions = np.array([count for count in self.tokens if count]) / max(1, sum(self.tokens))
        return math.exp(-float((fractions * np.log(fractions)).sum()))

    @property
    def used(self) -> float:
        """The effective number of experts divided by their number."""
        return self.effective / len(self.tokens)

    @property
    def collapsed(self) -> bool:
        """Whether the effective number of experts is at most half of their number."""
        return len(self.tokens) > 1 and any(self.tokens) and self.used <= COLLAPSED * (1 + 1e-9)


def expert_loads(history: History) -> list[ExpertLoad]:
    """Return the load of each module of experts in the last attempt, in the order of the model."""
    attempt = history.latest
    if attempt is None:
        return []
    counts: dict[tuple[str, str], dict[int, dict[int, Array]]] = {}
    for (rank, name), events in attempt.experts.items():
        for event in events:
            step = integer_in(event, "step") or 0
            for layer, numbers in _layers(event):
                counts.setdefault((name, layer), {}).setdefault(rank, {})[step] = numbers
    several = len({name for name, _ in counts}) > 1
    layout = text_in(next(iter(attempt.starts.values()), {}), "layout")
    found = []
    for (name, layer), ranks in counts.items():
        common = set.intersection(*map(set, ranks.values()))
        if not common:
            continue
        step = max(common)
        last = {rank: steps[step] for rank, steps in ranks.items()}
        if len({len(numbers) for numbers in last.values()}) > 1:
            continue
        *tokens, dropped = map(int, np.sum([*last.values()], axis=0))
        found.append(
            ExpertLoad(
                layer=f"{name}: {layer}" if several else layer,
                step=step,
                tokens=tuple(tokens),
                dropped=dropped,
                imbalance=_imbalance(last, layout),
            )
        )
    return found


def _layers(event: Event) -> Iterator[tuple[str, Array]]:
    layers = event.get("layers")
    for layer, numbers in layers.items() if isinstance(layers, Mapping) else ():
        valid = isinstance(numbers, list) and 1 < len(numbers) < _MOST
        if valid and all(type(each) is int and 0 <= each < 1 << 53 for each in numbers):
            yield str(layer)[:200], np.array(numbers)


def _imbalance(counts: Mapping[int, Array], layout: str) -> float | None:
    """Return the largest number of tokens of a rank divided by the mean."""
    try:
        axes = Layout.parse(layout)
    except LayoutError:
        return None
    degree = axes.degree("expert")
    experts = len(next(iter(counts.values()))) - 1
    if not 1 < degree <= experts or experts % degree:
        return None
    loads: dict[tuple[int, ...], Array] = {}
    for rank, numbers in counts.items():
        group = tuple(axes.coordinate(rank, axis) for axis in AXES if axis != "expert")
        loads[group] = loads.get(group, 0) + numbers[:-1].reshape(degree, -1).sum(1)
    every = np.concatenate([*loads.values()])
    return float(every.max() / every.mean()) if every.any() else None


def collapsed_routers(history: History) -> Iterator[Finding]:
    """Yield a finding if routers of the last attempt have collapsed."""
    collapsed = [load for load in expert_loads(history) if load.collapsed]
    found = sorted(collapsed, key=lambda load: load.used)
    if found:
        yield Finding(f"{_collapse(found)}.", _ADVICE)


def _collapse(found: Sequence[ExpertLoad]) -> str:
    worst = found[0]
    names = join_names([each.layer for each in found])
    who = f"The router of {names} has" if len(found) == 1 else f"The routers of {names} have"
    of = "" if len(found) == 1 else f" of {worst.layer}"
    return (
        f"{who} collapsed: up to step {worst.step:,}, the load{of} is that of {worst.effective:.2g} "
        f"of {len(worst.tokens)} experts; the busiest got {percent(worst.busiest)} of the tokens, and "
        f"{worst.idle} got none"
    )


_ADVICE = (
    "add shoal.BalanceLoss to the loss, with a larger factor if it is there, or a z-loss; or choose "
    "experts by shoal.BalancingBias"
)

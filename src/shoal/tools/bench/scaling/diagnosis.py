"""The causes of imperfect scaling, with the time that each costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.tools.bench.scaling.aggregate import SHOWN, ScalingPoint
from shoal.tools.bench.scaling.configurations import ScalingCurve
from shoal.util.grouping import group_by
from shoal.util.units import counted

LEAST = 0.01
"""Minimum fraction of a step for a cause to be reported."""
TOLD = 4
"""Maximum number of causes in a sentence."""
COLLECTIVES = {"ddp": "exposed all-reduce", "fsdp": "exposed all-gather and reduce-scatter"}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause and its cost as a fraction of the step beyond perfect scaling; a gain if negative.

    `spread` is the range of the fraction over the rounds; 0 for one round.
    """

    share: float
    text: str
    spread: float = 0.0

    @property
    def clear(self) -> bool:
        """Whether it is large enough for a sentence: above the spread, and at least 1 %."""
        return abs(self.share) >= max(LEAST, self.spread)


def find_causes(row: ScalingPoint, base: ScalingPoint) -> list[Cause]:
    """Return the causes of the time beyond that of perfect scaling, greatest first.

    With perfect scaling each part would take its time at the base, times the ratio of the process's
    batch now and there. The excesses of all parts, divided by the time of the step, add up to the loss.
    """
    if row.parts is None or base.parts is None:
        return []
    here, there = row.configuration, base.configuration
    work = here.batch / here.processes * there.processes / there.batch
    excess = _excess(row.parts, base.parts, work)
    rounds = [
        _excess(parts, base.rounds.get(number, base.parts), work)
        for number, parts in row.rounds.items()
    ]
    found = []
    for part, share in excess.items():
        shares = [each.get(part, 0.0) for each in rounds] or [share]
        spread = max(shares) - min(shares)
        found.append(Cause(share=share, text=_text(part, share, row, work), spread=spread))
    return sorted(found, key=lambda cause: -cause.share)


def _excess(parts: Mapping[str, float], base: Mapping[str, float], work: float) -> dict[str, float]:
    """Return the fractions of the step above perfect scaling by part, with computing as one part."""
    total = sum(parts.values())
    if not total:
        return {}
    excess = {part: (parts[part] - work * base.get(part, 0.0)) / total for part in parts}
    excess["compute"] = excess.pop("forward", 0.0) + excess.pop("backward", 0.0)
    return excess


def describe_scaling(row: ScalingPoint, base: ScalingPoint) -> str:
    """Return `2 processes give 1.61x (81 %): 14 % exposed all-reduce, 4 % waiting for rank 1`."""
    many = counted(row.processes, "process", "es")
    if row.speedup is None or row.efficiency is None:
        return f"{many} failed: {row.reason}"
    what = f"{many} give {row.speedup.median:.2f}x"
    if base.processes > 1:
        what += f" of {base.processes}"
    what += f" ({row.efficiency.median:.0%})".replace("%", " %")
    clear = [cause for cause in find_causes(row, base) if cause.clear]
    told = [cause for cause in clear if cause.share > 0][:TOLD]
    won = [cause for cause in clear if cause.share < 0]
    parts = [f"{cause.share * 100:.0f} % {cause.text}" for cause in told]
    parts += [f"{-cause.share * 100:.0f} % gained in {cause.text}" for cause in reversed(won)]
    above = "above the spread of the rounds" if len(row.rounds) > 1 else "above 1 %"
    return f"{what}: " + (", ".join(parts) or f"no loss {above}")


def diagnose_curves(rows: Sequence[ScalingPoint]) -> list[tuple[ScalingCurve, str]]:
    """Return a sentence for each curve, on its largest number of processes that ran or failed."""
    found = []
    for curve, own in group_by(rows, lambda row: row.curve).items():
        base = next((row for row in own if row.rate is not None), None)
        if base is None:
            found.append((curve, f"no job succeeded: {own[-1].reason}"))
            continue
        last = [row for row in own if row.rate is not None][-1]
        text = describe_scaling(last, base) if last is not base else _alone(base)
        failed = [row for row in own if row.rate is None]
        text += "".join(f"; {describe_scaling(row, base)}" for row in failed)
        found.append((curve, text))
    return found


def curve_labels(curves: Sequence[ScalingCurve]) -> Mapping[ScalingCurve, str]:
    """Return labels with the differences of the curves: `strong, gloo`."""
    fields = ("scaling", "backend", "strategy", "precision", "way")
    differ = [name for name in fields if len({getattr(curve, name) for curve in curves}) > 1]
    return {
        curve: ", ".join(getattr(curve, name) for name in differ or ["scaling"]) for curve in curves
    }


def _alone(base: ScalingPoint) -> str:
    """Return the parts of a step for a curve with a single size, without a comparison."""
    parts = base.parts or {}
    total = sum(parts.values())
    shares = sorted(((value / total, part) for part, value in parts.items() if total), reverse=True)
    told = ", ".join(f"{share * 100:.0f} % {SHOWN[part]}" for share, part in shares if share >= LEAST)
    return f"{counted(base.processes, 'process', 'es')}, without a comparison: {told}"


def _text(part: str, share: float, row: ScalingPoint, work: float) -> str:
    if share < 0:  # a gain needs no explanation
        return "forward and backward" if part == "compute" else SHOWN[part]
    crowded = [note for note in row.notes if note.startswith("more processes")]
    if part == "communication":
        return COLLECTIVES.get(row.configuration.strategy, SHOWN[part])
    if part == "waiting":
        if row.blame is None:
            return "waiting for a different late rank in each step"
        where = f" ({SHOWN[row.blame.part]})"
        return f"waiting for rank {row.blame.rank} on {row.blame.host}{where}"
    if part == "compute":
        return "forward and backward" + (f" ({crowded[0].partition(':')[0]})" if crowded else "")
    if part == "update" and work < 1 and row.configuration.strategy == "ddp":
        return "optimizer (the same work on each rank)"
    return SHOWN[part]

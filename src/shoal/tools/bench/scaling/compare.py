"""The causes of imperfect scaling, with the time that each costs; and a comparison of two studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.tools.bench.scaling import format
from shoal.tools.bench.scaling.aggregate import SHOWN, ScalingPoint, Spread, scaling_points
from shoal.tools.bench.scaling.configurations import ScalingCurve, throughput_unit
from shoal.tools.bench.scaling.directory import Study
from shoal.tools.bench.scaling.format import line_figure, parts_figure, spread_lines
from shoal.util.document import Document, Figure, Section, Table, Text, to_plain
from shoal.util.errors import LaunchError
from shoal.util.grouping import group_by
from shoal.util.units import counted, three_digits

LEAST = 0.01
"""Minimum fraction of a step for a cause or a part to be reported."""
MENTIONED = 4
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
    told = [cause for cause in clear if cause.share > 0][:MENTIONED]
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


MUST = {"model": "the model", "batch": "the batch size", "args": "the script's arguments"}
"""Options that must be the same."""
TOLD = 3


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same configuration in both studies.

    `ratio` is the second's throughput divided by the first's. Its bounds are the extremes over all
    pairs of repeats, since the studies have no rounds in common.
    """

    first: ScalingPoint
    second: ScalingPoint
    ratio: Spread

    @property
    def curve(self) -> ScalingCurve:
        """The curve in both."""
        return self.second.curve

    @property
    def clear(self) -> bool:
        """Whether every repeat of one was faster than every repeat of the other."""
        return not self.ratio.low <= 1 <= self.ratio.high


def require_same_work(first: Study, second: Study) -> None:
    """Raise LaunchError with the differences if the studies did different work."""
    before, after = to_plain(first.options), to_plain(second.options)
    differ = [
        f"{text}: {before[name]!r} and {after[name]!r}"
        for name, text in MUST.items()
        if before[name] != after[name]
    ]
    if differ:
        raise LaunchError(
            given=f"shoal bench compare {first.path} {second.path}",
            found="the studies did different work, so their rates can't be compared: "
            + "; ".join(differ),
            fix=f"run shoal bench scaling {first.options.model} --batch {first.options.batch} … for "
            "both",
        )


def study_differences(first: Study, second: Study) -> list[str]:
    """Return other differences of the studies: machines, versions, threads, steps."""
    found = [
        f"{name}: {first.machine.get(name, '?')} and {second.machine.get(name, '?')}"
        for name in dict.fromkeys((*first.machine, *second.machine))
        if first.machine.get(name) != second.machine.get(name)
    ]
    before, after = to_plain(first.options), to_plain(second.options)
    known = ("threads", "steps", "warmup", "rounds")
    found += [
        f"{name}: {before[name]} and {after[name]}" for name in known if before[name] != after[name]
    ]
    return found


def match_studies(first: Study, second: Study) -> list[Pair]:
    """Return the pairs that both have measured. Raises LaunchError if there are none."""
    require_same_work(first, second)
    before, after = (
        scaling_points(first.options, first.repeats()),
        scaling_points(second.options, second.repeats()),
    )
    found = match_points(before, after)
    if not found:
        raise LaunchError(
            given=f"shoal bench compare {first.path} {second.path}",
            found=f"no configuration was measured by both: {_told(before)}; {_told(after)}",
            fix="use the same -n, --scaling, --backends, --strategies, --precisions and --ways for "
            "both",
        )
    return found


def match_points(before: Sequence[ScalingPoint], after: Sequence[ScalingPoint]) -> list[Pair]:
    """Return the pairs of rows with the same curve and number of processes that ran in both."""
    known = {(row.curve, row.processes): row for row in before if row.rate is not None}
    found = []
    for row in after:
        other = known.get((row.curve, row.processes))
        if other is None or row.rate is None or other.rate is None:
            continue
        ratio = Spread(
            median=row.rate.median / other.rate.median,
            low=row.rate.low / other.rate.high,
            high=row.rate.high / other.rate.low,
        )
        found.append(Pair(first=other, second=row, ratio=ratio))
    return found


def largest_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pair of each curve with the most processes."""
    by_curve = group_by(pairs, lambda pair: pair.curve).values()
    return [max(own, key=lambda pair: pair.second.processes) for own in by_curve]


def describe_pair(pair: Pair, first: str, second: str) -> str:
    """Return `octo gives 1.25x of quad at 4 processes: 12 ms less forward, 3 ms less optimizer`."""
    many = counted(pair.second.processes, "process", "es")
    what = f"{second} gives {pair.ratio.median:.2f}x of {first} at {many}"
    if not pair.clear:
        what += f" ({pair.ratio.low:.2f} to {pair.ratio.high:.2f}, so no clear difference)"
    before, after = pair.first.parts or {}, pair.second.parts or {}
    changes = {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}
    great = sorted(changes.items(), key=lambda item: -abs(item[1]))[:TOLD]
    told = [
        f"{three_digits(abs(seconds) * 1e3)} ms {'more' if seconds > 0 else 'less'} {SHOWN[part]}"
        for part, seconds in great
        if abs(seconds) >= max(LEAST * pair.first.mean, _scatter(pair, part))
    ]
    return what + (": " + ", ".join(told) if told and pair.clear else "")


def _scatter(pair: Pair, part: str) -> float:
    """Return the range of a part over the rounds of both studies, in seconds."""
    found = 0.0
    for row in (pair.first, pair.second):
        values = [parts.get(part, 0.0) for parts in row.rounds.values()]
        found += max(values, default=0.0) - min(values, default=0.0)
    return found


def _told(rows: Sequence[ScalingPoint]) -> str:
    return " and ".join(dict.fromkeys(f"{row.curve} on {row.processes}" for row in rows)) or "nothing"


def compare_document(first: Study, second: Study) -> Document:
    """Return the comparison of two studies.

    Raises LaunchError if they did different work, or have no configuration in common.
    """
    pairs = match_studies(first, second)
    called = first.path.resolve().name, second.path.resolve().name
    if called[0] == called[1]:
        called = str(first.path), str(second.path)
    word, each = throughput_unit(first.options.subject)
    names = curve_labels(list(dict.fromkeys(pair.curve for pair in pairs)))
    verdict, *rest = (
        f"{names[pair.curve]}: {describe_pair(pair, *called)}." for pair in largest_pairs(pairs)
    )
    differences = [Text(text=f"{line}.") for line in study_differences(first, second)]
    if differences:
        differences = [Text(text="The studies differ in:", only="terminal"), *differences]
    return Document(
        title=f"{called[0]} and {called[1]}: {first.options.model}",
        verdict=verdict,
        about="shoal bench compare",
        sections=[
            Section(
                heading="Ratios",
                blocks=[*(Text(text=text) for text in rest), _ratios(pairs, names, called, word, each)],
            ),
            Section(heading="Throughput", blocks=_overlaid(pairs, names, called, word, each)),
            Section(heading="Where a step's time goes", blocks=[_beside(pairs, names, called)]),
            Section(
                heading="Differences",
                blocks=differences or [Text(text="None known.", only="page")],
            ),
        ],
    )


def _ratios(
    pairs: Sequence[Pair],
    names: Mapping[ScalingCurve, str],
    called: tuple[str, str],
    word: str,
    each: int,
) -> Table:
    head = ("curve", "n", *(f"{name} {word}/s" for name in called), "ratio")
    rows = [
        (
            names[pair.curve],
            str(pair.second.processes),
            *(format.format_spread(row.rate, each) for row in (pair.first, pair.second) if row.rate),
            format.format_range(pair.ratio, 1),
        )
        for pair in pairs
    ]
    caption = (
        f"{called[1]} by {called[0]}: throughput on n processes, and its ratio (lowest to highest)"
    )
    return Table(caption=caption, head=head, rows=rows, right=head[1:])


def _overlaid(
    pairs: Sequence[Pair],
    names: Mapping[ScalingCurve, str],
    called: tuple[str, str],
    word: str,
    each: int,
) -> list[Figure]:
    found = []
    for scaling, own in group_by(pairs, lambda pair: pair.curve.scaling).items():
        curves: dict[str, list[ScalingPoint]] = {}
        for pair in own:
            for name, row in zip(called, (pair.first, pair.second), strict=True):
                curves.setdefault(f"{name}: {names[pair.curve]}", []).append(row)
        caption = f"{word.capitalize()} per second against processes, {scaling} scaling."
        lines = spread_lines(curves, lambda row: row.rate, each)
        found.append(line_figure(f"compared-{scaling}", caption, lines, f"{word}/s"))
    return found


def _beside(
    pairs: Sequence[Pair], names: Mapping[ScalingCurve, str], called: tuple[str, str]
) -> Figure:
    labelled = {
        f"{pair.second.processes} {names[pair.curve]}: {name}": row
        for pair in pairs
        for name, row in zip(called, (pair.first, pair.second), strict=True)
    }
    return parts_figure("compared-parts", labelled, "Milliseconds of a step by part, side by side.")

"""The tables of a report, as strings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shoal.tools.report import (
    LABELS,
    SHOWN,
    Attempt,
    AttemptProfile,
    BottleneckReport,
    History,
)
from shoal.tools.report.attempts import (
    compute_rates,
    describe_outcome,
    has_changed,
    last_kept_steps,
    list_saves,
    list_splits,
)
from shoal.tools.report.experts import expert_loads
from shoal.util.clock import CLOCK, local_time
from shoal.util.document import Table
from shoal.util.grouping import group_by
from shoal.util.units import age, bandwidth, duration, percent, size

MOST = 64
"""Maximum number of rows of a table of ranks; of more ranks the slowest are shown."""
_MOST_LINES = 16
_MAIN_PARTS = {
    "computing": ("forward", "backward", "update"),
    "comm.": ("communication",),
    "waiting": ("waiting",),
    "data": ("wait", "transfer"),
    "rest": ("checkpoint", "evaluation", "other"),
}
_VERSIONS = ("shoal", "torch", "python", "device", "device_name", "launcher")
_SETTINGS = ("layout", "strategy", "precision", "parameters", "batch_size", "epoch_size")


def key_facts(history: History, verdict: BottleneckReport) -> list[tuple[str, str]]:
    """Return the key numbers at the top of the page."""
    latest = history.latest
    if latest is None:
        return []
    found = [
        ("state", describe_outcome(latest, last=True, now=CLOCK.wall())),
        ("step", f"{latest.last:,}"),
    ]
    hosts = {host for rank in latest.ranks if (host := latest.host(rank)) is not None}
    on = f" on {len(hosts)} host{'s' * (len(hosts) != 1)}" if hosts else ""
    found.append(("ranks", f"{latest.size}{on}"))
    if verdict.judged:
        rate = compute_rates(verdict.judged[-1].attempt, verdict.judged[-1].profile)
        found.append(("steady step time", duration(rate.step)))
        found.append(("steady samples/s", f"{rate.samples:,.4g}"))
        if rate.counted is not None and abs(rate.counted - rate.samples) > 1e-3 * rate.samples:
            found.append(("counted per second", f"{rate.counted:,.4g}"))
        if rate.mfu is not None and rate.peak is not None:
            found.append(("MFU", f"{percent(rate.mfu)} of {rate.peak / 1e12:.3g} TFLOP/s"))
    memory = peak_memory(latest)
    if memory > 0:
        found.append(("peak memory", size(int(memory))))
    joules = sum(
        _largest(rows.all["energy"]) for one in history.attempts for rows in one.usage.values()
    )
    if joules > 0:
        found.append(("device energy", f"{joules / 3.6e6:.3g} kWh"))
    began = min(attempt.began for attempt in history.attempts)
    if began > 0:
        found.append(("since the first start", age(latest.seen - began)))
    if len(history.attempts) > 1:
        found.append(("starts", str(len(history.attempts))))
    return found


def peak_memory(attempt: Attempt) -> float:
    """Return the largest peak of all ranks in bytes: of devices, or of processes without devices."""
    found = (rows.all for rows in attempt.usage.values())
    return max((_device_memory(rows) or _largest(rows["rss"]) for rows in found), default=0.0)


def _device_memory(rows: Any) -> float:
    return max(_largest(rows["device_peak"]), _largest(rows["device_memory"]))


def _largest(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else 0.0


def parts_table(one: AttemptProfile) -> Table:
    """Return the time of a step by part: over all ranks, and on the ranks with least and most."""
    found = one.profile
    means = found.average(found.mean)
    wall = found.seconds
    rows = []
    for part, values in zip(SHOWN, means, strict=True):
        if not values.max() > 0:
            continue
        least, most = int(values.argmin()), int(values.argmax())
        rows.append(
            [
                LABELS[part],
                duration(float(values.mean())),
                percent(float(values.mean()) / wall) if wall > 0 else "",
                f"{duration(float(values[least]))} (rank {found.ranks[least]})",
                f"{duration(float(values[most]))} (rank {found.ranks[most]})",
            ]
        )
    rows.append(["total", duration(wall), "100 %", "", ""])
    return Table(
        caption=f"A step, {_steps(one)}, mean of {len(found.ranks)} ranks",
        head=["part", "time", "share", "least", "most"],
        rows=rows,
        right=["time", "share", "least", "most"],
    )


def _steps(one: AttemptProfile) -> str:
    first, last = int(one.profile.first[0]), int(one.profile.last[-1])
    return f"from {first:,} to {last:,}"


def ranks_to_show(one: AttemptProfile, most: int = MOST) -> list[int]:
    """Return the ranks to show, in order: all, or those that waited least for others."""
    found = one.profile
    if len(found.ranks) <= most:
        return list(found.ranks)
    waiting = found.average(found.mean[SHOWN.index("waiting")])
    return sorted(found.ranks[place] for place in np.argsort(waiting, kind="stable")[:most])


def rank_tables(one: AttemptProfile) -> list[Table]:
    """Return the time of a step by rank and part, in milliseconds; in few columns for a terminal."""
    there = [part for part in SHOWN if one.profile.mean[SHOWN.index(part)].max() > 0]
    whole = _rank_table(one, {LABELS[part]: (part,) for part in there} | {"all": SHOWN}, MOST)
    short = _rank_table(one, _MAIN_PARTS, _MOST_LINES)
    single = len(one.profile.ranks) == 1
    return [
        replace(whole, only="page"),
        replace(short, only="terminal", rows=[] if single else short.rows),
    ]


def _rank_table(one: AttemptProfile, groups: Mapping[str, Sequence[str]], most: int) -> Table:
    shown, ranks = ranks_to_show(one, most), one.profile.ranks
    of = "" if len(shown) == len(ranks) else f": the {len(shown)} of {len(ranks)} that waited least"
    rows = []
    for rank in shown:
        times = one.profile.of_rank(rank)
        sums = (sum(times[part] for part in parts) for parts in groups.values())
        rows.append([str(rank), one.attempt.host(rank) or "", *(f"{1e3 * each:.3g}" for each in sums)])
    return Table(
        caption=f"Milliseconds per step, by rank{of}",
        head=["rank", "host", *groups],
        rows=rows,
        right=["rank", *groups],
    )


def describe_unreadable(history: History) -> str:
    """Return a sentence with the number of unreadable lines."""
    lines = "1 line" if history.skipped == 1 else f"{history.skipped:,} lines"
    return f"{lines} of the events could not be read, as after a kill, and were skipped."


def stragglers_table(verdict: BottleneckReport) -> Table:
    """Return the ranks that were slower than the others: part, steps, excess and cost."""
    wall = {one.attempt.began: one.profile.seconds for one in verdict.judged}
    rows = [
        [
            str(each.rank),
            each.host or "",
            LABELS[each.part],
            f"{each.since:,}",
            f"{each.until:,}" if each.until is not None else "",
            duration(each.usual),
            f"+ {duration(each.excess)}",
            percent(each.cost / wall[each.attempt]) if wall[each.attempt] > 0 else "",
        ]
        for each in verdict.stragglers
    ]
    return Table(
        caption="Ranks that are slower than the others, and their cost to all ranks",
        head=["rank", "host", "part", "since step", "until step", "others", "this one", "cost"],
        rows=rows,
        right=["rank", "since step", "until step", "others", "this one", "cost"],
    )


def splits_table(history: History) -> Table:
    """Return how batches were split by measured speed; no rows if they never were."""
    splits = list_splits(history)
    rows = [
        [
            f"{each.step:,}",
            ", ".join(map(str, each.samples[:MOST])),
            "" if each.predicted is None else f"{each.predicted:.2f} x",
            "" if each.speed is None else f"{each.speed:,.4g}",
            "" if each.gained is None else f"{each.gained:.2f} x",
        ]
        for each in splits
    ]
    numbers = ["from step", "predicted", "samples per second", "of the equal split"]
    return Table(
        caption="Samples of each rank in a full batch, by measured speed",
        head=[numbers[0], "samples by rank", *numbers[1:]],
        rows=rows if has_changed(splits) else [],
        right=numbers,
    )


def collectives_table(attempt: Attempt) -> Table:
    """Return the traffic: sums of all ranks by kind, group and backend; bandwidths of the slowest."""
    rows = []
    for key, found in sorted(group_by(attempt.traffic.items(), lambda item: item[0][1]).items()):
        kind, group, ranks, backend = key
        each, count = [traffic for _, traffic in found], len(found)
        rows.append(
            [
                kind,
                group,
                str(ranks),
                backend,
                f"{sum(one.calls for one in each) // count:,}",
                size(int(sum(one.bytes for one in each) / count)),
                duration(sum(one.seconds for one in each) / count),
                bandwidth(max(one.algorithm for one in each)),
                bandwidth(max(one.bus for one in each)),
                "exact" if all(one.exact for one in each) else "estimated",
            ]
        )
    bandwidths = ["algorithm", "bus"]
    return Table(
        only="page",
        caption="Collectives per rank: mean of all ranks; bandwidth of the rank that came last",
        head=["kind", "group", "ranks", "backend", "calls", "bytes", "time", *bandwidths, "times are"],
        rows=rows,
        right=["ranks", "calls", "bytes", "time", *bandwidths],
    )


def experts_table(history: History) -> Table:
    """Return how evenly routers use their experts; no rows if the model has none."""
    loads = expert_loads(history)
    rows = [
        [
            each.layer,
            str(len(each.tokens)),
            percent(each.busiest, tenths=True),
            str(each.idle),
            f"{each.effective:.3g}",
            "" if each.imbalance is None else f"{each.imbalance:.2f} x",
            percent(each.dropped_share, tenths=True) if each.dropped else "",
        ]
        for each in sorted(loads, key=lambda load: load.used)[:MOST]
    ]
    of = f", the {MOST} of {len(loads)} layers with the most uneven load" if len(loads) > MOST else ""
    numbers = ["experts", "busiest", "idle", "effective", "busiest rank", "dropped"]
    return Table(
        caption=f"Tokens of experts, last interval up to step {loads[-1].step:,}{of}" if loads else "",
        head=["layer", *numbers],
        rows=rows,
        right=numbers,
    )


def usage_table(attempt: Attempt) -> Table:
    """Return memory, power and cores of each rank."""
    rows = []
    for rank, held in sorted(attempt.usage.items())[:MOST]:
        seen = held.all
        rows.append(
            [
                str(rank),
                attempt.host(rank) or "",
                _size(_largest(seen["rss"])),
                _size(_device_memory(seen)),
                _mean(seen["power"], "{:.3g} W"),
                f"{_largest(seen['energy']) / 3.6e6:.3g} kWh" if _largest(seen["energy"]) else "",
                _mean(seen["utilization"], "{:.0%}"),
                _mean(seen["cpu"], "{:.2g}"),
            ]
        )
    head = ["rank", "host", "process", "device", "power", "energy", "device in use", "cores in use"]
    return Table(
        only="page",
        caption="Peak memory; mean power and use",
        head=head,
        rows=rows,
        right=["rank", *head[2:]],
    )


def _size(count: float) -> str:
    return size(int(count)) if count > 0 else ""


def _mean(values: Any, form: str) -> str:
    finite = values[np.isfinite(values)]
    return form.format(float(finite.mean())) if len(finite) else ""


def saves_table(history: History) -> Table:
    """Return the saves of all attempts: the time that they blocked training, and their duration."""
    rows = [
        [
            f"{each.step:,}",
            duration(each.blocked) if each.ranks else "",
            duration(each.seconds) if each.ranks else "",
            attempt.place(each.slowest) if each.ranks else "",
            _size(each.bytes),
            each.error or "committed",
        ]
        for attempt in history.attempts
        for each in list_saves(attempt)
    ]
    return Table(
        only="page",
        caption="Saves" if len(rows) <= MOST else f"The last {MOST} of {len(rows):,} saves",
        head=["step", "training blocked", "took", "longest at", "bytes", "outcome"],
        rows=rows[-MOST:],
        right=["step", "training blocked", "took", "bytes"],
    )


def attempts_table(history: History, verdict: BottleneckReport) -> Table:
    """Return the attempts: start, ranks, steps and end of each."""
    judged = {one.attempt.began: one for one in verdict.judged}
    rows = []
    for attempt, last in last_kept_steps(history):
        one = judged.get(attempt.began)
        again = attempt.last - last
        rows.append(
            [
                _when(attempt.began),
                str(attempt.size),
                f"{attempt.first:,} to {attempt.last:,}" if attempt.steps else "none",
                f"{again:,}" if again else "",
                f"{one.warm_up} ({duration(one.warm_up_seconds)})" if one is not None else "",
                describe_outcome(attempt, last=attempt is history.latest, now=CLOCK.wall()),
            ]
        )
    return Table(
        caption="Attempts of the run",
        head=["began", "ranks", "steps", "repeated", "warm-up", "end"],
        wide=["warm-up"],
        rows=rows,
        right=["ranks", "steps", "repeated", "warm-up"],
    )


def describe_speed(one: AttemptProfile) -> str:
    """Return the FLOPS of each rank and the fraction of the peak; empty if unknown."""
    rate = compute_rates(one.attempt, one.profile)
    if rate.flops is None:
        return ""
    text = f"Each rank computes {rate.flops / 1e12:.3g} TFLOP/s"
    if rate.mfu is not None and rate.peak is not None:
        text += f", {percent(rate.mfu)} of {rate.peak / 1e12:.3g} TFLOP/s ({_cut(rate.peak_reason)})"
    return text + "."


def _when(seconds: float) -> str:
    try:
        return local_time(seconds) if seconds > 0 else "unknown"
    except (OverflowError, ValueError, OSError):
        return "unknown"


def placement_table(attempt: Attempt) -> Table:
    """Return the host, device and versions of each rank of the last attempt."""
    rows = []
    for rank in attempt.ranks[:1024]:
        start = attempt.starts.get(rank, {})
        said = (start.get(name, "") for name in ("device", "device_name", "cores", "pid", "torch"))
        rows.append([str(rank), attempt.host(rank) or "", *(_cut(str(each)) for each in said)])
    head = ["rank", "host", "device", "device name", "cores", "process", "torch"]
    return Table(
        only="page",
        caption="Ranks and hosts",
        head=head,
        rows=rows,
        right=["rank", "cores", "process"],
    )


def settings_table(attempt: Attempt) -> Table:
    """Return versions and configuration, as the first rank has recorded them."""
    start: Mapping[str, Any] = next(iter(attempt.starts.values()), {})
    rows = [[name, _plain(start[name])] for name in (*_SETTINGS, *_VERSIONS) if name in start]
    rows += [[f"config {name}", text] for name, text in _flat(start.get("config"))]
    return Table(only="page", caption="Configuration and versions", head=["name", "value"], rows=rows)


def _flat(tree: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and len(prefix) < 200:
        for name, value in list(tree.items())[:500]:
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix, _plain(tree)


def _plain(value: object) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if type(value) is int and value >= 10_000 else _cut(text)


def _cut(text: str, most: int = 500) -> str:
    return text if len(text) <= most else f"{text[:most]}…"

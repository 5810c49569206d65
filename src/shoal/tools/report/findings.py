"""Findings about a run, the costliest first, with advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shoal.tools.report.advice import losses
from shoal.tools.report.breakdown import COMPUTING, LABELS
from shoal.tools.report.causes import AttemptProfile, Costs, Culprit, Finding, culprit_of, rank_names
from shoal.tools.report.history import Event, History, integer_in, number_in, text_in
from shoal.tools.report.stragglers import Straggler
from shoal.util.grouping import group_by
from shoal.util.units import duration


def list_findings(
    history: History,
    shares: Mapping[str, float],
    named: list[Straggler],
    costs: Costs,
    judged: list[AttemptProfile],
) -> list[Finding]:
    """Return all findings, the costliest first; findings without a cost come last.

    A loss below the threshold of a finding is reported nevertheless if it costs more than the costliest
    of the others.
    """
    found = list(_slow_ranks(named, costs))
    small: list[Finding] = []
    for loss, large in losses(history, shares, named, costs, judged):
        (found if large else small).append(loss)
    most = max((each.cost for each in found), default=1.0)
    found += [each for each in small if each.cost > most]
    found.sort(key=lambda each: -each.cost)
    corrupt = _corruptions(history)
    planned = _planned(history)
    return [*corrupt, *found, *planned, *unread_findings(history), *_left_out(history, judged[-1])]


def _planned(history: History) -> Iterator[Finding]:
    """Yield the step time of the newest attempt that ended with a plan, and the planned one."""
    said = [event for attempt in history.attempts for _, event in attempt.said("plan")]
    ended = [event for event in said if number_in(event, "measured_seconds") is not None]
    if not ended:
        return
    planned = number_in(ended[-1], "predicted_seconds")
    measured = number_in(ended[-1], "measured_seconds")
    if planned is not None and measured is not None:
        yield Finding(
            f"A step took {duration(measured)}, and {duration(planned)} was planned in "
            f"{text_in(ended[-1], 'path')}: {text_in(ended[-1], 'difference')}.",
            f"shoal plan --model MODEL --machine NAME --check {history.directory}",
        )


def _corruptions(history: History) -> Iterator[Finding]:
    """Yield a finding for each corruption of the state that a guard found, once for all ranks."""
    told = dict.fromkeys(
        (integer_in(event, "step"), _ranks_in(event), _tensor_in(event))
        for attempt in history.attempts
        for _, event in attempt.said("corruption")
    )
    for step, ranks, tensor in told:
        yield Finding(
            f"The state of {rank_names(ranks) if ranks else 'a rank'} was corrupt at step "
            f"{'?' if step is None else format(step, ',')}: {tensor or 'an unknown tensor'}.",
            "test the memory of its host, and look for code that depends on the rank",
        )


def _ranks_in(event: Event) -> tuple[int, ...]:
    ranks = event.get("ranks")
    return tuple(r for r in ranks if type(r) is int) if isinstance(ranks, list) else ()


def _tensor_in(event: Event) -> str:
    tensors = event.get("tensors")
    return str(tensors[0])[:200] if isinstance(tensors, list) and tensors else ""


def unread_findings(history: History) -> Iterator[Finding]:
    """Yield findings for files of ranks that could not be read."""
    if history.unread:
        numbers, why = sorted(history.unread), next(iter(history.unread.values()))
        yield Finding(
            f"The events of {rank_names(numbers)} can't be read: {why}.",
            f"ls -l {history.directory}/events",
        )


def _left_out(history: History, newest: AttemptProfile) -> Iterator[Finding]:
    missing = [rank for rank in newest.attempt.missing if rank not in history.unread]
    if missing:
        yield Finding(
            f"Nothing was recorded by {rank_names(missing)}.",
            "check whether these ranks can reach the run directory",
        )
    left_out = newest.profile.aligned.left_out
    if left_out:
        yield Finding(
            f"{rank_names(left_out)} recorded few steps and are left out.",
            "check whether these ranks could write (df -h)",
        )


def _slow_ranks(named: list[Straggler], costs: Costs) -> Iterator[Finding]:
    """Yield a finding for each slow rank and part; parts of computing are combined."""
    by_rank = group_by(
        _together(named),
        lambda each: (each.rank, each.host, "computing" if each.part in COMPUTING else each.part),
    )
    for own in by_rank.values():
        told = "; ".join([_about(own[0], head=True), *(_about(each) for each in own[1:])])
        cost = sum(costs.get(culprit_of(each), 0.0) for each in own)
        yield Finding(f"{told}.", _remedy(own[0]), cost)


def _together(named: list[Straggler]) -> list[Straggler]:
    """Return one straggler per rank and part, even if it was slower in several attempts."""
    found: dict[Culprit, Straggler] = {}
    for each in named:
        before = found.setdefault(culprit_of(each), each)
        until = each.until if each.attempt > before.attempt else before.until
        first = min(before, each, key=lambda one: one.attempt)
        found[culprit_of(each)] = replace(before, since=first.since, until=until)
    return list(found.values())


def _about(each: Straggler, *, head: bool = False) -> str:
    span = f"from step {each.since:,}" + (f" to {each.until:,}" if each.until is not None else " on")
    label = LABELS[each.part]
    against = f"{duration(each.usual + each.excess)} where the others take {duration(each.usual)}"
    what = "a save" if each.part == "checkpoint" else f"{label} of a step" if head else label
    who = f"{each.place[0].upper()}{each.place[1:]}: " if head else ""
    return f"{who}{what} takes {against}, {span}"


def _remedy(each: Straggler) -> str:
    where = f" on {each.host}" if each.host is not None else " on its host"
    if each.part == "wait":
        return f"check the storage and the cores{where}: shoal doctor"
    if each.part == "checkpoint":
        return (
            f"check the storage{where}: shoal doctor; or save less often: "
            "run.tick(every=shoal.YoungDaly(mtbf=…))"
        )
    if each.part in COMPUTING:
        return f"check for a slow or shared device, or cores used by others,{where}: shoal doctor"
    return f"check what the script does only on rank {each.rank}"

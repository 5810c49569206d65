"""All checks in their order: of each rank alone, then of all together."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shoal.distributed import env_vars
from shoal.tools.doctor.checks import (
    filesystem,
    gpus,
    host,
    software,
)
from shoal.tools.doctor.findings import (
    CheckResult,
    Examination,
    RankFacts,
    Severity,
    describe_ranks,
    failure,
)
from shoal.tools.doctor.rounds import Rounds, TimedOutcome
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError, ShoalError
from shoal.util.packages import packages

if TYPE_CHECKING:
    from shoal.distributed.world import World

T = TypeVar("T")

TRIES = 3
"""Number of measurements of something that seems slow."""

_TOGETHER = 4
"""Limit of measurements that take turns, as a multiple of the limit of one check."""
_INNER = 0.75
"""Fraction of its limit for which a check waits for other ranks, so that it can report late ones."""


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """The options of an examination.

    `run`, `data` and `source` are the run directory, the dataset and the folder of the user's source,
    if they are to be checked. No check takes longer than `limit` seconds, or four times that if ranks
    take turns in it; `wait` is how long ranks wait for each other at the start. `quick` skips the
    measurements: compute and links.
    """

    run: Path | None = None
    data: Path | None = None
    source: Path | None = None
    limit: float = 10.0
    wait: float = 60.0
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class Check(Generic[T]):
    """A check: a function that measures on each rank, and one that evaluates the results on rank 0.

    `better` makes one measurement of two.
    """

    name: str
    look: Callable[[], T]
    judge: Callable[[Sequence[RankFacts[T]]], Iterable[CheckResult]]
    better: Callable[[T, T], T] | None = None


@dataclass(kw_only=True)
class Doctor:
    """An examination in progress, with the findings so far on rank 0."""

    request: DoctorRequest
    rounds: Rounds
    hosts: list[str]
    began: float = field(default_factory=CLOCK.wall)
    begun: float = field(default_factory=CLOCK.now)
    findings: list[CheckResult] = field(default_factory=list)
    outcomes: list[dict[str, TimedOutcome]] = field(default_factory=list)
    """Results of the first round, on rank 0."""

    def go(self, name: str, topics: Sequence[Check[Any]]) -> None:
        """Measure on all ranks, and judge on rank 0."""
        works = {topic.name: topic.look for topic in topics}
        outcomes = self.rounds.take(name, works, self.request.limit)
        self.outcomes = self.outcomes or outcomes
        for topic in topics:
            self.findings += self._judged(topic, outcomes)

    def measure(self, topic: Check[Any]) -> None:
        """Measure on all ranks together, and repeat if something seems slow, as real slowness persists.

        The best of all tries counts.
        """
        limit = self.request.limit * _TOGETHER
        best: list[dict[str, TimedOutcome]] = []
        found: list[CheckResult] = []
        for number in range(TRIES):
            name = f"{topic.name}/{number}"
            outcomes = self.rounds.take(name, {topic.name: topic.look}, limit, together=True)
            if topic.better is not None and best:
                outcomes = [_best(topic, a, b) for a, b in zip(best, outcomes, strict=True)]
            best = outcomes
            found = list(self._judged(topic, best))
            doubtful = self.rounds.going and any(one.state is not Severity.OK for one in found)
            if not self.rounds.tell(name, doubtful):
                break
        self.findings += found

    def crowded(self) -> list[str]:
        """The hosts with more ranks than cores, which take turns: a fast result there is chance."""
        found = []
        for at in dict.fromkeys(self.hosts):
            ranks = [one for one, name in zip(self.outcomes, self.hosts, strict=False) if name == at]
            usable = {
                cpu
                for one in ranks
                if one["cores"]["value"]
                for cpu in one["cores"]["value"]["affinity"]
            }
            found += [at] if len(usable) < len(ranks) else []
        return self.rounds.tell("crowded", found)

    def written(self) -> bool:
        """Whether rank 0 could write into the run directory, so that the others can look for it."""
        tried = self.outcomes[0]["run directory"]["value"] if self.outcomes else None
        return self.rounds.tell("written", tried is not None and tried["sync"] >= 0)

    def _judged(
        self, topic: Check[Any], outcomes: Sequence[dict[str, TimedOutcome]]
    ) -> Iterable[CheckResult]:
        seen: list[RankFacts[Any]] = []
        troubles: dict[str, list[RankFacts[None]]] = {}
        for rank, found in enumerate(outcomes):
            if topic.name not in found:
                continue
            at, outcome = self.hosts[rank], found[topic.name]
            if outcome["trouble"]:
                ranks = troubles.setdefault(outcome["trouble"], [])
                ranks.append(RankFacts(rank=rank, host=at, facts=None))
            else:
                seen.append(RankFacts(rank=rank, host=at, facts=outcome["value"]))
        for trouble, ranks in troubles.items():
            on = f" on {describe_ranks(ranks)}" if self.rounds.size > 1 else ""
            hung = any(outcomes[one.rank][topic.name]["hung"] for one in ranks)
            yield unchecked_result(topic.name, f"{on}: {trouble}", hung=hung)
        if seen:
            try:
                yield from list(topic.judge(seen))
            except Exception as error:  # in any case the other lines are useful
                yield unchecked_result(topic.name, f": {type(error).__name__}: {error}", hung=False)

    def result(self, cut_off: Collection[str] = ()) -> Examination:
        """Return the findings. Ranks on machines that are `cut_off` have no separate line."""
        missing = [RankFacts(rank=one, host=self.hosts[one], facts=None) for one in self.rounds.missing]
        if ranks := [one for one in missing if one.host not in cut_off]:
            self.findings.append(
                failure(
                    "ranks",
                    f"{describe_ranks(ranks)} did not complete a check; checks that need all ranks "
                    "were skipped",
                    "read their output; ps and dmesg on their hosts; then run shoal doctor again",
                )
            )
        known = packages()
        return Examination(
            ranks=self.rounds.size,
            hosts=tuple(dict.fromkeys(self.hosts)),
            began=self.began,
            seconds=CLOCK.now() - self.begun,
            versions={name: known[name] for name in software.CORE if name in known},
            findings=tuple(self.findings),
        )


def unchecked_result(what: str, why: str, *, hung: bool) -> CheckResult:
    """Return a line on something that could not be checked."""
    fix = "try the same by hand on that host; this failure may also occur in training"
    if hung:
        fix = "set a longer limit with shoal doctor --limit SECONDS; this hang may occur in training"
    return failure(what, f"could not be checked{why}", fix)


def _best(
    topic: Check[Any], before: dict[str, TimedOutcome], now: dict[str, TimedOutcome]
) -> dict[str, TimedOutcome]:
    old, new = before.get(topic.name), now.get(topic.name)
    if topic.better is None or old is None or new is None or old["trouble"] or new["trouble"]:
        return now
    return {
        topic.name: TimedOutcome(value=topic.better(old["value"], new["value"]), trouble="", hung=False)
    }


def rank_topics(request: DoctorRequest, ranks: int) -> list[Check[Any]]:
    """Return the checks that each of `ranks` ranks makes by itself; they do not import torch."""
    topics: list[Check[Any]] = [
        Check(name="software", look=software.describe_software, judge=software.check_software),
        Check(name="cores", look=host.describe_cores, judge=host.check_cores),
        Check(name="memory", look=host.describe_memory, judge=host.check_memory),
        Check(name="limits", look=partial(host.describe_limits, ranks), judge=host.check_limits),
        Check(name="GPU health", look=gpus.describe_gpus, judge=gpus.check_gpus),
    ]
    paths: tuple[tuple[str, Path | None, Callable[[Path], Any], Callable[..., Any]], ...] = (
        ("source", request.source, software.describe_sources, software.check_sources),
        ("dataset", request.data, software.describe_dataset, software.check_dataset),
        ("run directory", request.run, filesystem.try_directory, filesystem.check_directories),
    )
    given = [
        (name, partial(look, path), judge) for name, path, look, judge in paths if path is not None
    ]
    return topics + [Check(name=name, look=look, judge=judge) for name, look, judge in given]


def examine(request: DoctorRequest) -> tuple[Examination | None, bool]:
    """Examine this process alone, or all ranks of a launch; on other ranks than 0 it is None.

    Also return whether something still hangs or is missing, so that this process can't leave its world
    properly. Collective if a launcher started several. Raises ShoalError on a rank that can't join.
    """
    try:
        placement = env_vars.placement()
    except ShoalError as error:
        return examine_alone(request, _unmet("launcher", error)), False
    if placement.size == 1:
        return examine_alone(request), False
    from shoal.distributed.init import init

    try:
        world = init(prepare_timeout=max(request.wait, request.limit * (_TOGETHER + 1)), alone=True)
    except Exception as error:  # engines and drivers raise any exception
        known = _as_known(error)
        if placement.rank:
            raise known from None
        return examine_alone(request, _unmet("ranks", known)), False
    examination, hangs = examine_together(world, request)
    if not hangs:
        world.close()
    return examination, hangs


def _as_known(error: Exception) -> ShoalError:
    if isinstance(error, ShoalError):
        return error
    lines = str(error).splitlines() or [""]
    return LaunchError(
        given="a world of all ranks",
        found=f"it could not be formed: {type(error).__name__}: {lines[0]}",
        fix="list the choices with shoal info, and check with nvidia-smi whether the GPUs respond",
    )


def _unmet(what: str, error: ShoalError) -> CheckResult:
    return failure(what, f"{error.given}: {error.found}", error.fix)


def examine_alone(request: DoctorRequest, *before: CheckResult) -> Examination:
    """Examine this process; `before` are earlier findings."""
    rounds, hosts = Rounds(None, rank=0, size=1), [socket.gethostname()]
    doctor = Doctor(request=request, rounds=rounds, hosts=hosts, findings=list(before))
    doctor.go("alone", rank_topics(request, 1))
    if gpus.has_gpus() and not request.quick:
        from shoal.tools.doctor.checks import compute  # imports torch, only if there are GPUs

        doctor.measure(
            Check(
                name="compute",
                look=lambda: compute.measure_compute(compute.visible_gpus()),
                judge=compute.check_compute,
                better=compute.best_rates,
            )
        )
    return doctor.result()


def examine_together(world: World, request: DoctorRequest) -> tuple[Examination | None, bool]:
    """Examine all ranks of a world, once in its life; as `examine`. Collective."""
    from shoal.tools.doctor.checks import links

    hosts = world.gather(socket.gethostname())
    rounds = Rounds(world.store("shoal/doctor"), rank=world.rank, size=world.size)
    doctor = Doctor(request=request, rounds=rounds, hosts=hosts)
    with links.LinkProbes(world, hosts) as watched:
        _examine_all(world, doctor)
        doctor.go("outages", [Check(name=links.WHAT, look=watched.look, judge=links.check_outages)])
        seen = watched.look()
    rounds.end()
    cut_off = [one["host"] for one in seen if not one["over"]]
    return doctor.result(cut_off) if world.is_rank_zero else None, not rounds.going


def _examine_all(world: World, doctor: Doctor) -> None:
    """Run the checks in their order; skip those that need all ranks once one is missing. Collective."""
    from shoal.tools.doctor.checks import compute, links
    from shoal.tools.doctor.checks import placement as place

    request, rounds, hosts = doctor.request, doctor.rounds, doctor.hosts
    store = world.store("shoal/doctor")
    rank, size, inner = world.rank, world.size, request.limit * _INNER
    placed = Check(
        name="place", look=partial(place.describe_placement, world), judge=place.check_placement
    )
    doctor.go("each", [*rank_topics(request, size), placed])
    if rounds.going and len(set(hosts)) > 1:
        asking = [hosts.index(name) for name in dict.fromkeys(hosts)][1:]
        ask = partial(links.measure_clock_offsets, store, rank=rank, asking=asking, limit=inner)
        doctor.go("clock", [Check(name="clock", look=ask, judge=links.check_clocks)])
    if rounds.going and request.run is not None and doctor.written():
        see = partial(
            filesystem.try_shared_directory, request.run, store, rank=rank, size=size, limit=inner
        )
        doctor.go("shared", [Check(name="shared", look=see, judge=filesystem.check_shared_directory)])
    if rounds.going and not request.quick:
        crowded = doctor.crowded() if world.device.type == "cpu" else []
        work = partial(compute.measure_compute, [world.device], compared=hosts[rank] not in crowded)
        doctor.measure(
            Check(name="compute", look=work, judge=compute.check_compute, better=compute.best_rates)
        )
        measured = partial(links.measure_links, world, links.choose_ranks(hosts, crowded))
        if rounds.going:
            doctor.measure(
                Check(name="links", look=measured, judge=links.check_links, better=links.best_links)
            )

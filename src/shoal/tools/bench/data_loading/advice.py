"""Advice on the number of workers from measured input pipelines. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.tools.bench.data_loading.measure import Trial
from shoal.util.units import duration, percent, two_digits

ENOUGH = 0.9
"""Numbers of workers with this fraction of the best rate count as equally good, within noise."""
BUSY = 0.85
"""Fraction of a core, or of all cores, from which it counts as busy."""


@dataclass(frozen=True, kw_only=True)
class LoaderTrials:
    """All trials of a batch size with a number of workers."""

    batch_size: int
    workers: int
    trials: tuple[Trial, ...]

    @property
    def rate(self) -> float:
        """The median of samples per second."""
        return statistics.median(trial.rate for trial in self.trials)

    @property
    def spread(self) -> float:
        """The range of the trials as a fraction of the median."""
        rates = [trial.rate for trial in self.trials]
        return (max(rates) - min(rates)) / self.rate

    @property
    def first(self) -> float:
        """The median of seconds to the first batch."""
        return statistics.median(trial.first for trial in self.trials)

    @property
    def memory(self) -> int | None:
        """The largest number of bytes that a worker has for itself."""
        return max((trial.memory for trial in self.trials if trial.memory is not None), default=None)

    @property
    def busy(self) -> tuple[float, float]:
        """The cores used by this process, and by its workers."""
        mine = statistics.median(trial.busy for trial in self.trials)
        return mine, statistics.median(trial.workers_busy for trial in self.trials)

    @property
    def machine(self) -> float:
        """The fraction of all cores of this machine that was busy with anything."""
        return statistics.median(trial.machine for trial in self.trials)


@dataclass(frozen=True, kw_only=True)
class Need:
    """The need of training: the samples of this process in the given seconds, without waiting."""

    samples: int
    seconds: float
    source: str

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


def worker_advice(measured: Sequence[LoaderTrials], cores: int, need: Need | None) -> list[str]:
    """Return sentences: the best number of workers for each batch size, the reason, and the need."""
    by_size: dict[int, dict[int, LoaderTrials]] = {}
    for each in measured:
        by_size.setdefault(each.batch_size, {})[each.workers] = each
    said = [_best(size, found, cores, one_of=len(by_size)) for size, found in by_size.items()]
    if need is not None:
        said += [_enough(found, need) for found in list(by_size.values())[:1]]
    return said


def _best(size: int, found: Mapping[int, LoaderTrials], cores: int, *, one_of: int) -> str:
    where = f"Batches of {size}: " if one_of > 1 else ""
    fastest = max(each.rate for each in found.values())
    chosen = min(workers for workers, each in found.items() if each.rate >= ENOUGH * fastest)
    best, more = found[chosen], [workers for workers in sorted(found) if workers > chosen]
    text = f"{where}num_workers={chosen} gives {two_digits(best.rate)} samples/s"
    if chosen and 0 in found:
        text += f", {two_digits(best.rate / found[0].rate)} times as many as 0"
    if not more:
        return f"{text}; higher numbers were not measured." if len(found) > 1 else f"{text}."
    following = found[more[0]]
    change = following.rate / best.rate
    gives = "no more" if change >= ENOUGH else f"{two_digits(change)} times as many"
    return f"{text}; {more[0]} give {gives}: {_why(best, following, cores)}."


def _why(best: LoaderTrials, following: LoaderTrials, cores: int) -> str:
    """Return why more workers did not help, from what was busy at that time."""
    mine, theirs = following.busy
    if mine + theirs >= BUSY * cores:
        return "the core is busy" if cores == 1 else f"the {cores} cores are busy"
    if following.machine >= BUSY:
        return "other processes keep this machine busy"
    if mine >= BUSY:
        return "this process can't receive more from them"
    if best.workers == 0:
        return "transferring samples between processes costs more than loading them"
    used = percent((mine + theirs) / cores)
    return f"{used} of the cores' time is used: they wait for disk or network"


def _enough(found: Mapping[int, LoaderTrials], need: Need) -> str:
    pace = f"{need.samples} samples in {duration(need.seconds)}, {need.rate:,.0f} a second"
    asked = f"{need.source} takes {pace}"
    for workers, each in sorted(found.items()):
        if each.rate >= need.rate:
            ratio = two_digits(each.rate / need.rate)
            return f"{asked}: num_workers={workers} is enough ({ratio} times that)."
    workers, best = max(found.items(), key=lambda item: item[1].rate)
    waiting = 1 - best.rate / need.rate
    return (
        f"{asked}: no number is enough. With num_workers={workers} training would wait for data "
        f"{percent(waiting)} of its time."
    )

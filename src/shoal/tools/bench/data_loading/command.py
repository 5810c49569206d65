"""`shoal bench data`: measure the input pipeline alone, and advise on the number of workers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data import Loader
from shoal.data.iterable_dataset import StreamSource
from shoal.distributed.world import World
from shoal.tools.bench.data_loading.measure import Stages, Trial, measure_stages, run_trial
from shoal.tools.bench.measurement import (
    InterruptFlag,
    Output,
    Result,
    call_target,
    import_named,
    in_turns,
    measure_alone,
    target_errors,
)
from shoal.tools.bench.options import check_seconds
from shoal.tools.report import Reader
from shoal.util.document import Document, Section, Table, Text
from shoal.util.errors import DataError
from shoal.util.tables import plain_console, print_line
from shoal.util.units import duration, percent, size, two_digits

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


BATCH_SIZE = 32
_ROUNDS = 3
_STAGES_SHARE = 0.15
_SHORTEST = 0.3
_MOST_WORKERS = 16


def benchmark_data_loading(
    target: str,
    *,
    workers: tuple[int, ...] = (),
    batch_sizes: tuple[int, ...] = (),
    seconds: float = 30.0,
    step_time: float | None = None,
    run: Path | None = None,
    output: Output,
) -> int:
    """Measure, show the results, and return the exit code. Raises ShoalError for invalid options.

    Without `workers`, their numbers depend on the machine.
    """
    check_seconds("shoal bench data", "--seconds", seconds)
    if step_time is not None:
        check_seconds("shoal bench data", "--step-time", step_time)
    need = _need(batch_sizes or (BATCH_SIZE,), step_time, run)

    def measure(world: World, interrupts: InterruptFlag) -> Result | None:
        loaders, cores = _loaders(target, batch_sizes, world), world.placement.cores
        counts = workers or _usual_workers(loaders[0], cores)
        combinations = [(loader, count) for loader in loaders for count in counts]
        length = max(_SHORTEST, (1 - _STAGES_SHARE) * seconds / (_ROUNDS * len(combinations)))
        print_line(
            plain_console(stderr=True),
            f"{len(combinations)} combinations, {_ROUNDS} rounds: about "
            f"{max(seconds, len(combinations) * _ROUNDS * _SHORTEST):.0f} s; Ctrl-C ends it and keeps "
            "the results so far",
        )
        trials: dict[tuple[int, int], list[Trial]] = {}
        with target_errors(target):
            stages = measure_stages(loaders[0], _STAGES_SHARE * seconds / 2)
            for loader, count in in_turns(combinations, _ROUNDS, lambda: 1.0):
                if interrupts.asked:
                    break
                key = loader.batch_size, count
                trials.setdefault(key, []).append(run_trial(loader, count, length))
        found = [
            LoaderTrials(batch_size=batch_size, workers=count, trials=tuple(each))
            for (batch_size, count), each in sorted(trials.items())
        ]
        return (data_document(target, found, stages, cores, need), _csv_rows(found)) if found else None

    return measure_alone("shoal bench data", measure, output)


def _loaders(target: str, batch_sizes: tuple[int, ...], world: World) -> list[Loader]:
    """Return a Loader for each batch size, from the result of the user's function."""
    found = import_named(target, "dataset")
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        found = call_target(found, target, world)
    if isinstance(found, Loader):
        if batch_sizes not in ((), (found.batch_size,)):
            raise DataError(
                given=f"--batch-size with {target}",
                found=f"it returns a Loader, whose batch size is {found.batch_size}",
                fix="remove --batch-size, or return the dataset",
            )
        return [found]
    try:
        with target_errors(target):
            return [Loader(found, world, batch_size=each) for each in batch_sizes or (BATCH_SIZE,)]
    except DataError as error:
        error.given = f"{target}, which returns a {type(found).__name__}"
        raise


def _usual_workers(loader: Loader, cores: int) -> tuple[int, ...]:
    """Return 0, 1 and powers of two, up to twice the cores, to include numbers that do not help."""
    if isinstance(loader.feed, StreamSource):
        return 0, 1  # a single process reads it in any case
    powers = [1 << power for power in range(_MOST_WORKERS.bit_length())]
    return 0, *(count for count in powers if count <= min(_MOST_WORKERS, 2 * cores))


def _need(batch_sizes: Sequence[int], step_time: float | None, run: Path | None) -> Need | None:
    """Return the need of training, as given or as recorded by a run."""
    if step_time is not None:
        return Need(samples=batch_sizes[0], seconds=step_time, source="Training")
    if run is None:
        return None
    reader = Reader(run)
    while reader.poll():
        pass
    attempt = reader.history.latest
    ticks: Any = attempt.ticks(0) if attempt is not None else ()
    ticks = ticks[len(ticks) // 10 :]
    if attempt is None or not len(ticks):
        raise DataError(
            given=f"--run {run}",
            found="its events have no step of rank 0",
            fix="use a run that has taken steps, or --step-time SECONDS",
        )
    idle = ticks["wait"] + ticks["checkpoint"] + ticks["evaluation"]
    working = ["transfer", "forward", "backward", "communication", "update"]
    parts = sum(ticks[part] for part in working)
    seconds = float(np.median(np.maximum(parts, np.nan_to_num(ticks["wall"]) - idle)))
    if not seconds > 0:
        raise DataError(
            given=f"--run {run}",
            found="its steps have no times",
            fix="--step-time SECONDS",
        )
    samples = max(1, round(float(np.median(ticks["size"])) / max(1, attempt.size)))
    return Need(samples=samples, seconds=seconds, source=f"A rank of {run}")


def data_document(
    target: str, found: Sequence[LoaderTrials], stages: Stages | None, cores: int, need: Need | None
) -> Document:
    """Return the advice, the trials, and the time of each stage for the first batch size."""
    advice = worker_advice(found, cores, need)
    head = ("batch", "workers", "samples/s", "spread", "first batch", "cores busy", "each worker")
    times = ("per sample", "per batch")
    parts = [
        (name, *(duration(seconds * count, fixed=True) for count in (1, found[0].batch_size)))
        for name, seconds in _named_stages(stages)
    ]
    tables = [
        Table(
            caption="Batches at full speed (cores: this process + workers)",
            head=head,
            rows=[_cells(each) for each in found],
            right=head,
        ),
        Table(caption="Each stage alone", head=("stage", *times), rows=parts, right=times),
    ]
    return Document(
        title=f"Data loading of {target}",
        verdict="",
        sections=[
            Section(heading="Advice", blocks=[Text(text=sentence) for sentence in advice]),
            Section(heading="Speed", blocks=tables),
        ],
        values={
            "target": target,
            "advice": advice,
            "cores": cores,
            "need": need,
            "stages": stages,
            "measured": found,
        },
    )


def _cells(each: LoaderTrials) -> tuple[str, ...]:
    return (
        str(each.batch_size),
        str(each.workers),
        two_digits(each.rate),
        percent(each.spread, tenths=True),
        duration(each.first, fixed=True),
        "{:.1f} + {:.1f}".format(*each.busy) if each.workers else f"{each.busy[0]:.1f}",
        "" if each.memory is None else size(each.memory),
    )


def _named_stages(stages: Stages | None) -> Iterator[tuple[str, float]]:
    if stages is None:
        return
    whole = stages.collate is None
    named = {
        "samples, cut from tensors" if whole else "dataset, __getitem__": stages.sample,
        "collate": stages.collate,
        "from a worker to this process": stages.handed,
        "to the GPU": stages.copied,
    }
    yield from ((name, seconds) for name, seconds in named.items() if seconds is not None)


def _csv_rows(found: Sequence[LoaderTrials]) -> list[dict[str, object]]:
    return [
        {
            "batch_size": each.batch_size,
            "workers": each.workers,
            "samples_per_second": one.rate,
            "first_batch_seconds": one.first,
            "samples": one.samples,
            "busy": one.busy,
            "workers_busy": one.workers_busy,
            "worker_bytes": one.memory,
        }
        for each in found
        for one in each.trials
    ]

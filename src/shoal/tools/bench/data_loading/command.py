"""`shoal bench data`: measure the input pipeline alone, for several workers and batch sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data import Loader
from shoal.data.iterable_dataset import StreamSource
from shoal.distributed.init import init
from shoal.distributed.world import World
from shoal.tools.bench.data_loading.advice import LoaderTrials, Need, worker_advice
from shoal.tools.bench.data_loading.measure import Stages, Trial, measure_stages, run_trial
from shoal.tools.bench.import_target import call_target, import_named, require_alone, target_error
from shoal.tools.bench.scaling.interrupt import InterruptFlag
from shoal.tools.report import Reader
from shoal.tools.report.html import write_csv
from shoal.util.errors import DataError, LaunchError, ShoalError
from shoal.util.tables import plain_console, print_line, print_path, print_rows
from shoal.util.units import duration, percent, size, two_digits

BATCH_SIZE = 32
_ROUNDS = 3
_STAGES_SHARE = 0.15
_SHORTEST = 0.3
_MOST_WORKERS = 16


@dataclass(frozen=True, kw_only=True)
class DataLoadingOptions:
    """The measurements, and the files for their figures. Empty lists: choose by the machine."""

    target: str
    workers: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    seconds: float
    step_time: float | None
    run: Path | None
    csv: Path | None
    json: bool


def benchmark_data_loading(asked: DataLoadingOptions) -> int:
    """Measure, print, and return the exit code. Raises ShoalError for invalid options."""
    _check(asked)
    need = _need(asked)
    world = init()
    try:  # not `with`, which would add a line of this file to the traceback
        return _measure_and_tell(asked, world, need)
    finally:
        world.close()


def _measure_and_tell(asked: DataLoadingOptions, world: World, need: Need | None) -> int:
    screen = plain_console(stderr=True)
    loaders = _loaders(asked, world)
    workers = asked.workers or _usual_workers(loaders[0], world.placement.cores)
    count = len(loaders) * len(workers)
    seconds = max(asked.seconds, count * _ROUNDS * _SHORTEST)
    with InterruptFlag() as interrupts:
        print_line(
            screen,
            f"{count} combinations, {_ROUNDS} rounds: about {seconds:.0f} s; Ctrl-C ends it and keeps "
            "the results so far",
        )
        try:
            parts = measure_stages(loaders[0], _STAGES_SHARE * asked.seconds / 2)
            found = _measure(asked, loaders, workers, lambda: bool(interrupts.asked))
        except ShoalError:
            raise
        except Exception as error:
            raise target_error(asked.target, error) from error
    if found:
        _report(asked, found, parts, world.placement.cores, need)
    else:
        print_line(screen, "Ended before the first measurement.")
    return 128 + interrupts.asked if interrupts.asked else 0


def _measure(
    asked: DataLoadingOptions,
    loaders: Sequence[Loader],
    workers: Sequence[int],
    asked_to_stop: Callable[[], bool],
) -> list[LoaderTrials]:
    """Return the trials of all combinations, which take turns."""
    combinations = [(loader, count) for loader in loaders for count in workers]
    length = (1 - _STAGES_SHARE) * asked.seconds / (_ROUNDS * len(combinations))
    trials: dict[tuple[int, int], list[Trial]] = {}
    for number in range(_ROUNDS):
        for loader, count in combinations if number % 2 == 0 else reversed(combinations):
            if asked_to_stop():
                break
            key = loader.batch_size, count
            trials.setdefault(key, []).append(run_trial(loader, count, max(_SHORTEST, length)))
    return [
        LoaderTrials(batch_size=batch_size, workers=count, trials=tuple(each))
        for (batch_size, count), each in sorted(trials.items())
    ]


def _loaders(asked: DataLoadingOptions, world: World) -> list[Loader]:
    """Return a Loader for each batch size, from the result of the user's function."""
    found = import_named(asked.target, "dataset")
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        found = call_target(found, asked.target, world)
    if isinstance(found, Loader):
        if asked.batch_sizes and asked.batch_sizes != (found.batch_size,):
            raise DataError(
                given=f"--batch-size with {asked.target}",
                found=f"it returns a Loader, whose batch size is {found.batch_size}",
                fix="remove --batch-size, or return the dataset",
            )
        return [found]
    try:
        return [
            Loader(found, world, batch_size=batch_size)
            for batch_size in asked.batch_sizes or (BATCH_SIZE,)
        ]
    except DataError as error:
        error.given = f"{asked.target}, which returns a {type(found).__name__}"
        raise
    except Exception as error:
        raise target_error(asked.target, error) from error


def _usual_workers(loader: Loader, cores: int) -> tuple[int, ...]:
    """Return 0, 1 and powers of two, up to twice the cores, to include numbers that do not help."""
    if isinstance(loader.feed, StreamSource):
        return 0, 1  # a single process reads it in any case
    powers = [1 << power for power in range(_MOST_WORKERS.bit_length())]
    return 0, *(count for count in powers if count <= min(_MOST_WORKERS, 2 * cores))


def _need(asked: DataLoadingOptions) -> Need | None:
    """Return the need of training, as given or as recorded by a run."""
    if asked.step_time is not None:
        return Need(
            samples=(asked.batch_sizes or (BATCH_SIZE,))[0], seconds=asked.step_time, source="Training"
        )
    if asked.run is None:
        return None
    reader = Reader(asked.run)
    while reader.poll():
        pass
    attempt = reader.history.latest
    ticks: Any = attempt.ticks(0) if attempt is not None else ()
    ticks = ticks[len(ticks) // 10 :]
    if attempt is None or not len(ticks):
        raise DataError(
            given=f"--run {asked.run}",
            found="its events have no step of rank 0",
            fix="use a run that has taken steps, or --step-time SECONDS",
        )
    idle = ticks["wait"] + ticks["checkpoint"] + ticks["evaluation"]
    working = ["transfer", "forward", "backward", "communication", "update"]
    parts = sum(ticks[part] for part in working)
    seconds = float(np.median(np.maximum(parts, np.nan_to_num(ticks["wall"]) - idle)))
    if not seconds > 0:
        raise DataError(
            given=f"--run {asked.run}",
            found="its steps have no times",
            fix="--step-time SECONDS",
        )
    samples = max(1, round(float(np.median(ticks["size"])) / max(1, attempt.size)))
    return Need(samples=samples, seconds=seconds, source=f"A rank of {asked.run}")


def _check(asked: DataLoadingOptions) -> None:
    require_alone("shoal bench data")
    numbers = [*asked.workers, *(batch - 1 for batch in asked.batch_sizes)]
    times = [asked.seconds, *([] if asked.step_time is None else [asked.step_time])]
    if any(number < 0 for number in numbers) or not all(0 < each <= 86400 for each in times):
        raise LaunchError(
            given=f"--workers {_list(asked.workers)} --batch-size {_list(asked.batch_sizes)} "
            f"--seconds {asked.seconds:g}"
            + (f" --step-time {asked.step_time:g}" if asked.step_time is not None else ""),
            found="workers must be 0 or more, batch sizes 1 or more, times above 0 seconds",
            fix="pass --workers 0,1,2 --batch-size 32 --seconds 30",
        )


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers)) or "(usual)"


def _report(
    asked: DataLoadingOptions,
    found: Sequence[LoaderTrials],
    parts: Stages | None,
    cores: int,
    need: Need | None,
) -> None:
    console = plain_console()
    sentences = worker_advice(found, cores, need)
    print_line(console, *sentences, "")
    title = "Batches at full speed (cores: this process + workers)"
    headers = ("batch", "workers", "samples/s", "spread", "first batch", "cores busy", "each worker")
    print_rows(console, title, headers, map(_cells, found), right=headers)
    if parts is not None:
        times = ("per sample", "per batch")
        rows = (
            (name, *(duration(seconds * count, fixed=True) for count in (1, found[0].batch_size)))
            for name, seconds in _named_stages(parts)
        )
        print_rows(console, "Each stage alone", ("stage", *times), rows, right=times)
    if asked.csv is not None:
        write_csv(asked.csv, _csv_rows(found))
        print_path(console, f"figures: {asked.csv}")
    if asked.json:
        plain: dict[str, Any] = {
            "target": asked.target,
            "advice": sentences,
            "cores": cores,
            "need": None if need is None else asdict(need),
            "stages": None if parts is None else asdict(parts),
            "measured": [asdict(each) for each in found],
        }
        print_path(console, json.dumps(plain))


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


def _named_stages(parts: Stages) -> Iterator[tuple[str, float]]:
    whole = parts.collate is None
    yield ("samples, cut from tensors" if whole else "dataset, __getitem__"), parts.sample
    if parts.collate is not None:
        yield "collate", parts.collate
    if parts.handed is not None:
        yield "from a worker to this process", parts.handed
    if parts.copied is not None:
        yield "to the GPU", parts.copied


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

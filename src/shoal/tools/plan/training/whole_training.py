"""The duration and the price of a whole training: its steps, saves, failures and restarts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from shoal.launcher.nodes import WAIT
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.search import Prediction
from shoal.tools.plan.training.rehearsal import (
    Fleet,
    TrainingTime,
    read_trace,
    rehearse,
    time_between_failures,
)
from shoal.tools.submit.scheduler import REQUEUES
from shoal.util.errors import ShoalError
from shoal.util.units import duration

SIMULATIONS = 200
_EXAMPLE = "--training steps=100000,mtbf=50000,save=20,restart=300"
_MOST = 100_000
"""Failures in one simulation, after which the training counts as one that does not end."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training as a whole, and what interrupts it.

    Either `steps` or `tokens` is above 0. `mtbf` is the mean time between failures of one device, in
    hours; without it, nothing fails. `save` is the number of seconds for which a save blocks training,
    `restart` that from a failure to the next step, with the time in the queue. `queue` is the number of
    hours before the first start, `start` that of seconds from there to the first step, `price` that of
    one device for one hour. `deadline` is in hours, from submission; 0 is none.

    With the file `trace` of failures, the training has `spare` nodes for those that are down, continues
    with at least `least` nodes (0: all), for which it waits `wait` seconds, and starts again after at
    most `restarts` failures of processes.
    """

    steps: float = 0
    tokens: float = 0
    mtbf: float = math.inf
    save: float = 0
    restart: float = 0
    queue: float = 0
    start: float = 0
    price: float = 0
    deadline: float = 0
    trace: str = ""
    spare: float = 0
    least: float = 0
    wait: float = WAIT
    restarts: float = REQUEUES


@dataclass(frozen=True, kw_only=True)
class TrainingEstimate:
    """Simulated trainings, from the shortest to the longest.

    `interval` is the number of seconds between two saves, `device_hours` and `price` are of the median.
    `goodput` is the fraction of the median's time, without the queue, that all devices would need for
    the steps alone. `in_time` is the fraction of trainings that meet the deadline, 1 without one.
    """

    simulated: tuple[TrainingTime, ...]
    interval: float
    device_hours: float
    price: float
    goodput: float
    in_time: float

    def quantile(self, fraction: float) -> TrainingTime:
        """Return the training that is longer than this fraction of all."""
        return self.simulated[round(fraction * (len(self.simulated) - 1))]

    @property
    def median(self) -> TrainingTime:
        """The training of median duration."""
        return self.quantile(0.5)


_LARGEST = 1e18
"""The largest value of a training, in any unit."""
_LONGEST = 1e10
"""Seconds between failures, over 300 years, above which a training has none."""


def parse_training(text: str) -> Training:
    """Return the training that `"steps=…,mtbf=…,save=…,restart=…"` describes.

    Raises ShoalError for unknown names and other values than numbers above 0, and if failures have no
    `save` or no `restart`, or those of a trace no `start`: all depend on the cluster.
    """
    names = [each.name for each in fields(Training)]
    values: dict[str, Any] = {}
    for part in (piece.strip() for piece in text.split(",")):
        key, _, value = part.partition("=")
        number = value if key == "trace" else _number(value)
        if key not in names or key in values or not number:
            raise _wrong(
                text,
                f"{part!r} is not one NAME=NUMBER of {', '.join(names)}, above 0 and "
                f"at most {_LARGEST:g}",
            )
        values[key] = number
    if ("steps" in values) == ("tokens" in values):
        raise _wrong(text, "it needs either steps or tokens, not both")
    cause = next((name for name in ("trace", "mtbf") if name in values), None)
    needed = {"trace": ("save", "restart", "start"), "mtbf": ("save", "restart"), None: ()}[cause]
    missing = [name for name in needed if name not in values]
    if missing:
        raise _wrong(
            text,
            f"{cause} without {' and '.join(missing)}: seconds that `shoal report` of a run shows",
        )
    for name in ("spare", "least", "restarts"):
        if values.get(name, 0) % 1 or (name in values and cause != "trace"):
            raise _wrong(text, f"{name} must be an integer, and needs trace=FILE")
    return Training(**values)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number <= _LARGEST else None


def _wrong(text: str, found: str) -> ShoalError:
    return ShoalError(given=f"--training {text}", found=found, fix=_EXAMPLE)


def estimate_training(
    training: Training, step: float, devices: int, tokens: int, *, nodes: int = 1, seed: int = 0
) -> TrainingEstimate:
    """Return simulated trainings with random failures, or with those of a trace.

    Args:
        training: The values of the training.
        step: Seconds of an optimizer step.
        devices: Number of devices, each of which fails by itself.
        tokens: Number of tokens in a step.
        nodes: Number of nodes, which the trace lets fail.
        seed: Of the times of failures, which are exponentially distributed.

    Returns:
        200 trainings, or one if nothing fails or the failures are those of a trace.

    Raises:
        ShoalError: If failures are so frequent that the training does not end.
    """
    steps = math.ceil(training.steps or training.tokens / tokens)
    if training.trace:
        return _rehearsed(training, step, steps, devices, nodes)
    mean = 3600 * training.mtbf / devices
    interval = _interval(training.save, mean)
    if math.isinf(mean):
        once = simulate_training(training, step, steps, interval, iter(()))
        found = [once]
    else:
        draws = random.Random(seed)
        found = [
            simulate_training(training, step, steps, interval, _gaps(draws, mean))
            for _ in range(SIMULATIONS)
        ]
    found.sort(key=lambda each: each.total)
    hours = devices * found[(len(found) - 1) // 2].occupied / 3600
    return _summary(training, found, interval, hours, steps * step)


def training_of(
    training: Training, found: Prediction, machine: Machine, tokens: int
) -> TrainingEstimate:
    """Return the estimate of a whole training in one layout, with samples of `tokens` tokens."""
    plan, devices = found.plan, found.plan.layout.size
    nodes = math.ceil(devices / machine.per_host)
    count = plan.global_batch * tokens
    return estimate_training(training, found.step_seconds, devices, count, nodes=nodes)


def _summary(
    training: Training, found: Sequence[TrainingTime], interval: float, hours: float, ideal: float
) -> TrainingEstimate:
    """Return trainings, from the shortest to the longest, with what follows from them."""
    median = found[round(0.5 * (len(found) - 1))]
    limit = 3600 * training.deadline or math.inf
    return TrainingEstimate(
        simulated=tuple(found),
        interval=interval,
        device_hours=hours,
        price=hours * training.price,
        goodput=ideal / (median.total - median.queue),
        in_time=sum(each.total <= limit for each in found) / len(found),
    )


def _rehearsed(
    training: Training, step: float, steps: int, devices: int, nodes: int
) -> TrainingEstimate:
    """Return the training over a trace of failures, as the launcher's decisions let it run."""
    least = int(training.least) or nodes
    if least > nodes:
        raise _wrong(f"least={least}", f"the layout is on {nodes} nodes")
    pool = nodes + int(training.spare)
    events = read_trace(Path(training.trace), pool)
    mean = 3600 * training.mtbf / devices
    interval = _interval(training.save, min(mean, time_between_failures(events, nodes, pool)))
    fleet = Fleet(
        nodes=nodes,
        least=least,
        restarts=int(training.restarts),
        wait=training.wait,
        start=training.start,
        restart=training.restart,
        save=training.save,
        interval=interval,
    )
    found, used = rehearse(fleet, events, pool, step, steps)
    once = replace(found, queue=3600 * training.queue)
    return _summary(training, [once], interval, devices * used / nodes / 3600, steps * step)


def _interval(save: float, mean: float) -> float:
    """Return the seconds of training between two saves, those of `shoal.YoungDaly`."""
    if mean > _LONGEST:
        return math.inf
    from shoal.training.save_policy import YoungDaly  # imports torch

    return YoungDaly(mtbf=timedelta(seconds=mean)).seconds(save)


def _gaps(draws: random.Random, mean: float) -> Iterator[float]:
    while True:
        yield draws.expovariate(1 / mean)


def simulate_training(
    training: Training, step: float, steps: int, interval: float, gaps: Iterator[float]
) -> TrainingTime:
    """Return the time of a training with failures at given times.

    A save follows the first step that ends `interval` seconds after the previous save, and the last
    step. After a failure, training continues at the latest save that is complete.

    Args:
        training: Times of saves and restarts.
        step: Seconds of an optimizer step.
        steps: Number of optimizer steps.
        interval: Seconds between two saves.
        gaps: Seconds from each failure to the next, the first from the start.

    Raises:
        ShoalError: If failures are so frequent that the training does not end.
    """
    segment = steps if interval >= steps * step else max(1, math.ceil(interval / step))
    length = segment * step + training.save
    left, saves, failures = steps, 0, 0
    repeated = restarts = 0.0
    for gap in chain(gaps, (math.inf,)):
        starting = min(gap, training.restart if failures else 0.0)
        restarts += starting
        segments = math.ceil(left / segment)
        if gap - starting >= left * step + segments * training.save:
            saves += segments
            break
        complete = min(segments - 1, int((gap - starting) // length))
        repeated += gap - starting - complete * length
        left, saves, failures = left - complete * segment, saves + complete, failures + 1
        if failures > _MOST:
            raise ShoalError(
                given=f"--training with steps of {duration(step)} and saves every {duration(length)}",
                found=f"after {_MOST:,} failures, the training has not ended",
                fix="a larger mtbf, fewer devices, or shorter saves and restarts",
            )
    return TrainingTime(
        queue=3600 * training.queue,
        start=training.start,
        steps=steps * step,
        saves=saves * training.save,
        repeated=repeated,
        restarts=restarts,
        failures=failures,
    )

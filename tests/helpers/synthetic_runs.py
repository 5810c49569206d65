"""Runs that never were: what ranks would have recorded, with causes of slowness planted in them.

The ranks are simulated, not their records: each does its own part of a step, then waits in the one
collective of the step until the last has come, and for the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BEGAN = 1_700_000_000.0
BLOCK = 512
USUAL = {"wait": 0.5e-3, "forward": 5e-3, "backward": 9e-3, "update": 2e-3, "other": 0.3e-3}
"""Seconds of a step of a rank that nothing ails."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A cause: `seconds` more in a part, at some ranks, in every `every`-th of a range of steps."""

    part: str
    ranks: Sequence[int]
    seconds: float
    since: int = 0
    until: int | None = None
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What the workers of each rank take for a batch, in seconds by rank; one at least prefetches."""

    seconds: Sequence[float]
    workers: int = 2
    prefetch: int = 2


def simulate(
    ranks: int,
    steps: int,
    plants: Sequence[Plant] = (),
    *,
    noise: float = 0.05,
    network: float = 1e-3,
    warm: int = 2,
    meet: int = 1,
    uneven: float = 0.0,
    loading: Loading | None = None,
    seed: int = 0,
) -> dict[str, NDArray[np.float64]]:
    """Seconds by part, [rank, step]; "wall" is from tick to tick; ranks meet every `meet` steps.

    `uneven` is the scatter of the lengths of samples, which forward and backward of a rank are
    proportional to. With `loading`, `wait` is what a rank waits for the queue of its workers.
    """
    random = np.random.default_rng(seed)
    parts = {
        part: typical * random.lognormal(0, noise, (ranks, steps)) for part, typical in USUAL.items()
    }
    parts["checkpoint"] = np.zeros((ranks, steps))
    lengths = random.lognormal(0, uneven, (ranks, steps))
    parts["forward"] *= lengths
    parts["backward"] *= lengths
    numbers = np.arange(1, steps + 1)
    for plant in plants:
        there = (numbers >= plant.since) & (numbers % plant.every == 0)
        if plant.until is not None:
            there &= numbers <= plant.until
        for rank in plant.ranks:
            parts[plant.part][rank, there] += plant.seconds
    parts["forward"][:, :warm] += 0.5
    # Without workers the rank itself loads while it waits.
    parts["load"] = parts["wait"].copy()
    queues = []
    if loading is not None:
        scatter = random.lognormal(0, noise, (ranks, steps))
        parts["load"] = np.array(loading.seconds)[:, None] * scatter
        queues = [_Queue(loading, seconds) for seconds in parts["load"]]
    link = network * random.lognormal(0, noise, steps)
    clock, ticked = np.zeros(ranks), np.zeros(ranks)
    parts["communication"] = np.zeros((ranks, steps))
    parts["wall"] = np.zeros((ranks, steps))
    for step in range(steps):
        if queues:
            asked = clock + parts["checkpoint"][:, step] + parts["other"][:, step]
            waits = [queue.wait(step, now) for queue, now in zip(queues, asked, strict=True)]
            parts["wait"][:, step] = waits
        before = ("checkpoint", "other", "wait", "forward", "backward")
        arrived = clock + sum(parts[part][:, step] for part in before)
        left = arrived.max() + link[step] if (step + 1) % meet == 0 else arrived
        parts["communication"][:, step] = left - arrived
        clock = left + parts["update"][:, step]
        parts["wall"][:, step] = clock - ticked
        ticked = clock.copy()
    return parts


class _Queue:
    """The batches that the workers of one rank have ready, as torch's DataLoader keeps them."""

    def __init__(self, loading: Loading, seconds: NDArray[np.float64]) -> None:
        self._seconds = seconds
        self._free = [0.0] * loading.workers
        self._room = loading.workers * loading.prefetch
        self._asked: list[float] = []

    def wait(self, step: int, now: float) -> float:
        """Seconds from `now` until the batch of a step is ready."""
        begun = self._asked[step - self._room] if step >= self._room else 0.0
        worker = step % len(self._free)
        self._free[worker] = max(self._free[worker], begun) + self._seconds[step]
        late = max(0.0, self._free[worker] - now)
        self._asked.append(now + late)
        return late + 20e-6


def lines(
    parts: Mapping[str, NDArray[np.float64]],
    rank: int,
    *,
    began: float = BEGAN,
    first: int = 0,
    batch: int = 64,
    start: Mapping[str, Any] | None = None,
    name: str = "step",
    counted: Sequence[int] | NDArray[np.int64] | None = None,
) -> Iterator[str]:
    """The file of one rank, as format 3 has it, line by line."""
    ranks, steps = parts["wall"].shape
    yield json.dumps(
        {
            "event": "start",
            "t": began,
            "began": began,
            "format": 3,
            "rank": rank,
            "size": ranks,
            "host": f"node{rank // 2}",
            "step": first,
            "batch_size": batch,
            "layout": f"replicate={ranks}",
            "device": "cpu",
            "torch": "2.13.0",
            "shoal": "0.1.0",
            **(start or {}),
        }
    )
    ticks = began + np.cumsum(parts["wall"][rank])
    for begin in range(0, steps, BLOCK):
        chosen = slice(begin, min(begin + BLOCK, steps))
        numbers = np.arange(first + 1, first + steps + 1)[chosen]
        count, last = len(numbers), ticks[chosen][-1]
        columns: dict[str, Any] = {
            part: np.rint(values[rank, chosen] * 1e6).astype(int).tolist()
            for part, values in parts.items()
            if part != "other" and (part == "load" or values[rank, chosen].any())
        }
        columns |= {
            "step": numbers.tolist(),
            "first": (numbers * batch).tolist(),
            "size": [batch] * count,
            "share": [[int(n) * batch, int(n) * batch + batch // ranks] for n in numbers],
            "counted": [batch] * count if counted is None else [int(n) for n in counted[chosen]],
            "loss": np.round(2.3 * np.exp(-numbers / steps) + 0.1, 6).tolist(),
            "norm": [1.0] * count,
            "at": np.rint((last - ticks[chosen]) * 1e6).astype(int).tolist(),
        }
        yield json.dumps({"event": "steps", "t": round(last, 6), "name": name, **columns})


def write(
    directory: Path, parts: Mapping[str, NDArray[np.float64]], *, append: bool = False, **options: Any
) -> Path:
    """A run directory with the files of all ranks."""
    folder = directory / "events"
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(len(parts["wall"])):
        with (folder / f"rank-{rank}.jsonl").open("a" if append else "w") as file:
            file.writelines(line + "\n" for line in lines(parts, rank, **options))
    return directory


def write_two_steps(directory: Path, *, ticks: int, every: int, began: float, first: int) -> None:
    """A critic that is taken on every batch and a generator, declared first, on every so manieth."""
    parts = simulate(2, ticks)
    there = np.arange(1, ticks + 1) % every == 0
    (directory / "events").mkdir(exist_ok=True)
    for rank in (0, 1):
        [start, text] = lines(parts, rank, began=began, name="critic")
        block = json.loads(text)
        taken = [n for n, here in enumerate(there) if here]
        other = {
            name: [column[n] for n in taken] if isinstance(column, list) else column
            for name, column in block.items()
        }
        other |= {"name": "generator", "step": [first // every + n + 1 for n in range(len(taken))]}
        block["step"] = [first + n + 1 for n in range(ticks)]
        block["wall"] = [0 if there[n] else wall for n, wall in enumerate(block["wall"])]
        found = [json.loads(start) | {"step": first // every}, block, other]
        with (directory / "events" / f"rank-{rank}.jsonl").open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in found)

"""The training that is disturbed, the faults from outside of it, and what is checked about its end."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT
from shoal.checkpoint import Files
from shoal.checkpoint.disk_and_remote import store_in
from shoal.checkpoint.store import DamageError, damage, manifest_of
from shoal.tools.chaos.final_state import digest_end
from shoal.tools.report.coverage import coverage

SCRIPT = ROOT / "tests" / "chaos" / "scripts" / "train.py"
SAMPLES = 110
EPOCHS = 20
FIRST, LAST = 10, 80
"""The steps after which faults begin."""
MOST_STARTS = 6
_PAUSE = 0.05


def damaged(checkpoints: Path) -> list[Path]:
    """Return the committed checkpoints of a directory whose files differ from their manifests."""
    found = []
    for path in store_in(checkpoints, Files()).candidates() if checkpoints.is_dir() else ():
        assert isinstance(path, Path)
        try:
            reason = damage(path, manifest_of(path))
        except DamageError as error:
            # An unfinished save has a part of a manifest, or none.
            reason = None if path.suffix == ".partial" else str(error)
        if reason is not None:
            found.append(path)
    return found


def count_samples(home: Path, epochs: int) -> tuple[int, int]:
    """Return how many samples the last attempt at each step repeated or missed within an epoch.

    Counted twice: by the indices that the datasets gave, and by `shoal.coverage`.
    """
    steps: dict[int, tuple[int, dict[str, list[int]]]] = {}
    for file in sorted(home.glob("samples-*.jsonl")):
        for line in file.read_text().splitlines():
            attempt, step, ranges, indices, _ = json.loads(line)
            if attempt > steps.get(step, (0, {}))[0]:
                steps[step] = attempt, {}
            if attempt == steps[step][0]:
                # Tensor-parallel ranks and stages of a pipeline have the same samples.
                steps[step][1][str(ranges)] = indices
    in_epoch = max(steps) // epochs
    repeated = missed = 0
    for epoch in range(epochs):
        counts = Counter[int]()
        for step in range(epoch * in_epoch + 1, (epoch + 1) * in_epoch + 1):
            counts.update(index for indices in steps[step][1].values() for index in indices)
        repeated += sum(count - 1 for count in counts.values())
        missed += SAMPLES - len(counts)
    found = coverage(home / "runs" / "a")
    missed += (found.end != SAMPLES * epochs) + len(found.missed)
    return repeated + len(found.repeated), missed


@dataclass(frozen=True, kw_only=True)
class OutsideFault:
    """A fault of the surroundings of a training, which ends after some seconds.

    `switch` are options of the switch of all links, `clock` the jump of the second node's clock, and
    `timeout` that of the script.
    """

    text: str
    begin: Callable[[Any], object] = lambda commands: None
    end: Callable[[Any], object] = lambda commands: None
    seconds: float = 8.0
    switch: tuple[str, ...] = ()
    round_trip: float = 0.0
    clock: int = 0
    timeout: float = 300.0


CALM = OutsideFault(text="none", seconds=0.0)


@dataclass(frozen=True, kw_only=True)
class OutsideRun:
    """A training: its end, the starts, and the first message after the fault."""

    digest: str
    samples: int
    starts: int
    message: str
    delay: float | None


def watch(commands: Any, fault: OutsideFault, seed: int, limit: float) -> OutsideRun:
    """Begin a fault after a step that the seed draws, and wait for the end of the training."""
    first = random.Random(seed).randint(FIRST, LAST)
    steps = commands.home / "samples-0.jsonl"
    until = time.monotonic() + limit
    began: float | None = None
    before: set[str] = set()
    over, message, delay, end = False, "", None, ("", 0)
    while time.monotonic() < until:
        now = time.monotonic()
        taken = len(steps.read_text().splitlines()) if steps.exists() else 0
        if began is None and taken >= first:
            before, began = set(commands.messages()), now
            fault.begin(commands)
        if began is not None and not over and now > began + fault.seconds:
            fault.end(commands)
            over = True
        new = [line for line in commands.messages() if line not in before]
        if began is not None and not message and new:
            message, delay = new[0], now - began
        if (over or began is None) and commands.restart_failed():
            end = digest_end(commands.home), sum(count_samples(commands.home, EPOCHS))
            break
        time.sleep(_PAUSE)
    else:
        print("\n".join(commands.messages()[-100:]), flush=True)
    return OutsideRun(
        digest=end[0], samples=end[1], starts=commands.starts, message=message, delay=delay
    )


def outside_row(fault: OutsideFault, runs: Sequence[OutsideRun], calm: OutsideRun) -> dict[str, Any]:
    """Return the row of a fault."""
    delays = [run.delay for run in runs if run.delay is not None]
    said = [run.message for run in runs if run.message]
    return {
        "fault": fault.text,
        "runs": len(runs),
        "first message": said[0][:90] if said else "none",
        "median delay, s": statistics.median(delays) if delays else None,
        "starts": sum(run.starts for run in runs),
        "samples": sum(run.samples for run in runs),
        "bit-identical ends": f"{sum(run.digest == calm.digest for run in runs)} of {len(runs)}",
    }

"""Preemption by Slurm with REQUEUE or CANCEL, with and without a grace period: what is lost?

    python benchmarks/chaos_preempt.py [--seeds 3] [--modes cancel-10 cancel-0] [--json]

`shoal submit` starts a training on two nodes. After a step that the seed draws, a job of a higher
priority takes one of the nodes. If the training does not return to the queue, it is submitted again, as
by a user. `--home` is a new directory, which is kept. Needs what cluster.py needs.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_slurm import Target, preempt, read_lines, train_undisturbed
from cluster import nodes_of, started, submit
from disturbed import count_samples
from harness import finish, parse, show, versions
from helpers.cluster.slurm import Cluster
from shoal.tools.chaos.final_state import digest_end

EPOCHS = 10
PACE = 0.5
"""Seconds that are added to each step."""
MTBF = 1000.0
"""The script saves by Young and Daly, about every tenth step, so that a save in time is seen."""
TRAINING = ("--epochs", str(EPOCHS), "--mtbf", str(MTBF))
FIRST, LAST = 10, 40
LIMIT = 400.0
MODES = {
    f"{mode}-{grace}": (mode.upper(), grace) for mode in ("requeue", "cancel") for grace in (10, 0)
}
SETTINGS = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
OVER = ("PREEMPTED", "CANCELLED", "FAILED", "TIMEOUT")
_PAUSE = 0.1


@dataclass(frozen=True, kw_only=True)
class PreemptedRun:
    """A training that was preempted once: after which step, and its way to the end."""

    preempted: int
    states: tuple[str, ...]
    submitted: int
    samples: int
    repeated: int
    digest: str


def settings() -> str:
    """Return the lines of slurm.conf: a partition for each mode."""
    lines = [
        f"PartitionName={name} Nodes=ALL State=UP PriorityTier=1 PreemptMode={mode} GraceTime={grace}"
        for name, (mode, grace) in MODES.items()
    ]
    return SETTINGS + "\n".join(lines)


class PreemptedJob:
    """A training in `home` in the partition of a mode."""

    def __init__(self, cluster: Cluster, home: Path, mode: str) -> None:
        self._cluster, self._home, self._mode = cluster, home, mode
        home.mkdir()
        self.submitted = 0
        self.states: list[str] = []
        self._job = ""

    def submit(self) -> None:
        """Submit the training; the second time, the same command."""
        options = ["--nodes", "2", "-n", "2", "--time", "1:00:00", "-p", self._mode]
        options += ["--directive=--exclusive", "--run", "jobs", "train.py", "--", *TRAINING]
        self._job = submit(self._cluster, self._home, *options, "--pace", str(PACE))
        self.submitted += 1

    def look(self) -> str:
        """Return the state of the job, and remember each new one."""
        said = self._cluster.run(["scontrol", "show", "job", self._job]).stdout
        found = re.search(r"JobState=(\w+)", said)
        state = found[1] if found else "unknown"
        if not self.states or self.states[-1] != state:
            self.states.append(state)
        return state

    def preempt(self) -> None:
        """Submit a job of a higher priority for one of its nodes."""
        nodes = nodes_of(self._cluster, self._job)
        preempt(self._cluster, Target(element=0, job="", nodes=nodes))

    def step(self) -> int:
        """Return the last step of rank 0 in the latest attempt; 0 before the first one."""
        lines = read_lines(self._home)
        return lines[-1].step if lines else 0

    def end(self) -> tuple[int, int, str]:
        """Return the samples repeated or missed, the steps repeated, and the SHA-256 of the end."""
        lines = read_lines(self._home)
        repeated = len(lines) - len({line.step for line in lines})
        samples = sum(count_samples(self._home, EPOCHS))
        return samples, repeated, digest_end(self._home)


def run_preempted(cluster: Cluster, home: Path, mode: str, seed: int) -> PreemptedRun:
    """Train, preempt the job once, and wait for the end."""
    job = PreemptedJob(cluster, home, mode)
    job.submit()
    first = random.Random(seed).randint(FIRST, LAST)
    until = time.monotonic() + LIMIT
    preempted = 0
    while time.monotonic() < until:
        state = job.look()
        if not preempted and job.step() >= first:
            preempted = job.step()
            job.preempt()
        if state in OVER and job.submitted == 1:
            job.submit()
        elif state == "COMPLETED":
            break
        time.sleep(_PAUSE)
    else:
        raise SystemExit(f"late: {job.states}; {home}")
    samples, repeated, digest = job.end()
    return PreemptedRun(
        preempted=preempted,
        states=tuple(job.states),
        submitted=job.submitted,
        samples=samples,
        repeated=repeated,
        digest=digest,
    )


def row(mode: str, runs: Sequence[PreemptedRun], calm: str) -> dict[str, Any]:
    """Return the row of a mode."""
    kind, grace = MODES[mode]
    return {
        "mode": kind,
        "grace, s": grace,
        "runs": len(runs),
        "steps repeated": sum(run.repeated for run in runs),
        "back in the queue": sum(run.submitted == 1 for run in runs),
        "submitted again": sum(run.submitted - 1 for run in runs),
        "samples": sum(run.samples for run in runs),
        "same bits": f"{sum(run.digest == calm for run in runs)} of {len(runs)}",
    }


def main() -> None:
    given = parse(__doc__, modes=MODES, seeds=3, home=Path)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        home = (given.home or Path(temporary, "home")).absolute()
        home.mkdir(parents=True)
        calm = train_undisturbed(home / "calm", *TRAINING)
        with started(3, settings=settings()) as cluster:
            for mode in given.modes:
                runs = [
                    run_preempted(cluster, home / f"{mode}-{seed}", mode, seed)
                    for seed in range(given.seeds)
                ]
                print(*runs, sep="\n", flush=True)
                rows.append(row(mode, runs, calm))
    show(versions("shoal", "torch"), rows)
    finish(given, {"chaos_preempt": rows})


if __name__ == "__main__":
    main()

"""Preemption by Slurm with REQUEUE or CANCEL, with and without a grace period: what is lost?

    python benchmarks/chaos_preempt.py [--seeds 3] [--modes cancel-10,cancel-0] [--json]

The cluster is the one of the tests: each node is a slurmd in namespaces on this machine. `shoal submit`
starts a training on two nodes. After a step that the seed draws, a job of a higher priority takes one
of the nodes. If the training does not return to the queue, it is submitted again, as by a user. Needs
root, Slurm, munge and iproute2.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos_slurm import Target, preempt, read_lines
from chaos_training import SCRIPT, count_samples, print_results
from shoal.tools.chaos.final_state import digest_end

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from helpers.cluster.slurm import Cluster  # noqa: E402

EPOCHS = 10
PACE = 0.5
"""Seconds that are added to each step."""
MTBF = 1000.0
"""The script saves by Young and Daly, about every tenth step, so that a save in time is seen."""
FIRST, LAST = 10, 40
LIMIT = 400.0
MODES = {
    f"{mode}-{grace}": (mode.upper(), grace) for mode in ("requeue", "cancel") for grace in (10, 0)
}
SETTINGS = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
HEAD = (
    "mode",
    "grace",
    "runs",
    "steps repeated",
    "back in the queue",
    "submitted again",
    "samples",
    "same bits",
)
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
        (home / "train.py").write_text(SCRIPT.read_text())
        self.submitted = 0
        self.states: list[str] = []
        self._job = ""

    def submit(self) -> None:
        """Submit the training; the second time, the same command."""
        command = [sys.executable, "-m", "shoal", "submit", "--nodes", "2", "-n", "2"]
        command += ["--time", "1:00:00", "-p", self._mode, "--directive=--exclusive", "--run", "jobs"]
        command += ["train.py", "--", "--epochs", str(EPOCHS), "--pace", str(PACE), "--mtbf", str(MTBF)]
        variables = {name: str(self._home / name) for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME")}
        done = self._cluster.run(command, folder=self._home, variables=variables)
        if done.returncode:
            raise SystemExit(done.stderr)
        self._job = done.stdout.split()[1].rstrip(":")
        self.submitted += 1

    def look(self) -> str:
        """Return the state of the job, and remember each new one."""
        said = self._cluster.run(["scontrol", "show", "job", self._job]).stdout
        found = re.search(r"JobState=(\w+)", said)
        state = found[1] if found else "unknown"
        if not self.states or self.states[-1] != state:
            self.states.append(state)
        return state

    def nodes(self) -> list[str]:
        """Return the nodes of the running job."""
        said = self._cluster.run(["squeue", "-h", "-j", self._job, "-o", "%N"]).stdout.strip()
        return self._cluster.run(["scontrol", "show", "hostnames", said]).stdout.split()

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
            preempt(cluster, Target(element=0, job="", nodes=job.nodes()))
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


def train_undisturbed(home: Path) -> str:
    """Train on two ranks outside of the cluster and return the SHA-256 of the end."""
    home.mkdir()
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", str(SCRIPT), "--"]
    with (home / "output.txt").open("wb") as output:
        command += ["--epochs", str(EPOCHS), "--mtbf", str(MTBF)]
        subprocess.run(command, cwd=home, stdout=output, stderr=output, check=True)
    return digest_end(home)


def row(mode: str, runs: Sequence[PreemptedRun], calm: str) -> tuple[str, ...]:
    """Return the row of a mode."""
    kind, grace = MODES[mode]
    return (
        kind,
        f"{grace} s",
        str(len(runs)),
        str(sum(run.repeated for run in runs)),
        str(sum(run.submitted == 1 for run in runs)),
        str(sum(run.submitted - 1 for run in runs)),
        str(sum(run.samples for run in runs)),
        f"{sum(run.digest == calm for run in runs)} of {len(runs)}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--home", type=Path, help="a new directory, which is kept")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        home = (options.home or Path(temporary, "home")).absolute()
        home.mkdir(parents=True)
        calm = train_undisturbed(home / "calm")
        with Cluster(Path(temporary, "cluster"), nodes=3, settings=settings()) as cluster:
            for mode in options.modes.split(","):
                runs = [
                    run_preempted(cluster, home / f"{mode}-{seed}", mode, seed)
                    for seed in range(options.seeds)
                ]
                print(*runs, sep="\n", flush=True)
                rows.append(row(mode, runs, calm))
    print_results(HEAD, rows, as_json=options.json)


if __name__ == "__main__":
    main()

"""Faults of a Slurm cluster on which jobs train: at random, or a preemption of each kind.

    python benchmarks/chaos_slurm.py [--minutes 30] [--seed 0] [--home DIR] [--json]
    python benchmarks/chaos_slurm.py --what preemption [--seeds 3] [--modes cancel-10 cancel-0]

storm: nodes killed, links cut, jobs preempted while an array of jobs trains. `shoal submit` starts an
array with one element per strategy, on two nodes with one rank each, and nothing is submitted again by
hand. A step takes PACE seconds, most of which a sleep adds. All faults end with the storm, and then the
jobs have time to end.

preemption: `shoal submit` starts a training on two nodes. After a step that the seed draws, a job of a
higher priority takes one of the nodes, with REQUEUE or CANCEL, and with and without a grace period. If
the training does not return to the queue, it is submitted again, as by a user.

`--home` is a new directory, which is kept. Needs what cluster.py needs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from cluster import Line, nodes_of, read_lines, started, submit, wait_for
from disturbed import SCRIPT, count_samples, damaged
from harness import finish, parse, show, versions
from helpers.cluster.slurm import Cluster
from shoal.distributed.cluster_env import expand_hosts
from shoal.telemetry.events import read_events
from shoal.tools.chaos.final_state import digest_end

STRATEGIES = ("ddp", "fsdp", "tensor", "pipeline")
NODES = 10
"""Two for each element, and two to replace nodes that are down."""
STEPS_PER_EPOCH = 6
PACE = 1.0
FILLED = 0.6
"""The steps of a training without faults, as a fraction of the storm."""
GAP = 20.0
"""Mean seconds between faults."""
SILENCE = 10
LIMIT = 1500.0
"""Seconds after the storm within which all jobs have to end."""
URGENT = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=DEFAULT GraceTime=10
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10"""
RECENT = 5.0
PREEMPTED_EPOCHS, PREEMPTED_PACE, PREEMPTED_LIMIT = 10, 0.5, 400.0
# The script saves by Young and Daly, about every tenth step, so that a save in time is seen.
PREEMPTED = ("--epochs", str(PREEMPTED_EPOCHS), "--mtbf", "1000")
FIRST, LAST = 10, 40
"""The steps after which a job is preempted."""
MODES = {
    f"{mode}-{grace}": (mode.upper(), grace) for mode in ("requeue", "cancel") for grace in (10, 0)
}
PREEMPTING = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF"""
OVER = ("PREEMPTED", "CANCELLED", "FAILED", "TIMEOUT")
_PAUSE = 0.1


@dataclass(frozen=True, kw_only=True)
class Target:
    """A running element of the array, and its nodes; a fault of a node hits the first one."""

    element: int
    job: str
    nodes: list[str]


@dataclass(frozen=True, kw_only=True)
class ClusterFault:
    """A fault and its end, after a number of seconds between the bounds of `lasts`."""

    text: str
    begin: Callable[[Cluster, Target], object]
    end: Callable[[Cluster, Target], object] = lambda cluster, target: None
    lasts: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Happened:
    """A fault that has happened, and the Unix time."""

    kind: str
    element: int
    job: str
    nodes: list[str]
    at: float


def kill_rank(cluster: Cluster, target: Target) -> None:
    """Kill the processes of a rank, but not the shells and daemons around it."""
    for process in cluster.running(target.nodes[0], "train.py"):
        with suppress(psutil.Error):
            if process.name().startswith("python"):
                process.kill()


def preempt(cluster: Cluster, node: str) -> None:
    """Submit a job of a higher priority for a node."""
    wanted = ["-p", "urgent", "-w", node, "--exclusive", "-o", "/dev/null"]
    cluster.run(["sbatch", *wanted, "--wrap", "sleep 5"])


def commanded(*words: str) -> ClusterFault:
    """Return the fault that a command of Slurm causes for a job."""
    return ClusterFault(
        text=f"`{' '.join(words)}`", begin=lambda cluster, target: cluster.run([*words, target.job])
    )


FAULTS = {
    "node": ClusterFault(
        text="node killed, and back after 3 to 30 s",
        begin=lambda cluster, target: cluster.kill(target.nodes[0]),
        end=lambda cluster, target: cluster.revive(target.nodes[0]),
        lasts=(3.0, 30.0),
    ),
    "slurmd": ClusterFault(
        text="slurmd killed, and back after 3 to 30 s",
        begin=lambda cluster, target: cluster.kill_slurmd(target.nodes[0]),
        end=lambda cluster, target: cluster.revive_slurmd(target.nodes[0]),
        lasts=(3.0, 30.0),
    ),
    "link": ClusterFault(
        text="link of a node cut for 2 to 25 s",
        begin=lambda cluster, target: cluster.network.cut(target.nodes[0]),
        end=lambda cluster, target: cluster.network.mend(target.nodes[0]),
        lasts=(2.0, 25.0),
    ),
    "one-way": ClusterFault(
        text="TCP from one node to the other dropped for 2 to 25 s",
        begin=lambda cluster, target: cluster.network.drop(
            target.nodes[0], "1-65534", source=target.nodes[1]
        ),
        end=lambda cluster, target: cluster.network.accept(
            target.nodes[0], "1-65534", source=target.nodes[1]
        ),
        lasts=(2.0, 25.0),
    ),
    "rank": ClusterFault(text="SIGKILL to a rank", begin=kill_rank),
    "usr1": commanded("scancel", "--signal=USR1"),
    "term": commanded("scancel", "--signal=TERM"),
    "requeue": commanded("scontrol", "requeue"),
    "preempt": ClusterFault(
        text="preempted (`REQUEUE`, 10 s of grace)",
        begin=lambda cluster, target: preempt(cluster, target.nodes[0]),
    ),
}


class SlurmStorm:
    """The faults of one storm over the array `job`."""

    def __init__(self, cluster: Cluster, job: str, seed: int) -> None:
        self._cluster, self._job = cluster, job
        self._draw = random.Random(seed)
        self._open: list[tuple[float, ClusterFault, Target]] = []
        self.happened: list[Happened] = []

    def run(self, seconds: float) -> float:
        """Inject faults until the time is over or the array has ended; return the Unix time."""
        until = time.monotonic() + seconds
        following = self._next()
        while time.monotonic() < until and self.left():
            self._end_faults(time.monotonic())
            if time.monotonic() >= following:
                self._inject()
                following = self._next()
            time.sleep(_PAUSE)
        self._end_faults(math.inf)
        return time.time()

    def left(self) -> list[str]:
        """Return the elements that have not ended."""
        return self._queue(["-o", "%i"])

    def following(self, fault: Happened) -> float:
        """Return the time of the next fault of the same element."""
        times = [e.at for e in self.happened if e.element == fault.element and e.at > fault.at]
        return min(times, default=math.inf)

    def _next(self) -> float:
        return time.monotonic() + self._draw.expovariate(1 / GAP)

    def _queue(self, options: Sequence[str]) -> list[str]:
        done = self._cluster.run(["squeue", "-h", "-r", "-j", self._job, *options])
        if done.returncode:
            return [] if "Invalid job id" in done.stderr else ["unknown"]
        return done.stdout.splitlines()

    def _targets(self) -> list[Target]:
        hurt = {node for _, _, target in self._open for node in target.nodes}
        found = []
        for line in self._queue(["-t", "RUNNING", "-o", "%i %N"]):
            job, _, names = line.partition(" ")
            nodes = expand_hosts(names) if names else []
            if len(nodes) == 2 and not hurt & set(nodes):
                found.append(Target(element=int(job.partition("_")[2]), job=job, nodes=nodes))
        return found

    def _inject(self) -> None:
        kind = self._draw.choice(list(FAULTS))
        lasts = self._draw.uniform(*FAULTS[kind].lasts)
        which, swapped = self._draw.random(), self._draw.random() < 0.5
        targets = self._targets()
        if not targets:
            return
        target = targets[int(which * len(targets))]
        if swapped:
            target = Target(element=target.element, job=target.job, nodes=target.nodes[::-1])
        self.happened.append(Happened(kind=kind, at=time.time(), **asdict(target)))
        print(f"{time.strftime('%H:%M:%S')} {kind} {target} for {lasts:.1f} s", flush=True)
        FAULTS[kind].begin(self._cluster, target)
        self._open.append((time.monotonic() + lasts, FAULTS[kind], target))

    def _end_faults(self, now: float) -> None:
        for each in [each for each in self._open if each[0] <= now]:
            self._open.remove(each)
            each[1].end(self._cluster, each[2])


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Whether a fault hit a training that was taking steps, whether it ended the attempt, and when the
    next step came; in a new attempt, the first one that is not a repetition."""

    training: bool
    ended: bool
    seconds: float


def recovery(lines: Sequence[Line], at: float, following: float) -> Recovery | None:
    """Return what came of a fault, before the following one; None if no step came after it."""
    before = [line for line in lines if line.at <= at]
    attempt = max((line.attempt for line in before), default=0)
    mine = [line for line in lines if line.attempt <= attempt]
    ended = max((line.at for line in mine), default=at) < following
    later = [line for line in lines if line.attempt > attempt]
    if later and ended:
        done = max((line.step for line in mine), default=0)
        new = [line.at for line in later if line.step > done]
    else:
        ended = False
        new = [line.at for line in mine if line.at > at]
    if not new:
        return None
    training = any(line.at > at - RECENT for line in before)
    return Recovery(training=training, ended=ended, seconds=min(new) - at)


def goodput(
    lines: Sequence[Line], until: float, blocked: float, interval: float
) -> tuple[float, float]:
    """Return the measured goodput up to a time, and that of Daly's model.

    The model has the measured time of a step, mean time between failures, time to restart, interval
    between saves and time for which a save blocks (Daly 2006, equation 20).
    """
    lines = [line for line in lines if line.at <= until]
    pairs = list(pairwise(lines))
    step = statistics.median(b.at - a.at for a, b in pairs if a.attempt == b.attempt)
    restarts = [max(0.0, b.at - a.at) for a, b in pairs if a.attempt != b.attempt]
    end = min(until, max(line.at for line in lines))
    window = end - min(line.at for line in lines)
    measured = max(line.step for line in lines) * step / window
    if not restarts:
        return measured, interval / (interval + blocked)
    mtbf = (window - sum(restarts)) / len(restarts)
    restart = statistics.mean(restarts)
    time_of_interval = (mtbf + restart) * math.expm1((interval + blocked) / mtbf)
    return measured, interval / time_of_interval


def fault_rows(storm: SlurmStorm, homes: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each kind of fault.

    Those not in training came while the training was starting again after an earlier fault.
    """
    lines = [read_lines(home) for home in homes]
    rows: list[dict[str, Any]] = []
    for kind, fault in FAULTS.items():
        found = [each for each in storm.happened if each.kind == kind]
        known = [recovery(lines[each.element], each.at, storm.following(each)) for each in found]
        after = [each for each in known if each is not None and each.training]
        seconds = [each.seconds for each in after]
        rows.append(
            {
                "fault": fault.text,
                "times": len(found),
                "in training": len(after),
                "ended it": sum(each.ended for each in after),
                "median until a new step, s": statistics.median(seconds) if seconds else None,
                "longest, s": max(seconds, default=None),
            }
        )
    return rows


def job_row(
    number: int, home: Path, calm: str, storm: SlurmStorm, ended: float, epochs: int
) -> dict[str, Any]:
    """Return the row of an element of the array."""
    lines = read_lines(home)
    events = list(read_events(home / "runs/a/events/rank-0.jsonl"))
    saves = [each for each in events if each.get("event") == "save"]
    blocked = statistics.median(each["blocked"] for each in saves)
    gaps = [b["t"] - a["t"] for a, b in pairwise(saves)]
    measured, modelled = goodput(lines, ended, blocked, statistics.median(gaps))
    return {
        "strategy": STRATEGIES[number],
        "faults": sum(each.element == number for each in storm.happened),
        "starts": len({line.attempt for line in lines}),
        "steps needed": epochs * STEPS_PER_EPOCH,
        "steps taken": len(lines),
        "samples": sum(count_samples(home, epochs)),
        "corrupt": len(damaged(home / "runs/a/checkpoints")),
        "same bits": "yes" if digest_end(home) == calm else "NO",
        "goodput": f"{measured:.0%}",
        "Young-Daly": f"{modelled:.0%}",
    }


def train_undisturbed(home: Path, *options: str) -> str:
    """Train on two ranks in a new directory, outside of the cluster; return the SHA-256 of the end."""
    home.mkdir()
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", str(SCRIPT), "--", *options]
    with (home / "output.txt").open("wb") as output:
        subprocess.run(command, cwd=home, stdout=output, stderr=output, check=True)
    return digest_end(home)


def submit_array(cluster: Cluster, home: Path, epochs: int) -> str:
    """Submit the array and return its job number."""
    sweep = [f"--home {name} --strategy {name}" for name in STRATEGIES]
    (home / "sweep.txt").write_text("\n".join(sweep) + "\n")
    options = ["--nodes", "2", "-n", "2", "--time", "24:00:00", "--directive=--exclusive"]
    options += ["--restarts", "1000", "--run", "jobs", "--sweep", "sweep.txt", "train.py", "--"]
    mtbf = str(GAP * len(STRATEGIES))
    script = ["--epochs", str(epochs), "--pace", str(PACE), "--mtbf", mtbf]
    return submit(cluster, home, *options, *script)


def run_storm(given: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Inject faults at random while an array trains; return a row for each fault, and for each job."""
    epochs = max(1, round(given.minutes * 60 * FILLED / PACE / STEPS_PER_EPOCH))
    options = ("--epochs", str(epochs), "--mtbf", "100")
    with started(NODES, silence=SILENCE, settings=URGENT) as cluster, ThreadPoolExecutor(1) as pool:
        calm = [
            pool.submit(train_undisturbed, home / f"calm-{name}", "--strategy", name, *options)
            for name in STRATEGIES
        ]
        storm = SlurmStorm(cluster, submit_array(cluster, home, epochs), given.seed)
        ended = storm.run(60 * given.minutes)
        print(f"{time.strftime('%H:%M:%S')} the storm is over", flush=True)
        wait_for(lambda: not storm.left(), LIMIT, "the end of all jobs")
    homes = [home / name for name in STRATEGIES]
    (home / "faults.json").write_text(json.dumps([asdict(each) for each in storm.happened]))
    jobs = [
        job_row(number, each, calm[number].result(), storm, ended, epochs)
        for number, each in enumerate(homes)
    ]
    return {"faults": fault_rows(storm, homes), "jobs": jobs}


def run_preempted(cluster: Cluster, home: Path, mode: str, seed: int) -> dict[str, Any]:
    """Train, preempt the job once, and wait for the end; return what was lost."""
    home.mkdir()
    options = ["--nodes", "2", "-n", "2", "--time", "1:00:00", "-p", mode, "--directive=--exclusive"]
    options += ["--run", "jobs", "train.py", "--", *PREEMPTED, "--pace", str(PREEMPTED_PACE)]
    first = random.Random(seed).randint(FIRST, LAST)
    jobs, preempted = [submit(cluster, home, *options)], False

    def ended() -> bool:
        nonlocal preempted
        said = cluster.run(["scontrol", "show", "job", jobs[-1]]).stdout
        state = re.search(r"JobState=(\w+)", said)
        lines = read_lines(home)
        if not preempted and lines and lines[-1].step >= first:
            preempted = True
            preempt(cluster, nodes_of(cluster, jobs[-1])[0])
        if state and state[1] in OVER and len(jobs) == 1:
            jobs.append(submit(cluster, home, *options))
        return state is not None and state[1] == "COMPLETED"

    wait_for(ended, PREEMPTED_LIMIT, f"the end of {home}")
    lines = read_lines(home)
    return {
        "steps repeated": len(lines) - len({line.step for line in lines}),
        "back in the queue": len(jobs) == 1,
        "submitted again": len(jobs) - 1,
        "samples": sum(count_samples(home, PREEMPTED_EPOCHS)),
        "same bits": digest_end(home),
    }


def run_preemptions(given: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Return a row for each mode of preemption."""
    calm = train_undisturbed(home / "calm", *PREEMPTED)
    partitions = [
        f"PartitionName={name} Nodes=ALL State=UP PriorityTier=1 PreemptMode={mode} GraceTime={grace}"
        for name, (mode, grace) in MODES.items()
    ]
    rows = []
    with started(3, settings="\n".join([PREEMPTING, *partitions])) as cluster:
        for mode in given.modes:
            runs = [
                run_preempted(cluster, home / f"{mode}-{seed}", mode, seed)
                for seed in range(given.seeds)
            ]
            sums = {name: sum(run[name] for run in runs) for name in list(runs[0])[:-1]}
            kind, grace = MODES[mode]
            same = sum(run["same bits"] == calm for run in runs)
            rows.append({"mode": kind, "grace, s": grace, "runs": len(runs), **sums, "same bits": same})
    return {"preemptions": rows}


def main() -> None:
    storm = {"minutes": 30.0, "seed": 0}
    given = parse(__doc__, what=("storm", "preemption"), **storm, modes=MODES, seeds=3, home=Path)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        home = (given.home or Path(temporary, "home")).absolute()
        home.mkdir(parents=True)
        figures = (run_storm if given.what == "storm" else run_preemptions)(given, home)
    for title, rows in figures.items():
        show(f"{title}, {versions('shoal', 'torch')}", rows)
    finish(given, figures)


if __name__ == "__main__":
    main()

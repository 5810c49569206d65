"""The goodput of a job on a Slurm cluster under a failure trace, and the one that a rehearsal predicts.

    python benchmarks/plan_rehearsal.py [--minutes 20] [--seed 0] [--home DIR] [--json]

`shoal submit` starts one job on two of three nodes, with one rank each. First, the step, the save and
the restart are measured: on undisturbed steps, and on one node that is killed. Then the nodes of a
seeded trace are killed, and come back, at its times. The rehearsal gets the measured values and the
same trace. A step takes PACE seconds, most of which a sleep adds. `--home` is a new directory, which is
kept. Needs what cluster.py needs.
"""

from __future__ import annotations

import csv
import os
import random
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster import Line, nodes_of, read_lines, started, submit, wait_for
from harness import finish, parse, show, versions
from helpers.cluster.slurm import Cluster
from shoal.telemetry.events import read_events
from shoal.tools.plan.training.rehearsal import Fleet, read_trace, rehearse
from shoal.training.save_policy import YoungDaly

POOL, USED = 3, 2
PACE = 1.0
UNDISTURBED = 40
"""Steps before the first kill."""
GAP = 120.0
"""Mean seconds between two kills."""
OUTAGE = (40.0, 120.0)
MTBF = GAP * POOL / USED
LIMIT = 400.0

Outage = tuple[float, int, float]
"""A kill: seconds from the begin, the node's index, and the seconds until it is back."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Unix times of a run, the seconds of its trace, and the job's nodes when the trace began."""

    submitted: float
    killed: float
    begun: float
    seconds: float
    nodes: list[int]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of a step, a save, from submission to the first step, from a kill to the next step."""

    step: float
    save: float
    start: float
    restart: float


def draw_trace(seed: int, seconds: float) -> list[Outage]:
    """Return kills of nodes that are up, exponentially distributed."""
    draw = random.Random(seed)
    found: list[Outage] = []
    back = [0.0] * POOL
    at = draw.expovariate(1 / GAP)
    while at < seconds:
        up = [node for node in range(POOL) if back[node] <= at]
        lasts = draw.uniform(*OUTAGE)
        if up:
            node = draw.choice(up)
            back[node] = at + lasts
            found.append((round(at, 1), node, round(lasts, 1)))
        at += draw.expovariate(1 / GAP)
    return found


def write_trace(trace: Sequence[Outage], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("at", "node", "back"))
        writer.writerows(trace)


def submit_job(cluster: Cluster, home: Path) -> str:
    """Submit the job and return its number."""
    options = ["--nodes", str(USED), "-n", str(USED), "--time", "24:00:00", "--directive=--exclusive"]
    options += ["--restarts", "1000", "--run", "jobs", "train.py", "--", "--epochs", "100000"]
    options += ["--home", str(home / "training"), "--pace", str(PACE), "--mtbf", str(MTBF)]
    return submit(cluster, home, *options)


def replay(cluster: Cluster, job: str, trace: Sequence[Outage], seconds: float) -> None:
    """Kill and revive nodes at the times of the trace."""
    kills = [(at, node, True) for at, node, _ in trace]
    returns = [(at + lasts, node, False) for at, node, lasts in trace]
    begun = time.time()
    for at, node, kill in sorted(kills + returns):
        if at > seconds:
            continue
        time.sleep(max(0.0, begun + at - time.time()))
        name = cluster.nodes[node]
        what = "is killed" if kill else "is back"
        state = cluster.run(["squeue", "-h", "-j", job, "-o", "%T %r %N"]).stdout.strip()
        print(f"{time.strftime('%H:%M:%S')} {name} {what}; job: {state}", flush=True)
        (cluster.kill if kill else cluster.revive)(name)
    time.sleep(max(0.0, begun + seconds - time.time()))


def measure_restart(cluster: Cluster, job: str, home: Path) -> float:
    """Kill a node of the job, wait for its next attempt, and return the Unix time of the kill."""
    wait_for(lambda: len(read_lines(home / "training")) >= UNDISTURBED, LIMIT, "undisturbed steps")
    victim = nodes_of(cluster, job)[0]
    killed = time.time()
    cluster.kill(victim)
    wait_for(
        lambda: max(line.attempt for line in read_lines(home / "training")) > 1, LIMIT, "a restart"
    )
    cluster.revive(victim)
    wait_for(lambda: "down" not in cluster.run(["sinfo", "-h", "-o", "%T"]).stdout, LIMIT, "all nodes")
    return killed


def record(seconds: float, home: Path, trace: Sequence[Outage]) -> Record:
    """Run the job under the trace and return what was recorded."""
    with started(POOL) as cluster:
        submitted = time.time()
        job = submit_job(cluster, home)
        killed = measure_restart(cluster, job, home)
        begun = time.time()
        print(f"{time.strftime('%H:%M:%S')} the trace begins", flush=True)
        nodes = [cluster.nodes.index(name) for name in nodes_of(cluster, job)]
        replay(cluster, job, trace, seconds)
        cluster.run(["scancel", job])
    return Record(submitted=submitted, killed=killed, begun=begun, seconds=seconds, nodes=nodes)


def measure(lines: Sequence[Line], found: Record, home: Path) -> Measured:
    """Return the values that were measured before the trace began."""
    before = [line for line in lines if line.at < found.begun]
    pairs = list(pairwise(before))
    events = read_events(home / "training/runs/a/events/rank-0.jsonl")
    saves = [e["blocked"] for e in events if e.get("event") == "save" and e["t"] < found.begun]
    return Measured(
        step=statistics.median(b.at - a.at for a, b in pairs if a.attempt == b.attempt),
        save=statistics.median(saves),
        start=before[0].at - found.submitted,
        restart=next(b.at for a, b in pairs if a.attempt != b.attempt) - found.killed,
    )


def rehearsed_steps(measured: Measured, found: Record, trace: Sequence[Outage], home: Path) -> int:
    """Return the number of steps after which the rehearsal with the trace ends just in time.

    The job runs when the trace begins, on the nodes that it then had.
    """
    absent = [node for node in range(POOL) if node not in found.nodes]
    early: list[Outage] = [(0.0, node, measured.start / 2) for node in absent]
    path = home / "shifted.csv"
    write_trace([*early, *((at + measured.start, node, lasts) for at, node, lasts in trace)], path)
    events = read_trace(path, POOL)
    interval = YoungDaly(mtbf=timedelta(seconds=MTBF)).seconds(measured.save)
    fleet = Fleet(
        nodes=USED,
        least=USED,
        restarts=1000,
        wait=0.0,
        start=measured.start,
        restart=measured.restart,
        save=measured.save,
        interval=interval,
    )

    def seconds(steps: int) -> float:
        time, _ = rehearse(fleet, events, POOL, measured.step, steps)
        return time.steps + time.saves + time.repeated + time.restarts + time.waiting

    most = int(found.seconds / measured.step)
    return bisect_right(range(1, most + 1), found.seconds, key=seconds)


def compare(found: Record, trace: Sequence[Outage], home: Path) -> dict[str, Any]:
    """Return a row with the goodput on the cluster and that of the rehearsal."""
    lines = read_lines(home / "training")
    measured = measure(lines, found, home)
    end = found.begun + found.seconds
    reached = [max(line.step for line in lines if line.at < time) for time in (found.begun, end)]
    real = (reached[1] - reached[0]) * measured.step / found.seconds
    predicted = rehearsed_steps(measured, found, trace, home) * measured.step / found.seconds
    attempts = {line.attempt for line in lines if found.begun < line.at < end}
    return {
        "kills": len(trace),
        "restarts": len(attempts) - 1,
        **{f"{name}, s": value for name, value in asdict(measured).items()},
        "goodput": f"{real:.1%}",
        "rehearsed": f"{predicted:.1%}",
        "difference": f"{predicted / real - 1:+.1%}",
    }


def main() -> None:
    given = parse(__doc__, minutes=20.0, seed=0, home=Path)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        home = (given.home or Path(temporary, "home")).absolute()
        home.mkdir(parents=True)
        trace = draw_trace(given.seed, 60 * given.minutes)
        write_trace(trace, home / "trace.csv")
        row = compare(record(60 * given.minutes, home, trace), trace, home)
    show(versions("shoal", "torch"), [row])
    finish(given, {"plan_rehearsal": row})


if __name__ == "__main__":
    main()

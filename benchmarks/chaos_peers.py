"""The same storm over Shoal and other libraries: each script is killed in steps and in saves.

    python benchmarks/chaos_peers.py [--seeds 0 1 2] [--peers Shoal Accelerate] [--sigterm] [--json]

The scripts in benchmarks/peers/ train the same model on two ranks with the checkpoints that each
library's documentation recommends. If the command fails, it starts again, as by a scheduler. If it
fails before its first step, the latest checkpoint is removed, as a user would do. With --sigterm, the
command gets SIGTERM instead, and SIGKILL 30 s later, as in Kubernetes. Needs a C compiler, and
torchdata, accelerate, lightning, transformers and ray[train] for the scripts that use them.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, finish, parse, show, versions
from task import EPOCHS, EVERY, PER_EPOCH, RANKS, SAMPLES, STEPS

SCRIPTS = ROOT / "benchmarks" / "peers"

KILLS = 4
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SHOAL = ("-m", "shoal", "run", "-n")
PEERS = {
    "Shoal": (SHOAL, "run_shoal.py", "shoal"),
    "torchrun + DCP": (TORCHRUN, "run_dcp.py", "torchdata"),
    "Accelerate": (TORCHRUN, "run_accelerate.py", "accelerate"),
    "Fabric": (TORCHRUN, "run_fabric.py", "lightning"),
    "Lightning": (TORCHRUN, "run_lightning.py", "lightning"),
    "HF Trainer": (TORCHRUN, "run_trainer.py", "transformers"),
    "HF Trainer JIT": (TORCHRUN, "run_trainer.py --jit", "transformers"),
    "Ray Train": ((), "run_ray.py", "ray"),
    "Shoal-on-Ray": ((), "run_ray_shoal.py", "ray"),
}
LIMIT = 900.0
GRACE = 30.0
PACE = 0.5
"""Seconds that are added to a step with --sigterm, so that a training is longer than GRACE."""
MOST_STARTS = 16
PAUSE = 0.05


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A training: its final parameters, and the figures of its way there."""

    digest: str
    parameters: list[float]
    kills: int
    in_saves: int
    taken: int
    repeated: int
    skipped: int
    removed: int
    restarts: list[float]
    operations: list[str]
    problem: str


class Peer:
    """One library: starts its script in empty directories, under kills."""

    def __init__(self, name: str, shim: Path, folder: Path, pace: float) -> None:
        self._launcher, self._script, _ = PEERS[name]
        self._shim, self._folder, self._pace = shim, folder, pace

    def train(self, name: str, kills: Sequence[str], *, ranks: int = RANKS) -> Ended:
        """Start the script until it ends."""
        home, control = self._folder / name / "home", self._folder / name / "control"
        home.mkdir(parents=True)
        control.mkdir()
        removed = 0
        for _ in range(MOST_STARTS):
            taken = count_lines(control)
            code, output = self._start(home, control, kills, ranks)
            if code in (0, 124):
                problem = f"exit code {code}: {output[-2000:]}" if code else ""
                return summarize(control, kills, removed, problem, ranks)
            written = sorted(home.glob("checkpoints/*"), key=lambda path: path.stat().st_mtime)
            if count_lines(control) > taken or not written:
                continue
            print(f"removed {written[-1]} after: {output[-1500:]}", file=sys.stderr, flush=True)
            removed += 1
            shutil.rmtree(written[-1]) if written[-1].is_dir() else written[-1].unlink()
        return summarize(control, kills, removed, f"it did not end in {MOST_STARTS} starts", ranks)

    def _start(self, home: Path, control: Path, kills: Sequence[str], ranks: int) -> tuple[int, str]:
        launcher = (*self._launcher, str(ranks)) if self._launcher else ()
        variables = {
            "LD_PRELOAD": str(self._shim),
            "OMP_NUM_THREADS": "1",
            "STORM_CONTROL": str(control),
            "STORM_DIR": f"{home}/",
            "STORM_KILLS": ",".join(kills),
            "STORM_PACE": str(self._pace),
            "STORM_RANKS": str(ranks),
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": tempfile.gettempdir(),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with (control / "output.txt").open("a") as output:
            process = subprocess.Popen(
                [sys.executable, *launcher, *f"{SCRIPTS}/{self._script}".split()],
                cwd=home,
                env=os.environ | variables,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = wait_or_terminate(process, control, kills)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, (control / "output.txt").read_text(errors="replace")


def wait_or_terminate(process: subprocess.Popen[bytes], control: Path, kills: Sequence[str]) -> int:
    """Return the exit code, 124 after LIMIT; the process gets SIGTERM if a kill "term" is due."""
    before = len(list(control.glob("killed-*")))
    until, asked = time.monotonic() + LIMIT, False
    while time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(PAUSE)
        due = kills[before : len(list(control.glob("killed-*")))]
        if due and due[0].startswith("term") and not asked:
            process.terminate()
            until, asked = time.monotonic() + GRACE, True
    return 137 if asked else 124


def count_lines(control: Path) -> int:
    """Return how many steps ranks have begun."""
    return sum(len(file.read_text().splitlines()) for file in control.glob("steps-*.jsonl"))


def summarize(control: Path, kills: Sequence[str], removed: int, problem: str, ranks: int) -> Ended:
    """Return the figures of a training that has ended."""
    lines: list[tuple[int, int, int, float, list[int]]] = []
    for rank in range(ranks):
        text = (control / f"steps-{rank}.jsonl").read_text()
        lines += [(rank, *json.loads(line)) for line in text.splitlines()]
    last: dict[int, int] = {}
    for _, attempt, step, _, _ in lines:
        last[step] = max(attempt, last.get(step, 0))
    counts = Counter(
        ((step - 1) // PER_EPOCH, index)
        for _, attempt, step, _, indices in lines
        if attempt == last[step]
        for index in indices
    )
    happened = sorted(control.glob("killed-*"), key=lambda path: int(path.name.split("-")[1]))
    restarts = []
    for file in happened:
        at = file.stat().st_mtime
        later = [when for _, attempt, _, when, _ in lines if attempt > int(file.name.split("-")[1])]
        restarts += [min(later) - at] if later else []
    end = control / "end.json"
    digest, parameters = json.loads(end.read_text()) if end.exists() else ("", [])
    operations = control / "operations.txt"
    return Ended(
        digest=digest,
        parameters=parameters,
        kills=len(happened),
        in_saves=sum(kill.startswith("save") for kill in kills[: len(happened)]),
        taken=sum(rank == 0 for rank, *_ in lines),
        repeated=sum(count - 1 for count in counts.values()),
        skipped=EPOCHS * SAMPLES - len(counts),
        removed=removed,
        restarts=restarts,
        operations=operations.read_text().splitlines() if operations.exists() else [],
        problem=problem,
    )


def draw_kills(seed: int, calm: Ended, *, sigterm: bool) -> list[str]:
    """Draw two kills in steps, and two at operations of the second or third save of an attempt.

    Or four times SIGTERM in steps.
    """
    draw = random.Random(seed)
    if sigterm:
        return [f"term:0:{draw.randint(EVERY + 3, 2 * EVERY)}" for _ in range(KILLS)]
    mine = [line for line in calm.operations if line.startswith("0 ")]
    save = len(mine) * EVERY // STEPS
    step = f"step:1:{draw.randint(EVERY + 3, 3 * EVERY)}"
    return [step, f"save:0:{draw.randrange(save, 3 * save)}"] * (KILLS // 2)


def largest(trainings: Sequence[Ended], other: Ended) -> str:
    """Return the largest difference between the parameters of trainings and those of another one."""
    found = [
        max(abs(a - b) for a, b in zip(other.parameters, each.parameters, strict=True))
        for each in trainings
        if each.parameters
    ]
    return f"{max(found):.1e}" if found else ""


def row(name: str, one: Ended, calm: Ended, storms: Sequence[Ended]) -> dict[str, Any]:
    """Return the row of a library; samples in addition to those of its undisturbed run.

    `one` is its undisturbed run on one process.
    """
    restarts = [seconds for storm in storms for seconds in storm.restarts]
    ended = [storm for storm in storms if not storm.problem]
    return {
        "library": name,
        "storms": len(storms),
        "kills": sum(storm.kills for storm in storms),
        "in saves": sum(storm.in_saves for storm in storms),
        "steps needed": STEPS * len(ended),
        "steps taken": sum(storm.taken for storm in ended),
        "samples repeated": sum(storm.repeated - calm.repeated for storm in ended),
        "samples skipped": sum(storm.skipped - calm.skipped for storm in ended),
        "checkpoints that did not load": sum(storm.removed for storm in storms),
        "equal ends": sum(storm.digest == calm.digest for storm in storms),
        "largest difference": largest(storms, calm),
        "from one process": largest(storms, one),
        "median restart, s": statistics.median(restarts) if restarts else None,
    }


def main() -> None:
    given = parse(__doc__, peers=PEERS, seeds=[0, 1, 2], sigterm=False)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        shim = Path(temporary, "kill_at_write.so")
        source = str(SCRIPTS / "kill_at_write.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), source, "-ldl"], check=True)
        for name in given.peers:
            peer = Peer(name, shim, Path(temporary, name), PACE if given.sigterm else 0.0)
            one, calm = peer.train("one", [], ranks=1), peer.train("calm", [])
            if problem := one.problem or calm.problem:
                raise SystemExit(f"{name} failed by itself: {problem}")
            kills = {seed: draw_kills(seed, calm, sigterm=given.sigterm) for seed in given.seeds}
            storms = [peer.train(f"storm-{seed}", each) for seed, each in kills.items()]
            rows.append(row(name, one, calm, storms))
            details = [{**asdict(each), "parameters": [], "operations": []} for each in storms]
            print(json.dumps(details), rows[-1], sep="\n", flush=True)
    packages = versions("shoal", "torch", *(PEERS[name][2] for name in given.peers))
    show(f"{packages}, Linux {platform.release()}", rows)
    finish(given, {"chaos_peers": rows})


if __name__ == "__main__":
    main()

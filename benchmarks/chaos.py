"""1,000 kills over parallelism strategies: is the end always that of an undisturbed run?

    python benchmarks/chaos.py --kills 1000          # or: make chaos
    python benchmarks/chaos.py --kills 20 --strategies ddp,fsdp

Each training has a seed. After a kill, it is launched again, on the same or another number of ranks,
until it ends. Every operation of a save is a place for a kill; those with the fewest kills come first.
Trainings that have ended are lines of --results, and a further call continues after them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos_training import Boundaries, Case, DisturbedTraining, count_samples, print_results
from chaos_warm import prepare
from shoal.checkpoint.inspect.diff import compare
from shoal.checkpoint.inspect.manifest import inspect_checkpoint
from shoal.tools.chaos.containment import contain
from shoal.tools.chaos.final_state import digest_end, latest_checkpoint

EPOCHS = 5
CASES = {
    "ddp": Case(name="DDP", args=(), sizes=(2, 3, 4)),
    "ddp-bits": Case(name='DDP, exact="bits"', args=("--exact", "bits"), sizes=(2, 3, 4), bits=True),
    "fsdp": Case(name="FSDP", args=("--strategy", "fsdp"), sizes=(2, 3, 4)),
    "tensor": Case(name="TensorParallel + FSDP", args=("--strategy", "tensor"), sizes=(2, 4)),
    "pipeline": Case(name="Pipeline", args=("--strategy", "pipeline"), sizes=(2, 4)),
    "local": Case(name="LocalSGD", args=("--strategy", "local"), sizes=(2, 3, 4), fixed=True),
}
ROUNDING = 1e-12
HEAD = ("strategy", "kills", "saves", "places", "steps", "data", "corrupt", "bits", "equal")
"""Kills, kills in saves at how many operations of which ranks; steps taken / needed; samples repeated
or missed, corrupt checkpoints; ends with the same bits, or equal to rounding. Nine, for 80 columns."""


class Storm:
    """The trainings of one strategy, and its undisturbed trainings by number of ranks."""

    def __init__(self, folder: Path, key: str, lines: Sequence[dict[str, Any]], *, oom: bool) -> None:
        self._folder, self.key = folder / key, key
        self._kills = [kill for each in lines if each["strategy"] == key for kill in each["kills"]]
        case = CASES[key]
        args = (*case.args, "--epochs", str(EPOCHS))
        self.case = replace(case, args=args, oom=oom)
        self.known: dict[int, Boundaries] = {}
        self.calm: dict[int, DisturbedTraining] = {}

    def survey(self, size: int) -> None:
        """Train undisturbed on a number of ranks."""
        calm = DisturbedTraining(self._folder / f"calm-{size}", self.case, random.Random(0))
        done = calm.launch(size, 0, [], late=False)
        if done.code:
            raise SystemExit(f"{self.case.name} on {size} ranks failed by itself:\n{done.output}")
        self.calm[size] = calm
        self.known[size] = Boundaries()
        self.known[size].add(done.notices, calm=True)
        earlier = [
            (kill["rank"], kill["at"])
            for kill in self._kills
            if kill.get("at") and kill["size"] == size
        ]
        self.known[size].kills.update(earlier)

    def run(self, number: int, seed: str) -> dict[str, Any]:
        """Run one training under kills and return its line of the results."""
        draw = random.Random(seed)
        fixed = self.case.fixed or (not self.case.bits and draw.random() < 0.5)
        sizes = (draw.choice(self.case.sizes),) if fixed else self.case.sizes
        for size in sizes:
            if size not in self.calm:
                self.survey(size)
        began = time.monotonic()
        training = DisturbedTraining(self._folder / str(number), self.case, draw)
        training.run(self.known, sizes)
        line = {
            "training": number,
            "strategy": self.key,
            "seed": seed,
            "ranks": training.sizes,
            "kills": [{"seed": f"{seed} {i}", **kill} for i, kill in enumerate(training.kills)],
            "taken": training.taken,
            "corrupt": training.corrupt,
            "problem": training.problem,
            "seconds": round(time.monotonic() - began, 1),
        }
        if not training.problem:
            line |= self._compare(training, sizes)
        if not line["problem"]:
            shutil.rmtree(self._folder / str(number))
        return line

    def _compare(self, training: DisturbedTraining, sizes: Sequence[int]) -> dict[str, Any]:
        calm = self.calm[sizes[0]]
        repeated, missed = count_samples(training.home, EPOCHS)
        identical = digest_end(training.home) == digest_end(calm.home)
        found = latest_checkpoint(training.checkpoints), latest_checkpoint(calm.checkpoints)
        assert found[0] is not None
        assert found[1] is not None
        compared = compare(inspect_checkpoint(found[1][0]), inspect_checkpoint(found[0][0]))
        # The rest are the number of ranks and their random generators.
        plain = [each for each in compared.plain if each[0].startswith("state/")]
        changed = [each for each in compared.changed if each.name.startswith("state/")]
        difference = max((each.relative for each in changed), default=0.0)
        identical = identical or (self.case.bits and not changed and not plain)
        exact = len(sizes) == 1 or self.case.bits
        problem = ""
        if repeated or missed:
            problem = f"{repeated} samples repeated, {missed} missed"
        elif training.corrupt:
            problem = f"{training.corrupt} corrupt checkpoints"
        elif found[0][1].step != found[1][1].step:
            problem = f"it ended at step {found[0][1].step}"
        elif (exact and not identical) or difference > ROUNDING or plain:
            problem = f"the end differs by {difference:.1e}, and in {plain}"
        return {
            "needed": found[1][1].step,
            "repeated": repeated,
            "missed": missed,
            "identical": identical,
            "promised": exact,
            "difference": difference,
            "problem": problem,
            "boundaries": [sum(map(bool, each.kills.values())) for each in self.known.values()],
            "seen": [len(each.seen) for each in self.known.values()],
        }


def row(name: str, lines: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the row of one or several strategies."""
    kills = [kill for each in lines for kill in each["kills"]]
    ended = [each for each in lines if "needed" in each]
    exact = [each for each in ended if each["promised"]]
    close = [each for each in ended if not each["promised"]]
    places = {
        (each["strategy"], kill["size"], kill["rank"], kill["at"])
        for each in lines
        for kill in each["kills"]
        if kill.get("at")
    }
    taken, needed = (sum(each[key] for each in ended) for key in ("taken", "needed"))
    return (
        name,
        str(len(kills)),
        str(sum(kill["kind"] == "kill-in-save" for kill in kills)),
        str(len(places)),
        f"{taken}/{needed}",
        str(sum(each["repeated"] + each["missed"] for each in ended)),
        str(sum(each["corrupt"] for each in lines)),
        f"{sum(each['identical'] for each in exact)}/{len(exact)}",
        f"{sum(each['difference'] <= ROUNDING for each in close)}/{len(close)}",
    )


def run_storms(options: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """Run trainings until there are enough kills, or the time is over."""
    keys = options.strategies.split(",")
    shutil.rmtree(options.scratch, ignore_errors=True)
    storms = {key: Storm(options.scratch, key, lines, oom=options.oom) for key in keys}
    prepare()
    until = time.monotonic() + 60 * options.minutes
    while time.monotonic() < until and sum(len(each["kills"]) for each in lines) < options.kills:
        number = len(lines)
        key = min(keys, key=lambda key: sum(len(e["kills"]) for e in lines if e["strategy"] == key))
        line = storms[key].run(number, f"{options.seed} {number}")
        lines.append(line)
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        kills, total = len(line["kills"]), sum(len(each["kills"]) for each in lines)
        print(
            f"{time.strftime('%H:%M:%S')} {number} {key}: {kills} kills in {line['seconds']} s, "
            f"{total} in all; {line['problem'] or 'equal'}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="start no training after it")
    parser.add_argument("--strategies", default=",".join(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--oom", action="store_true", help="kills by the kernel for lack of memory")
    parser.add_argument("--results", type=Path, default=Path("build/chaos.jsonl"))
    parser.add_argument("--scratch", type=Path, default=Path("build/chaos"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.getpid() != 1:
        # All processes end with this one, and no signal leaves the PID namespace.
        command = contain([sys.executable, *sys.argv])
        # Libraries must not start threads in the process that forks.
        os.execvpe(
            command[0], command, os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        )
    options.scratch = options.scratch.absolute()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    known = options.results.read_text().splitlines() if options.results.exists() else []
    lines: list[dict[str, Any]] = [json.loads(line) for line in known]
    run_storms(options, lines)
    keys = options.strategies.split(",")
    rows = [row(key, [e for e in lines if e["strategy"] == key]) for key in keys]
    rows.append(row("all", lines))
    print_results(HEAD, rows, as_json=options.json)


if __name__ == "__main__":
    main()

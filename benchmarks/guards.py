"""Random bit flips in small trainings: which guard finds them, and false alarms and cost of guards.

    python benchmarks/guards.py [--flips 100] [--strategies ddp fsdp]
    python benchmarks/guards.py --quiet 10000
    python benchmarks/guards.py --cost 60 --width 512      # seconds; on an idle machine

A flip is in a random bit of a random element of a random tensor of its kind, on a random rank. Memory
flips before the forward pass of a step, at a random module call in it, or before its update;
activations flip when their module returns, gradients before they are accumulated, or before the update.
Each flip is repeated without a guard and with each guard alone, which checks the steps around the flip.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, cast

import torch

import shoal
from guards_training import (
    CASES,
    GUARDS,
    KINDS,
    MICRO_BATCHES,
    Flip,
    GuardedTraining,
    Outcome,
    Recorder,
    draw_flip,
)
from harness import finish, machine, parse, show
from shoal.telemetry.events import Events
from shoal.training.guards.create import create_guards


def measure_flips(training: GuardedTraining, seed: str, flips: int) -> list[dict[str, Any]]:
    """Return the counts of each kind of flip. Collective."""
    world = training.world
    guards = ["continuity"]
    if world.layout.degree("replicate") > 1:
        guards.append("replicas")
    if world.virtual_ranks is not None:
        guards.append("gradients")
    rows = []
    for kind in KINDS:
        row: dict[str, Any] = {guard: [0, 0] for guard in guards}
        row |= {"kind": kind, "flips": 0, "raised": 0, "missed": 0, "unchanged": 0}
        for number in range(flips):
            draw = random.Random(f"{seed} {kind} {number}")
            flip = draw_flip(training.places, kind, draw)
            plain = training.run(None, flip)
            found = False
            for guard in guards:
                outcome = training.run(guard, flip)
                if "CorruptionError" in outcome.errors:
                    found = True
                    row[guard][0] += 1
                    row[guard][1] += is_named(outcome, flip, guard)
            unchanged = plain == training.reference
            row["flips"] += 1
            row["raised"] += bool(plain.errors)
            row["unchanged"] += unchanged
            row["missed"] += not (found or plain.errors or unchanged)
        rows.append(row)
    return rows


def is_named(outcome: Outcome, flip: Flip, guard: str) -> bool:
    """Return whether a guard reported the rank of the flip and no other, and its tensor.

    The tensor is unknown for activations. `gradients` reports gradients only. For optimizer state, the
    parameter is enough, since an update can leave a difference in the parameter alone.
    """
    if outcome.ranks != {flip.rank}:
        return False
    known = flip.kind.startswith("gradient") if guard == "gradients" else flip.kind != "activation"
    name = flip.place.name.rpartition(" of ")[2]
    return not known or any(each.endswith(name) for each in outcome.tensors)


def measure_checks(training: GuardedTraining, given: argparse.Namespace) -> dict[str, Any]:
    """Train with all guards, for `quiet` steps or `cost` seconds; return their checks. Collective."""
    world, recorder = training.world, Recorder()
    options = shoal.Guards(budget=1.0) if given.quiet else shoal.Guards()
    guards = create_guards({"step": training.step}, options, cast(Events, recorder))
    until = time.monotonic() + given.cost
    for number in count(1):
        training.step(training.batches[number % len(training.batches)])
        for guard in guards:
            guard.tick()
        late = number % 100 == 0 and time.monotonic() > until
        if number == given.quiet or (given.cost and number % 100 == 0 and world.broadcast(late)):
            break
    for guard in guards:
        guard.close()
    return {"steps": number, "checks": recorder.of("guards")}


def run_case(name: str, given: argparse.Namespace) -> Any:
    """Measure one strategy on this rank."""
    case = CASES[name]
    torch.set_num_threads(1)
    with shoal.init(
        layout=case.layout,
        device="cpu",
        seed=given.seed,
        timeout=300,
        exact=case.exact,
        virtual_ranks=MICRO_BATCHES * case.ranks,
    ) as world:
        training = GuardedTraining(world, case, width=given.width)
        if given.quiet or given.cost:
            return measure_checks(training, given)
        return measure_flips(training, f"{given.seed} {name}", given.flips)


def flip_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a table: flips that a guard found / with the right rank and tensor."""
    return [
        {"bits flipped in": row["kind"]}
        | {guard: "/".join(map(str, row[guard])) if guard in row else "-" for guard in GUARDS}
        | {"raises": row["raised"], "missed": row["missed"], "no effect": row["unchanged"]}
        for row in rows
    ]


def check_rows(name: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a table: the checks of each guard and their share of the time."""
    return [
        {
            "strategy": name,
            "steps": found["steps"],
            "of": each["checked"],
            "checks": each["checks"],
            "seconds": each["of"],
            "share": f"{each['seconds'] / each['of']:.3%}",
        }
        for each in found["checks"]
    ]


def main() -> None:
    given = parse(__doc__, strategies=CASES, flips=100, seed=0, width=8, quiet=0, cost=0)
    found: dict[str, Any] = {}
    checks: list[dict[str, Any]] = []
    for name in given.strategies:
        found[name] = shoal.launch(run_case, name, given, processes=CASES[name].ranks)[0]
        if given.quiet or given.cost:
            checks += check_rows(CASES[name].name, found[name])
        else:
            show(CASES[name].name, flip_rows(found[name]))
    if checks:
        show(machine(), checks)
    finish(given, {"guards": found})


if __name__ == "__main__":
    main()

"""`shoal plan --try`: the first layouts of the result, measured on this machine or in a Slurm job."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.distributed.env_vars import job_nodes
from shoal.tools.bench.scaling.jobs import LOG, end_job_on_signals, execute, reason_of
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.options import fill_words
from shoal.tools.plan.search.prediction import Prediction, TriedLayout
from shoal.tools.report import profile, read_history
from shoal.util.errors import CheckpointError, ShoalError
from shoal.util.tables import plain_console, print_line
from shoal.util.units import counted, duration

STEPS = 30
"""Steps that a script takes; the first ones warm up and do not count."""
ROUNDS = 2
"""Times that each layout runs. The fastest counts: other programs only make steps slower."""
LIMIT = 900.0
"""Seconds after which a script is ended."""


def try_layouts(
    given: Sequence[Prediction], count: int, machine: Machine, words: Sequence[str]
) -> tuple[list[Prediction], list[TriedLayout]]:
    """Run a script in the first layouts, and return all of them with the fastest one first.

    Rounds alternate the layouts. A layout whose run fails is recorded and stays behind. Configurations
    that differ in options which the script does not get count once.

    Raises:
        ShoalError: If this machine has too few devices, or all runs fail.
    """
    commands: dict[tuple[str, ...], Prediction] = {}
    for each in given:
        commands.setdefault(tuple(fill_words(words, each.plan)), each)
    best = list(commands.values())[:count]
    if best:
        _check_devices(best[0].plan.layout.size, machine)
    runs: list[list[float]] = [[] for _ in best]
    problems = [""] * len(best)
    # The nodes of a job share the directory in which it was submitted, not their own /tmp.
    shared = Path.cwd() if job_nodes() > 1 else None
    with tempfile.TemporaryDirectory(prefix="shoal-try-", dir=shared) as folder:
        for number in range(ROUNDS):
            for place, each in enumerate(best):
                if not problems[place]:
                    directory = Path(folder, f"{place}-{number}")
                    seconds, problems[place] = _run(each, machine, words, directory)
                    runs[place] += [] if seconds is None else [seconds]
    tried = [
        TriedLayout(
            layout=str(each.plan.layout),
            predicted=each.step_seconds,
            measured=None if problem else min(seconds),
            problem=problem,
        )
        for each, seconds, problem in zip(best, runs, problems, strict=True)
    ]
    if best and all(problems):
        raise ShoalError(
            given=f"--try {count} -- {' '.join(words)}",
            found=f"{counted(len(best), 'layout')} failed: {problems[0]}",
            fix=f"start the first one: shoal run -n {best[0].plan.layout.size} "
            f"{' '.join(fill_words(words, best[0].plan, run='runs/try', steps=str(STEPS)))}",
        )
    order = sorted(range(len(best)), key=lambda place: tried[place].measured or float("inf"))
    ordered = [best[place] for place in order]
    rest = [each for each in given if not any(each is other for other in ordered)]
    return [*ordered, *rest], [tried[place] for place in order]


def _run(
    found: Prediction, machine: Machine, words: Sequence[str], directory: Path
) -> tuple[float | None, str]:
    """Return the median seconds of a step, or the reason of a failed run."""
    plan = found.plan
    program, *arguments = fill_words(words, plan, run=str(directory), steps=str(STEPS))
    print_line(plain_console(stderr=True), f"Trying {plan.layout} …")
    folder = directory.with_suffix(".log")
    folder.mkdir()
    with end_job_on_signals():
        done = execute(_command(plan.layout.size, machine, program, arguments), folder, LIMIT)
    if done.code is None:
        return None, f"it took longer than {duration(LIMIT)}"
    if done.code:
        return None, reason_of(done.code, (folder / LOG).read_text(errors="replace"))
    if not directory.is_dir():
        return None, "the script did not create shoal.Run({run})"
    try:
        return _seconds(directory), ""
    except ShoalError as error:
        return None, error.found


def _seconds(directory: Path) -> float:
    attempt = read_history(directory).latest
    found = None if attempt is None else profile(attempt)
    if found is None:
        raise CheckpointError(
            given=str(directory), found="it has recorded too few steps", fix=f"take {STEPS} steps"
        )
    return float(np.median(found.average(found.mean), axis=-1).sum())


def _command(count: int, machine: Machine, program: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts a script on this machine, or on the nodes of the job."""
    if job_nodes() == 1:
        shoal_run = [sys.executable, "-m", "shoal", "run", "-n", str(count)]
        return [*shoal_run, program, "--", *arguments]
    per_node = min(machine.devices, count)
    size = [f"--nodes={math.ceil(count / per_node)}", f"--ntasks={count}"]
    tasks = [*size, f"--ntasks-per-node={per_node}"]
    return ["srun", *tasks, sys.executable, program, *arguments]


def _check_devices(count: int, machine: Machine) -> None:
    """Raise ShoalError if this machine, or the job, has fewer devices than a plan needs."""
    import torch

    from shoal.util import accelerator

    nodes = job_nodes()
    if 1 < nodes < math.ceil(count / machine.devices):
        raise ShoalError(
            given=f"-n {count} --machine {machine.name} --try",
            found=f"the job has {counted(nodes, 'node')}, of {counted(machine.devices, 'device')} each",
            fix=f"use -n {nodes * machine.devices}, or a job with more nodes",
        )
    if machine.is_cpu:
        return
    here = nodes * torch.accelerator.device_count() if accelerator.current()[0] else 0
    if here < count:
        raise ShoalError(
            given=f"-n {count} --machine {machine.name} --try",
            found=f"{'this machine' if nodes == 1 else 'the job'} has {counted(here, 'GPU')}",
            fix=f"run it where there are {counted(count, 'GPU')}, or submit a layout: --submit 1 -- …",
        )

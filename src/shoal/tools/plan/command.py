"""The answers to `shoal plan`; with `--try` the first layouts are measured here or in a Slurm job."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shoal.distributed.env_vars import job_nodes, on_this_node
from shoal.tools.bench.scaling.jobs import LOG, end_job_on_signals, execute, reason_of
from shoal.tools.plan.check import RunCheck, check_document, check_run
from shoal.tools.plan.device_numbers import numbers_document, search_numbers
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.options import AUTO, USUAL, PlanOptions, fill_words
from shoal.tools.plan.search.search import (
    Prediction,
    SearchResult,
    TriedLayout,
    answer_what_if,
    changed_machine,
    search_plans,
)
from shoal.tools.plan.show.report import PlanReport, plan_document
from shoal.tools.plan.work.transformer import parse_model
from shoal.tools.report import profile, read_history
from shoal.util.document import Document
from shoal.util.errors import CheckpointError, ShoalError
from shoal.util.python import script_command, shoal_command
from shoal.util.tables import plain_console, print_line
from shoal.util.units import compact, counted, duration


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """A document, and the configurations in it that fit, or the run that was compared."""

    document: Document
    best: Sequence[Prediction] = ()
    run: RunCheck | None = None


def answer_plan(options: PlanOptions) -> PlanAnswer:
    """Predict what the options ask for. Raises ShoalError if it can't be predicted."""
    machine = options.machine
    if options.run is not None:
        run = check_run(
            options.run,
            parse_model(options.model),
            machine,
            micro_batch=options.micro_batch,
            recompute=options.recompute or "none",
            schedule=options.schedule or "1f1b",
            stages=options.stages,
        )
        return PlanAnswer(document=check_document(run), run=run)
    if len(options.numbers) > 1:
        model, size = parse_model(options.model), (options.numbers, options.batch)
        found = search_numbers(model, machine, *size, options.fixed, options.training_on)
        best = [each.best for each in found if each.best]
        return PlanAnswer(document=numbers_document(model, machine, found), best=best)
    report = _traced_report(options) if options.traced else _search_layouts(options)
    if options.tried is not None and report.result.best:
        ordered, tried = try_layouts(report.result.best, options.tried, machine, options.words)
        result = replace(report.result, best=tuple(ordered))
        report = replace(report, result=result, tried=tuple(tried))
    return PlanAnswer(document=plan_document(report), best=report.result.best)


def _search_layouts(options: PlanOptions) -> PlanReport:
    """Search all configurations of a transformer, also with each change that is asked for."""
    model, machine = parse_model(options.model), options.machine
    size, fixed = (options.devices, options.batch), options.fixed
    training = options.training_on(options.devices)
    for question in options.what_if:
        changed_machine(machine, question)  # mistakes are reported before the search
    result = search_plans(model, machine, *size, fixed, top=options.top)
    answers = [answer_what_if(each, result, model, machine, *size, fixed) for each in options.what_if]
    shown = [*result.best, *(each.best for each in result.rejected if each.best)]
    return PlanReport(
        name=f"{compact(model.parameters)} parameters",
        machine=machine,
        model=model,
        result=result,
        changes=() if fixed.layout is None else tuple(shown[:1]),
        training=training,
        answers=tuple(answers),
    )


def _traced_report(options: PlanOptions) -> PlanReport:
    """Return the traced plans that fit: the given one, with changes if it does not fit, or all.

    Raises ShoalError if the training has tokens, or for split points of all layouts.
    """
    from shoal.tools.plan.search.fit import fit_module, named_workload, plan_of, search_module

    training = options.training_on(options.devices)
    if training is not None and training.tokens:
        raise ShoalError(
            given=f"--training {options.training} with a traced module",
            found="the number of tokens in a sample is not known",
            fix="use --training steps=…",
        )
    recompute, schedule = options.recompute or "none", options.schedule or "1f1b"
    size, ways = (options.devices, options.batch), (recompute, options.precision)
    changes: list[Prediction] = []
    if options.layout != AUTO:
        flow = options.split_points, schedule
        plan = plan_of(options.layout or USUAL, *size, options.micro_batch, *ways, *flow)
        build = named_workload(options.model, options.batch)
        changes = fit_module(build, plan, options.machine, fake=options.fake)
        best = tuple(each for each in changes[:1] if each.fits)
        result = SearchResult(best=best, rejected=(), tried=1, fitting=len(best), evaluated=1)
    elif options.split_points:
        raise ShoalError(
            given=f"--layout {AUTO} --split-points {','.join(options.split_points)}",
            found="stages of pipelines get equal FLOPs in a search",
            fix="leave --split-points out",
        )
    else:
        result = search_module(
            named_workload(options.model, options.batch),
            *size,
            options.machine,
            micro_batch=options.micro_batch,
            recompute=recompute,
            precision=options.precision,
            schedule=schedule,
            fake=options.fake,
            top=options.top,
            note=lambda line: print_line(plain_console(stderr=True), line),
        )
    return PlanReport(
        name=options.model,
        machine=options.machine,
        result=result,
        changes=tuple(changes),
        training=training,
    )


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
    with end_job_on_signals(), on_this_node():
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
        return shoal_command("run", "-n", str(count), program, "--", *arguments)
    per_node = min(machine.per_host, count)
    size = [f"--nodes={math.ceil(count / per_node)}", f"--ntasks={count}"]
    tasks = [*size, f"--ntasks-per-node={per_node}"]
    return ["srun", *tasks, *script_command(program, *arguments)]


def _check_devices(count: int, machine: Machine) -> None:
    """Raise ShoalError if this machine, or the job, has fewer devices than a plan needs."""

    from shoal.util import accelerator

    nodes, each = job_nodes(), machine.per_host
    if 1 < nodes < math.ceil(count / each):
        raise ShoalError(
            given=f"-n {count} --machine {machine.name} --try",
            found=f"the job has {counted(nodes, 'node')}, of {counted(each, 'device')} each",
            fix=f"use -n {nodes * each}, or a job with more nodes",
        )
    if machine.is_cpu:
        return
    here = nodes * accelerator.count()
    if here < count:
        raise ShoalError(
            given=f"-n {count} --machine {machine.name} --try",
            found=f"{'this machine' if nodes == 1 else 'the job'} has {counted(here, 'GPU')}",
            fix=f"run it where there are {counted(count, 'GPU')}, or submit a layout: --submit 1 -- …",
        )

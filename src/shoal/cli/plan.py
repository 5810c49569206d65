"""`shoal plan`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shoal.util.errors import ShoalError

if TYPE_CHECKING:
    from shoal.cli.plan_try import TriedLayout
    from shoal.plan.configuration import PlannedStep, Recompute
    from shoal.plan.machines import Machine
    from shoal.plan.search import Prediction
    from shoal.report.html import Page


_Model = Annotated[
    str,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help="llama-70b, gpt3-175b …, with changes as in llama-70b,seq=8192; or dimensions: "
        "hidden=…,layers=…,heads=…,vocab=…,seq=…; or train.py:name of a function that returns (model, "
        "task, dataset), whose steps are traced.",
    ),
]
_Machine = Annotated[str, typer.Option(metavar="NAME", help="A GPU such as h100-sxm, or a TOML file.")]
_Devices = Annotated[
    str,
    typer.Option(
        "-n",
        "--devices",
        metavar="N",
        help="Number of devices, or several to compare, such as 8,16,32.",
    ),
]
_Batch = Annotated[
    int, typer.Option(min=1, max=10**6, metavar="N", help="Global batch size in samples.")
]
_Precision = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="mixed (16 bits with float32 parameters), fp16 (the same with 16-bit gradients), half "
        "(16 bits only), fp32, or any to try all of them.",
    ),
]
_Top = Annotated[
    int, typer.Option(min=1, max=100, metavar="N", help="Number of configurations to show.")
]
_Check = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="Compare the prediction with the steps of this run instead."),
]
_Update = Annotated[
    bool,
    typer.Option(
        "--update",
        help="With --check: move the efficiencies in the file of --machine half of the way to those "
        "of the run.",
    ),
]
_MicroBatch = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Samples in a micro-batch, of a traced model or the run of --check (default: the local "
        "batch).",
    ),
]
_Recompute = Annotated[
    str,
    typer.Option(metavar="KIND", help="Recomputation in that training: none, selective or full."),
]
_Layout = Annotated[
    str, typer.Option(metavar="LAYOUT", help="Layout of a traced model, as for shoal.init.")
]
_SplitPoints = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Split points of a traced pipeline (default: stages of equal FLOPs).",
    ),
]
_Schedule = Annotated[
    str, typer.Option(metavar="NAME", help="Schedule of a traced pipeline, as for shoal.Pipeline.")
]
_Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Trace the model with values, in the memory of this machine, if fake tensors fail.",
    ),
]
_Training = Annotated[
    str | None,
    typer.Option(
        metavar="VALUES",
        help="Predict the whole training: steps=… or tokens=…, with mtbf=… or trace=FILE, save=…, "
        "restart=…, start=…, queue=…, deadline=…, price=….",
    ),
]
_WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="CHANGE",
        help="Also find the fastest layout with a change: machine=h200, network=2x (or another rate or "
        "efficiency), slowest=1.2 (a device is 1.2 times slower).",
    ),
]
_Submit = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Submit the N-th layout: `shoal submit` with its nodes and the words after `--`, where "
        "{layout}, {micro_batch}, {micro_batches}, {recompute}, {schedule}, {stages} and {batch} are "
        "replaced.",
    ),
]
_Try = Annotated[
    int | None,
    typer.Option(
        "--try",
        min=1,
        metavar="N",
        help="Run the script after `--` in the first N layouts here; the fastest comes first. {run}, "
        "{steps} and the names of --submit are replaced.",
    ),
]
_SubmitWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORDS",
        help="The script and its arguments; with --submit, after options of `shoal submit`.",
    ),
]
_Html = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Also write an HTML page to this directory.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def plan(
    *,
    model: _Model,
    machine: _Machine = "h100-sxm",
    devices: _Devices = "8",
    batch: _Batch = 512,
    precision: _Precision = "mixed",
    top: _Top = 5,
    check: _Check = None,
    update: _Update = False,
    micro_batch: _MicroBatch = None,
    recompute: _Recompute = "none",
    layout: _Layout = "replicate=-1",
    split_points: _SplitPoints = "",
    schedule: _Schedule = "1f1b",
    measure: _Measure = False,
    training: _Training = None,
    what_if: _WhatIf = None,
    submit: _Submit = None,
    tried: _Try = None,
    words: _SubmitWords = None,
    html: _Html = None,
    as_json: _Json = False,
) -> None:
    """Predict layout, step time and memory.

    It finds the fastest layout of a transformer from dimensions and data sheets. The exit code is 1 if
    no configuration fits. With --check, it compares the prediction for a run with its measured steps.
    With a function that returns a model, it predicts the memory and the step time of a rank in one
    layout. With --training, it simulates the whole training: queue, saves, failures, restarts. --try
    measures layouts on this machine, and --submit submits one.
    """
    from shoal.cli.plan_numbers import check_numbers, compare_numbers, parse_numbers
    from shoal.cli.plan_submit import check_words, submit_plan
    from shoal.plan.configuration import ANY_PRECISION, FORMATS, RECOMPUTES
    from shoal.plan.machines import find_machine

    traced = ":" in model and check is None
    known = tuple(FORMATS) if traced else (*FORMATS, ANY_PRECISION)
    _check_choice("--precision", precision, known, "mixed")
    numbers = parse_numbers(devices)
    _check_choice("--recompute", recompute, RECOMPUTES, "none")
    found = find_machine(machine)
    kind = cast("Recompute", recompute)
    check_words(submit, tried, top, words or ())
    updated = _updated_file(machine, check) if update else None
    if check is not None or ":" in model:
        _refuse_search(model, check, training, submit or tried, what_if)
    if len(numbers) > 1:
        alone: dict[str, object] = {"--check": check, "--submit": submit, "--try": tried}
        check_numbers(devices, model, alone | {"--what-if": what_if})
        compare_numbers(model, found, numbers, batch, precision, training, html=html, as_json=as_json)
    elif check is not None:
        _check_run(check, model, found, micro_batch, kind, updated, html=html, as_json=as_json)
    elif ":" in model:
        from shoal.distributed.pipeline_schedules import SCHEDULES
        from shoal.plan.fit import plan_of

        _check_choice("--schedule", schedule, tuple(SCHEDULES), "1f1b")
        points = tuple(filter(None, split_points.split(",")))
        step = plan_of(layout, numbers[0], batch, micro_batch, kind, precision, points, schedule)
        _trace(model, step, found, fake=not measure, html=html, as_json=as_json)
    else:
        best = _search(
            model,
            found,
            numbers[0],
            batch,
            precision,
            top,
            training,
            what_if or (),
            (tried, words or ()),
            html=html,
            as_json=as_json,
        )
        if submit is not None:
            submit_plan(best, submit, found, words or ())


def _updated_file(machine: str, check: Path | None) -> str:
    """Return the machine file to update. Raises ShoalError if there is no run or no file."""
    if check is None or not machine.endswith(".toml"):
        raise ShoalError(
            given=f"--update with --machine {machine}",
            found="it changes the machine file of a run that is checked",
            fix="use --check RUN --machine my-cluster.toml --update",
        )
    return machine


def _refuse_search(
    model: str,
    check: Path | None,
    training: str | None,
    submit: int | None,
    what_if: Sequence[str] | None,
) -> None:
    """Raise ShoalError for options of the search."""
    if training is not None or submit is not None:
        option = "--submit or --try" if training is None else f"--training {training}"
        found = "it needs the predicted step time of a transformer"
    elif what_if:
        option, found = f"--what-if {what_if[0]}", "it needs the search for layouts of a transformer"
    else:
        return
    raise ShoalError(
        given=f"{option} with {'--check' if check else '--model ' + model}",
        found=found,
        fix="leave --check out, and describe the model as in --model llama-7b",
    )


def _check_run(
    run: Path,
    model: str,
    machine: Machine,
    micro_batch: int | None,
    recompute: Recompute,
    updated: str | None,
    *,
    html: Path | None,
    as_json: bool,
) -> None:
    """Compare the prediction for a run with its measured steps, and update a machine file."""
    from shoal.plan.check import check_run
    from shoal.plan.display import check_values, print_check
    from shoal.plan.model import parse_model
    from shoal.util.tables import plain_console, print_line

    dimensions = parse_model(model)
    found = check_run(run, dimensions, machine, micro_batch=micro_batch, recompute=recompute)
    if as_json:
        typer.echo(json.dumps(check_values(found), indent=2))
    else:
        print_check(plain_console(), found)
    if html is not None:
        from shoal.plan.page import check_page

        write_page(check_page(found), html)
    if updated is not None:
        from shoal.plan.machine_update import efficiency_changes, update_machine_file

        changes = efficiency_changes(found, machine)
        update_machine_file(updated, run, changes)
        for each in changes:
            line = f"{updated}: {each.name} {each.before:.4g} -> {each.after:.4g}"
            print_line(plain_console(stderr=True), line)


def _search(
    model: str,
    machine: Machine,
    devices: int,
    batch: int,
    precision: str,
    top: int,
    training: str | None,
    questions: Sequence[str],
    trial: tuple[int | None, Sequence[str]],
    *,
    html: Path | None,
    as_json: bool,
) -> Sequence[Prediction]:
    """Print the fastest configurations and return them; exit with 1 if none fits.

    `trial` is the number of layouts to try, and the words that run the script.
    """
    from shoal.cli.plan_try import print_tried, tried_values, try_layouts
    from shoal.plan.display import (
        answer_values,
        print_answers,
        print_result,
        print_trainings,
        result_values,
        training_estimate,
        training_values,
    )
    from shoal.plan.model import parse_model
    from shoal.plan.search import search_plans
    from shoal.plan.what_if import answer_what_if, changed_machine
    from shoal.plan.whole_training import parse_training
    from shoal.util.tables import plain_console

    dimensions = parse_model(model)
    asked = None if training is None else parse_training(measured_values(training, devices, machine))
    for question in questions:
        changed_machine(machine, question)  # mistakes are reported before the search
    result = search_plans(dimensions, machine, devices, batch, precision=precision, top=top)
    tried: list[TriedLayout] = []
    if trial[0] is not None:
        result, tried = try_layouts(result, trial[0], machine, trial[1])
    whole = []
    if asked is not None:
        whole = [training_estimate(asked, dimensions, machine, each) for each in result.best]
    answers = [
        answer_what_if(each, result, dimensions, machine, devices, batch, precision=precision)
        for each in questions
    ]
    if as_json:
        values = result_values(dimensions, machine, result)
        values |= {"tried": tried_values(tried)} if tried else {}
        values |= {"what_if": [answer_values(each) for each in answers]} if answers else {}
        if whole:
            for each, training_time in zip(values["best"], whole, strict=True):
                each["training"] = training_values(training_time)
        typer.echo(json.dumps(values, indent=2))
    else:
        print_result(plain_console(), dimensions, machine, result)
        if tried:
            print_tried(plain_console(), tried)
        if answers:
            print_answers(plain_console(), answers)
        if whole:
            print_trainings(plain_console(), result.best, whole)
    if html is not None:
        from shoal.plan.page import plan_page

        write_page(plan_page(dimensions, machine, result, whole, answers), html)
    if not result.best:
        raise typer.Exit(1)
    return result.best


def measured_values(training: str, devices: int, machine: Machine) -> str:
    """Replace each `auto` with a measured value, and print it."""
    from shoal.plan.measured_start import fill_in_measured
    from shoal.util.tables import plain_console, print_line

    text, sentences = fill_in_measured(training, devices, machine.devices, gpus=machine.name != "cpu")
    for sentence in sentences:
        print_line(plain_console(stderr=True), sentence)
    return text


def _trace(
    model: str,
    asked: PlannedStep,
    machine: Machine,
    *,
    fake: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Trace a module, print its memory and its time, and exit with 1 if it does not fit."""
    from shoal.plan.fit import fit_module, fit_values, named_workload, print_fit
    from shoal.util.tables import plain_console

    found = fit_module(named_workload(model, asked.global_batch), asked, machine, fake=fake)
    if as_json:
        typer.echo(json.dumps(fit_values(found), indent=2))
    else:
        print_fit(plain_console(), machine, found)
    if html is not None:
        from shoal.plan.module_page import module_page

        write_page(module_page(model, machine, found), html)
    if not found[0].fits:
        raise typer.Exit(1)


def _check_choice(option: str, given: str, known: Sequence[str], usual: str) -> None:
    if given not in known:
        raise ShoalError(
            given=f"{option} {given}",
            found=f"it is not one of {', '.join(known)}",
            fix=f"use {option} {usual}",
        )


def write_page(page: Page, folder: Path) -> None:
    """Write a page to a directory and print its path."""
    from shoal.report.html import save_page
    from shoal.util.tables import plain_console, print_path

    try:
        path = save_page(page, folder / "index.html")[0]
    except OSError as error:
        raise ShoalError(
            given=f"--html {folder}",
            found=str(error),
            fix="use a directory where you have permission",
        ) from None
    print_path(plain_console(stderr=True), str(path))

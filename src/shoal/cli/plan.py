"""`shoal plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shoal.cli.plan_options import PlanOptions, refuse_options, show_plan
from shoal.util.errors import ShoalError

if TYPE_CHECKING:
    from shoal.tools.plan.search.prediction import Prediction
    from shoal.tools.plan.show.report import PlanReport
    from shoal.tools.plan.work.planned_step import Recompute


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
        "(16 bits only), fp32, or any to try all (not for a traced model).",
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
    typer.Option(
        metavar="KIND",
        help="Recomputation in a traced model or the run of --check: none, selective, full.",
    ),
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
    str,
    typer.Option(metavar="NAME", help="Schedule of a traced pipeline or the run of --check."),
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
        help="Also find the fastest layout with a change: machine=h200, network=2x (or another rate, "
        "efficiency), slowest=1.2 (of a device).",
    ),
]
_Submit = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Submit the N-th layout: `shoal submit` with its nodes and the words after `--`; "
        "{layout}, {micro_batch}, {micro_batches}, {recompute} … are replaced.",
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

    Find the fastest layout of a transformer from its dimensions; exit with 1 if no configuration fits.
    With a function that returns a model, predict memory and step time of a rank in one layout, or with
    --layout auto in all with at most two axes. --check compares a prediction with the steps of a run.
    --training simulates the training: queue, saves, failures, restarts. --try measures layouts
    here, and --submit submits one.
    """
    from shoal.cli.plan_numbers import check_numbers, compare_numbers, parse_numbers
    from shoal.cli.plan_submit import check_words, submit_plan
    from shoal.tools.plan.machine.machines import find_machine

    check_words(submit, tried, top, words or ())
    numbers = parse_numbers(devices)
    options = PlanOptions(
        model=model,
        machine=find_machine(machine),
        devices=numbers[0],
        batch=batch,
        precision=precision,
        top=top,
        micro_batch=micro_batch,
        recompute=cast("Recompute", recompute),
        layout=layout,
        split_points=tuple(filter(None, split_points.split(","))),
        schedule=schedule,
        fake=not measure,
        training=training,
        what_if=tuple(what_if or ()),
        tried=tried,
        words=tuple(words or ()),
        html=html,
        as_json=as_json,
    )
    updated = _updated_file(machine, check) if update else None
    options.check(of_run=check is not None)
    started: dict[str, object] = {"--submit": submit, "--try": tried}
    best: Sequence[Prediction] = ()
    if len(numbers) > 1:
        check_numbers(devices, model, started | {"--check": check, "--what-if": what_if})
        compare_numbers(options, numbers)
    elif check is not None:
        refuse_options(started | {"--training": training, "--what-if": what_if}, "--check")
        _check_run(check, options, updated)
    else:
        best = _predict(options)
    if submit is not None:
        submit_plan(best, submit, options)


def _updated_file(machine: str, check: Path | None) -> str:
    """Return the machine file to update. Raises ShoalError if there is no run or no file."""
    if check is None or not machine.endswith(".toml"):
        raise ShoalError(
            given=f"--update with --machine {machine}",
            found="it needs a run to check and a machine file (.toml)",
            fix="use --check RUN --machine my-cluster.toml --update",
        )
    return machine


def _check_run(run: Path, options: PlanOptions, updated: str | None) -> None:
    """Compare the prediction for a run with its measured steps, and update a machine file."""
    from shoal.tools.plan.check import check_run
    from shoal.tools.plan.show.check import check_document
    from shoal.tools.plan.work.transformer import parse_model
    from shoal.util.tables import plain_console, print_line

    machine = options.machine
    found = check_run(
        run,
        parse_model(options.model),
        machine,
        micro_batch=options.micro_batch,
        recompute=options.recompute,
        schedule=options.schedule,
    )
    show_plan(check_document(found), options)
    if updated is not None:
        from shoal.tools.plan.machine_update import efficiency_changes, update_machine_file

        changes = efficiency_changes(found, machine)
        update_machine_file(updated, run, changes)
        for each in changes:
            line = f"{updated}: {each.name} {each.before:.4g} -> {each.after:.4g}"
            print_line(plain_console(stderr=True), line)


def _predict(options: PlanOptions) -> Sequence[Prediction]:
    """Print the fastest configurations and return them; exit with 1 if none fits."""
    from shoal.cli.plan_try import try_layouts
    from shoal.tools.plan.show.report import plan_document

    if options.traced:
        from shoal.cli.plan_module import traced_report

        report = traced_report(options)
    else:
        report = _search(options)
    if options.tried is not None and report.result.best:
        best, tried = try_layouts(report.result.best, options.tried, options.machine, options.words)
        found = replace(report.result, best=tuple(best))
        report = replace(report, result=found, tried=tuple(tried))
    show_plan(plan_document(report), options)
    if not report.result.best:
        raise typer.Exit(1)
    return report.result.best


def _search(options: PlanOptions) -> PlanReport:
    """Search all configurations of a transformer, also with each change that is asked for."""
    from shoal.tools.plan.search.search import search_plans
    from shoal.tools.plan.search.what_if import answer_what_if, changed_machine
    from shoal.tools.plan.show.report import PlanReport
    from shoal.tools.plan.work.transformer import parse_model
    from shoal.util.units import compact

    model, machine = parse_model(options.model), options.machine
    size = options.devices, options.batch
    training = options.training_on(options.devices)
    for question in options.what_if:
        changed_machine(machine, question)  # mistakes are reported before the search
    result = search_plans(model, machine, *size, precision=options.precision, top=options.top)
    answers = [
        answer_what_if(each, result, model, machine, *size, precision=options.precision)
        for each in options.what_if
    ]
    return PlanReport(
        name=f"{compact(model.parameters)} parameters",
        machine=machine,
        model=model,
        result=result,
        training=training,
        answers=tuple(answers),
    )

"""`shoal plan`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shoal.cli import submit as jobs
from shoal.cli.options import SCRIPT_LAST, show_document
from shoal.util.errors import ShoalError

if TYPE_CHECKING:
    from shoal.tools.plan.check import RunCheck
    from shoal.tools.plan.options import PlanOptions
    from shoal.tools.plan.search.search import Prediction
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
        help="mixed (16 bits with float32 parameters), fp8 (the same with linear layers in 8 bits), "
        "fp16 (with 16-bit gradients), half (16 bits only), fp32, or any to try all. Not of a traced "
        "model: fp8, any.",
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
        help="With --check: write the efficiencies that fit the run into the file of --machine.",
    ),
]
_MicroBatch = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Samples in a micro-batch. Default: the fastest; traced or --check: the local batch.",
    ),
]
_Recompute = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Recomputation: none, selective, full. Default: the fastest; traced or --check: none.",
    ),
]
_Layout = Annotated[
    str | None,
    typer.Option(
        metavar="LAYOUT",
        help="Layout as for shoal.init, or auto for all. Default: auto; traced: replicate=-1.",
    ),
]
_SplitPoints = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Split points of a traced pipeline (default: stages of equal FLOPs).",
    ),
]
_Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Schedule of pipelines. Default: the fastest; traced or --check: 1f1b.",
    ),
]
_Stages = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Stages per rank of pipelines, not traced. Default: the fastest; --check: the schedule's.",
    ),
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
_KnownStepTime = Annotated[
    str | None,
    typer.Option(
        metavar="STEP",
        help="A step of this model that was measured, in s or as MFU in %: '7.4 layout=shard=8 "
        "batch=64', with micro_batch, recompute, precision, schedule. Predictions then fit it.",
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
    recompute: _Recompute = None,
    layout: _Layout = None,
    split_points: _SplitPoints = "",
    schedule: _Schedule = None,
    stages: _Stages = None,
    measure: _Measure = False,
    training: _Training = None,
    what_if: _WhatIf = None,
    known_step_time: _KnownStepTime = None,
    submit: _Submit = None,
    tried: _Try = None,
    words: _SubmitWords = None,
    html: _Html = None,
    as_json: _Json = False,
) -> None:
    """Predict layout, step time and memory.

    Find the fastest layout of a transformer from its dimensions, or predict one (--layout); exit with 1
    if no configuration fits.
    With a function that returns a model, predict memory and step time of a rank in one layout, or with
    --layout auto in all with at most two axes. --check compares a prediction with the steps of a run.
    --training simulates the training: queue, saves, failures, restarts. --try measures layouts
    here, and --submit submits one.
    """
    from shoal.tools.plan import command
    from shoal.tools.plan.machine.machines import find_machine
    from shoal.tools.plan.options import PlanOptions, parse_devices

    options = PlanOptions(
        model=model,
        machine=find_machine(machine),
        numbers=parse_devices(devices),
        batch=batch,
        precision=precision,
        top=top,
        run=check,
        micro_batch=micro_batch,
        recompute=cast("Recompute | None", recompute),
        layout=layout,
        split_points=tuple(filter(None, split_points.split(","))),
        schedule=schedule,
        stages=stages,
        fake=not measure,
        training=training,
        what_if=what_if or (),
        known_step=known_step_time,
        submitted=submit,
        tried=tried,
        words=words or (),
    )
    _check_files(html, machine, updated=update, run=check)
    options.check()
    options = options.with_known_step()
    found = command.answer_plan(options)
    page = None if html is None else html / "index.html"
    show_document(found.document, as_json=as_json, page=page, option="--html DIR")
    if found.run is None and not found.best:
        raise typer.Exit(1)
    if update and check is not None and found.run is not None:
        _update(machine, check, found.run)
    if submit is not None:
        _submit_plan(found.best, submit, options, as_json=as_json)


def _check_files(html: Path | None, machine: str, *, updated: bool, run: Path | None) -> None:
    """Raise ShoalError for a file as a directory, or without a run and a file of its machine."""
    if html is not None and html.exists() and not html.is_dir():
        raise ShoalError(
            given=f"--html {html}",
            found="it is a file",
            fix="use a directory, such as --html plan-page",
        )
    if updated and (run is None or not machine.endswith(".toml")):
        raise ShoalError(
            given=f"--update with --machine {machine}",
            found="it needs a run to check and a machine file (.toml)",
            fix="use --check RUN --machine my-cluster.toml --update",
        )


def _update(path: str, run: Path, found: RunCheck) -> None:
    """Write the efficiencies that fit a run into a machine file, and print the changes."""
    from shoal.tools.plan.check import efficiency_changes, update_machine_file
    from shoal.util.tables import plain_console, print_line

    changes = efficiency_changes(found)
    update_machine_file(path, run, changes)
    for each in changes:
        line = f"{path}: {each.name} {each.before:.4g} -> {each.after:.4g}"
        print_line(plain_console(stderr=True), line)


def _submit_plan(
    best: Sequence[Prediction], number: int, options: PlanOptions, *, as_json: bool
) -> None:
    """Submit the layout of a number: the words are those of `shoal submit`, with values in braces.

    With `--json`, its output goes to standard error: standard output has the plan only.

    Raises ShoalError if fewer layouts fit, or if the devices do not fill their nodes.
    """
    from shoal.tools.plan.options import fill_words

    if number > len(best):
        raise ShoalError(
            given=f"--submit {number}",
            found=f"the number of configurations that fit is {len(best)}",
            fix=f"use --submit {len(best)}",
        )
    plan, machine = best[number - 1].plan, options.machine
    devices = plan.layout.size
    per_node = min(machine.per_host, devices)
    if devices % per_node:
        raise ShoalError(
            given=f"-n {devices} --submit",
            found=f"nodes of {machine.name} have {per_node} devices, so that one would not be full",
            fix=f"use -n {devices // per_node * per_node}",
        )
    size = ["--nodes", str(devices // per_node), "-n", str(devices)]
    size += [] if machine.is_cpu else ["--gpus-per-node", str(per_node)]
    app = typer.Typer()
    app.command(context_settings=SCRIPT_LAST)(jobs.submit)
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        typer.main.get_command(app).main(
            [*size, *fill_words(options.words, plan)], "shoal submit", standalone_mode=False
        )

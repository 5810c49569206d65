"""`shoal plan --submit`: a layout of the result as a job of `shoal submit`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import typer

from shoal.cli.options import SCRIPT_LAST
from shoal.cli.submit import submit
from shoal.util.errors import ShoalError

if TYPE_CHECKING:
    from shoal.cli.plan_options import PlanOptions
    from shoal.tools.plan.search.prediction import Prediction
    from shoal.tools.plan.work.planned_step import PlannedStep

_EXAMPLE = "--submit 1 -- --time 20:00:00 train.py --layout {layout}"
_TRIED = "--try 3 -- train.py --layout {layout} --run {run} --steps {steps}"


def check_words(number: int | None, tried: int | None, top: int, words: Sequence[str]) -> None:
    """Raise ShoalError if there is no such layout, or if the script would not get it."""
    count, option = (number, "--submit") if tried is None else (tried, "--try")
    if count is None:
        if words:
            raise ShoalError(
                given=" ".join(words),
                found="neither --submit nor --try: nothing starts",
                fix=_EXAMPLE,
            )
        return
    given = f"{option} {count}"
    if tried is not None and number is not None:
        raise ShoalError(
            given=f"{given} --submit {number}", found="both start the script", fix=_EXAMPLE
        )
    if count > top:
        raise ShoalError(
            given=given, found=f"--top {top} shows fewer layouts", fix=f"use --top {count}"
        )
    example = _EXAMPLE if tried is None else _TRIED
    for place in ("{layout}",) if tried is None else ("{layout}", "{run}"):
        if not any(place in word for word in words):
            what = "the layout" if place == "{layout}" else "the directory for its shoal.Run"
            raise ShoalError(
                given=f"{given} -- {' '.join(words)}".rstrip(),
                found=f"no {place} in the arguments: the script would not get {what}",
                fix=example,
            )


def submit_plan(best: Sequence[Prediction], number: int, options: PlanOptions) -> None:
    """Submit the layout of a number: the words are those of `shoal submit`, with values in braces.

    With `--json`, its output goes to standard error: standard output has the plan only.

    Raises ShoalError if fewer layouts fit, or if the devices do not fill their nodes.
    """
    if number > len(best):
        raise ShoalError(
            given=f"--submit {number}",
            found=f"the number of configurations that fit is {len(best)}",
            fix=f"use --submit {len(best)}",
        )
    plan, machine = best[number - 1].plan, options.machine
    devices = plan.layout.size
    per_node = min(machine.devices, devices)
    if devices % per_node:
        raise ShoalError(
            given=f"-n {devices} --submit",
            found=f"nodes of {machine.name} have {per_node} devices, so that one would not be full",
            fix=f"use -n {devices // per_node * per_node}",
        )
    size = ["--nodes", str(devices // per_node), "-n", str(devices)]
    size += [] if machine.is_cpu else ["--gpus-per-node", str(per_node)]
    app = typer.Typer()
    app.command(context_settings=SCRIPT_LAST)(submit)
    with redirect_stdout(sys.stderr if options.as_json else sys.stdout):
        typer.main.get_command(app).main(
            [*size, *filled(options.words, plan)], "shoal submit", standalone_mode=False
        )


def filled(words: Sequence[str], plan: PlannedStep, **others: str) -> list[str]:
    """Return words with the values of a plan, and others, for their names in braces."""
    values = {
        "layout": str(plan.layout),
        "micro_batch": str(plan.micro_batch),
        "micro_batches": str(plan.micro_batches),
        "recompute": plan.recompute,
        "schedule": plan.schedule,
        "stages": str(plan.stages),
        "reshard_after_forward": str(plan.reshard_after_forward),
        "accumulate": plan.accumulate,
        "batch": str(plan.global_batch),
        **others,
    }
    found = []
    for word in words:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)  # noqa: PLW2901
        found.append(word)
    return found

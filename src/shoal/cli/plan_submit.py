"""`shoal plan --submit`: a layout of the result as a job of `shoal submit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from shoal.cli.submit import submit
from shoal.cli.submit_options import SCRIPT_LAST
from shoal.util.errors import ShoalError
from shoal.util.units import counted

if TYPE_CHECKING:
    from shoal.plan.machines import Machine
    from shoal.plan.search import Prediction

_EXAMPLE = "--submit 1 -- --time 20:00:00 train.py --layout {layout}"


def check_submission(number: int | None, top: int, words: Sequence[str]) -> None:
    """Raise ShoalError if there is no such layout, or if the script would not get it."""
    if number is None:
        if words:
            raise ShoalError(
                given=" ".join(words), found="no --submit: nothing is submitted", fix=_EXAMPLE
            )
        return
    if number > top:
        raise ShoalError(
            given=f"--submit {number}",
            found=f"--top {top} shows fewer layouts",
            fix=f"use --top {number}",
        )
    if not any("{layout}" in word for word in words):
        raise ShoalError(
            given=f"--submit {number} -- {' '.join(words)}".rstrip(),
            found="no {layout} in the arguments: the script would not get the layout",
            fix=_EXAMPLE,
        )


def submit_plan(
    best: Sequence[Prediction], number: int, machine: Machine, words: Sequence[str]
) -> None:
    """Submit the layout of a number: `words` are those of `shoal submit`, with values in braces.

    Raises ShoalError if fewer layouts fit, or if the devices do not fill their nodes.
    """
    if number > len(best):
        raise ShoalError(
            given=f"--submit {number}",
            found=f"only {counted(len(best), 'configuration')} fit",
            fix=f"use --submit {len(best)}",
        )
    plan = best[number - 1].plan
    devices = plan.layout.size
    per_node = min(machine.devices, devices)
    if devices % per_node:
        raise ShoalError(
            given=f"-n {devices} --submit",
            found=f"nodes of {machine.name} have {per_node} devices, so that one would not be full",
            fix=f"use -n {devices // per_node * per_node}",
        )
    size = ["--nodes", str(devices // per_node), "-n", str(devices)]
    size += [] if machine.name == "cpu" else ["--gpus-per-node", str(per_node)]
    values = {
        "{layout}": str(plan.layout),
        "{micro_batch}": str(plan.micro_batch),
        "{micro_batches}": str(plan.micro_batches),
        "{recompute}": plan.recompute,
        "{schedule}": plan.schedule,
        "{stages}": str(plan.stages),
        "{batch}": str(plan.global_batch),
    }
    app = typer.Typer()
    app.command(context_settings=SCRIPT_LAST)(submit)
    typer.main.get_command(app).main(
        [*size, *(_filled(word, values) for word in words)], "shoal submit", standalone_mode=False
    )


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word

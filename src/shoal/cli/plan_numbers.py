"""`shoal plan -n 8,16,32`: the fastest layout on several numbers of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

from shoal.cli.plan_options import PlanOptions, show_plan
from shoal.util.errors import ShoalError

_MOST = 65536


def parse_numbers(text: str) -> list[int]:
    """Return the numbers of devices that an option lists. Raise ShoalError if it lists others."""
    found = []
    for part in text.split(","):
        number = int(part) if part.isascii() and part.isdigit() and len(part) < 7 else 0
        if not 1 <= number <= _MOST or number in found:
            raise ShoalError(
                given=f"-n {text}",
                found=f"{part!r} is repeated, or is not an integer from 1 to {_MOST}",
                fix="use -n 8, or -n 8,16,32 to compare numbers of devices",
            )
        found.append(number)
    return sorted(found)


def check_numbers(devices: str, model: str, options: Mapping[str, object]) -> None:
    """Raise ShoalError for options that need one number of devices."""
    names = [name for name, value in options.items() if value]
    names += [f"--model {model}"] if ":" in model else []
    if names:
        raise ShoalError(
            given=f"-n {devices} with {names[0]}",
            found="it needs one number of devices",
            fix=f"use -n {devices.partition(',')[0]}",
        )


def compare_numbers(options: PlanOptions, numbers: Sequence[int]) -> None:
    """Print the fastest layout on each number of devices; exit with 1 if none fits on any."""
    from shoal.tools.plan.device_numbers import search_numbers
    from shoal.tools.plan.show.numbers import numbers_document
    from shoal.tools.plan.work.transformer import parse_model

    dimensions, machine = parse_model(options.model), options.machine
    found = search_numbers(
        dimensions, machine, numbers, options.batch, options.precision, options.training_on
    )
    show_plan(numbers_document(dimensions, machine, found), options)
    if not any(each.best for each in found):
        raise typer.Exit(1)

"""`shoal plan -n 8,16,32`: the fastest layout on several numbers of devices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import typer

from shoal.cli.plan_options import PlanOptions, write_page
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
    from shoal.tools.plan.search.device_numbers import numbers_values, print_numbers, search_numbers
    from shoal.tools.plan.work.transformer import parse_model
    from shoal.util.tables import plain_console

    dimensions, machine = parse_model(options.model), options.machine
    found = search_numbers(
        dimensions, machine, numbers, options.batch, options.precision, options.training_on
    )
    if options.as_json:
        typer.echo(json.dumps(numbers_values(dimensions, machine, found), indent=2))
    else:
        print_numbers(plain_console(), dimensions, machine, found)
    if options.html is not None:
        from shoal.tools.plan.show.page import numbers_page

        write_page(numbers_page(dimensions, machine, found), options.html)
    if not any(each.best for each in found):
        raise typer.Exit(1)

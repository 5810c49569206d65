"""The number of devices with which a training is cheapest, or meets its deadline at the least price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.search import Prediction, search_plans
from shoal.tools.plan.show.display import (
    prediction_values,
    training_estimate,
    training_table,
    training_values,
)
from shoal.tools.plan.training.whole_training import Training, TrainingEstimate
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.errors import ShoalError
from shoal.util.tables import print_line, print_rows
from shoal.util.units import compact, counted, duration, percent, size

IN_TIME = 0.9
"""The part of simulated trainings that must end before a deadline that counts as met."""


@dataclass(frozen=True, kw_only=True)
class NumberOfDevices:
    """The fastest configuration on a number of devices, with its training, or why there is none."""

    devices: int
    best: Prediction | None = None
    training: TrainingEstimate | None = None
    deadline: bool = False
    reason: str = ""

    @property
    def late(self) -> bool:
        """Whether too many of the simulated trainings miss the deadline."""
        return self.training is None or self.training.in_time < IN_TIME

    @property
    def cost(self) -> float:
        """The price of the training, or its device hours if devices have no price."""
        return self.training.price or self.training.device_hours if self.training else 0.0


def search_numbers(
    model: Transformer,
    machine: Machine,
    numbers: Sequence[int],
    batch: int,
    precision: str,
    training: Callable[[int], Training | None],
) -> list[NumberOfDevices]:
    """Return the fastest configuration on each number of devices, and the training with it.

    Raises the ShoalError of the last number if all fail.
    """
    found, errors = [], []
    for devices in numbers:
        asked = training(devices)
        try:
            found.append(_search_number(model, machine, devices, batch, precision, asked))
        except ShoalError as error:
            errors.append(error)
            found.append(NumberOfDevices(devices=devices, reason=error.found))
    if len(errors) == len(found):
        raise errors[-1]
    return found


def _search_number(
    model: Transformer,
    machine: Machine,
    devices: int,
    batch: int,
    precision: str,
    training: Training | None,
) -> NumberOfDevices:
    result = search_plans(model, machine, devices, batch, precision=precision, top=1)
    if not result.best:
        return NumberOfDevices(devices=devices, reason="no configuration fits")
    best = result.best[0]
    return NumberOfDevices(
        devices=devices,
        best=best,
        training=None if training is None else training_estimate(training, best, machine, model.seq),
        deadline=training is not None and training.deadline > 0,
    )


def cheapest(found: Sequence[NumberOfDevices]) -> NumberOfDevices | None:
    """Return the cheapest training that meets its deadline, if there is one."""
    return min((each for each in found if not each.late), key=lambda each: each.cost, default=None)


def numbers_values(
    model: Transformer, machine: Machine, found: Sequence[NumberOfDevices]
) -> dict[str, Any]:
    """Return the comparison as plain values."""
    first = cheapest(found)
    return {
        "machine": machine.name,
        "model": asdict(model) | {"parameters": model.parameters},
        "cheapest": first.devices if first else None,
        "numbers": [
            {
                "devices": each.devices,
                "reason": each.reason or None,
                "best": each.best and prediction_values(model, machine, each.best),
                "training": each.training and training_values(each.training),
            }
            for each in found
        ],
    }


def print_numbers(
    console: Console, model: Transformer, machine: Machine, found: Sequence[NumberOfDevices]
) -> None:
    """Print a row for each number of devices, and which of them is the cheapest."""
    print_line(
        console,
        f"{compact(model.parameters)} parameters on {machine.name}, {size(machine.available)} usable "
        "per device.",
        "",
    )
    heads, rows = numbers_table(model, found)
    print_rows(console, "Fastest on each number of devices", heads, rows, right=heads[2:])
    for each in found:
        if not each.best:
            print_line(console, f"{counted(each.devices, 'device')}: {each.reason}.")
    if verdict := numbers_verdict(found):
        print_line(console, verdict)


def numbers_table(
    model: Transformer, found: Sequence[NumberOfDevices]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and a row for each number of devices on which a configuration fits."""
    usable = [each for each in found if each.best]
    layouts = [each.best for each in usable if each.best]
    trainings = [each.training for each in usable if each.training]
    more, costs = training_table(layouts, trainings) if trainings else ((), [()] * len(layouts))
    heads = ("devices", "layout", "step", "tokens/s", *more[1:])
    rows = [
        (
            str(best.plan.layout.size),
            str(best.plan.layout),
            duration(best.step.total),
            compact(best.plan.global_batch * model.seq / best.step.total),
            *cells[1:],
        )
        for best, cells in zip(layouts, costs, strict=True)
    ]
    return heads, rows


def numbers_verdict(found: Sequence[NumberOfDevices]) -> str:
    """Return which number of devices is the cheapest, or "" without trainings."""
    if not any(each.training for each in found):
        return ""
    first = cheapest(found)
    if first is None or first.training is None:
        return f"No number of devices meets the deadline in {percent(IN_TIME)} of simulated trainings."
    price = f" and a price of {compact(first.training.price)}" if first.training.price else ""
    within = " within the deadline" if first.deadline else ""
    hours = f"{compact(first.training.device_hours)} device hours"
    return f"Least cost{within}: {counted(first.devices, 'device')}, with {hours}{price}."

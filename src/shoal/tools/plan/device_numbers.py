"""The number of devices with which a training is cheapest, or meets its deadline at the least price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.prediction import Prediction
from shoal.tools.plan.search.search import search_plans
from shoal.tools.plan.training.whole_training import Training, TrainingEstimate, training_of
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.errors import ShoalError

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
        training=None if training is None else training_of(training, best, machine, model.seq),
        deadline=training is not None and training.deadline > 0,
    )


def cheapest(found: Sequence[NumberOfDevices]) -> NumberOfDevices | None:
    """Return the cheapest training that meets its deadline, if there is one."""
    return min((each for each in found if not each.late), key=lambda each: each.cost, default=None)

"""The number of devices with which a training is cheapest, or meets its deadline at the least price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.candidates import FixedOptions
from shoal.tools.plan.search.search import Prediction, search_plans
from shoal.tools.plan.show.parts import prediction_values, training_columns, training_values
from shoal.tools.plan.time.step_error import step_band
from shoal.tools.plan.training.whole_training import Training, TrainingEstimate, training_of
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.document import Document, DocumentBlock, Figure, LinePlot, Section, Series, Table, Text
from shoal.util.errors import ShoalError
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
    fixed: FixedOptions,
    training: Callable[[int], Training | None],
) -> list[NumberOfDevices]:
    """Return the fastest configuration on each number of devices, and the training with it.

    Raises the ShoalError of the last number if all fail.
    """
    found, errors = [], []
    for devices in numbers:
        asked = training(devices)
        try:
            found.append(_search_number(model, machine, devices, batch, fixed, asked))
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
    fixed: FixedOptions,
    training: Training | None,
) -> NumberOfDevices:
    result = search_plans(model, machine, devices, batch, fixed, top=1)
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


def numbers_document(
    model: Transformer, machine: Machine, found: Sequence[NumberOfDevices]
) -> Document:
    """Return a row for each number of devices, and which of them is the cheapest."""
    best = [each.best for each in found if each.best]
    first = cheapest(found)
    title = f"{compact(model.parameters)} parameters on {machine.name}"
    usable = f"{title}, {size(machine.available)} usable per device."
    blocks: list[DocumentBlock] = [Text(text=usable)]
    blocks += [_throughput(model, machine, best)] if best else []
    blocks.append(_table(model, found))
    blocks += [
        Text(text=f"{counted(each.devices, 'device')}: {each.reason}.")
        for each in found
        if not each.best
    ]
    return Document(
        title=title,
        verdict=_verdict(found, first) or "The throughput of the fastest layouts.",
        about=f"shoal plan, {counted(len(found), 'number')} of devices",
        sections=[Section(heading="Throughput", blocks=blocks)],
        values={
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
        },
    )


def _table(model: Transformer, found: Sequence[NumberOfDevices]) -> Table:
    layouts = [each.best for each in found if each.best]
    columns = {
        "devices": [str(each.plan.layout.size) for each in layouts],
        "layout": [str(each.plan.layout) for each in layouts],
        "step": [duration(each.step_seconds) for each in layouts],
        "tokens/s": [compact(_tokens(model, each) / each.step_seconds) for each in layouts],
        **training_columns([each.training for each in found if each.training and each.best]),
    }
    used = {name: values for name, values in columns.items() if values}
    return Table(
        caption="Fastest on each number of devices",
        head=[*used],
        rows=[*zip(*used.values(), strict=True)],
        right=[*used][2:],
        whole=("layout",),
    )


def _verdict(found: Sequence[NumberOfDevices], first: NumberOfDevices | None) -> str:
    """Return which number of devices is the cheapest, or "" without trainings."""
    if not any(each.training for each in found):
        return ""
    if first is None or first.training is None:
        return f"No number of devices meets the deadline in {percent(IN_TIME)} of simulated trainings."
    price = f" and a price of {compact(first.training.price)}" if first.training.price else ""
    within = " within the deadline" if first.deadline else ""
    hours = f"{compact(first.training.device_hours)} device hours"
    return f"Least cost{within}: {counted(first.devices, 'device')}, with {hours}{price}."


def _throughput(model: Transformer, machine: Machine, best: Sequence[Prediction]) -> Figure:
    devices = [float(each.plan.layout.size) for each in best]
    tokens = [_tokens(model, each) for each in best]
    bands = [step_band(each.time, machine) for each in best]
    predicted = [count / each.step_seconds for count, each in zip(tokens, best, strict=True)]
    lines = [
        Series(
            label="predicted",
            x=devices,
            y=predicted,
            low=[count / each.high for count, each in zip(tokens, bands, strict=True)],
            high=[count / each.low for count, each in zip(tokens, bands, strict=True)],
            points=True,
        ),
        Series(
            label="proportional to devices",
            x=devices,
            y=[predicted[0] * count / devices[0] for count in devices],
            faint=True,
        ),
    ]
    return Figure(
        name="throughput",
        caption="Tokens per second of the fastest layout on each number of devices. 80 % of measured "
        "steps are expected within the band.",
        drawing=LinePlot(
            series=lines,
            x="devices",
            y="tokens/s",
            log_x=True,
            log_y=True,
            ticks=sorted(set(devices)),
            band=("80 % from", "to"),
        ),
    )


def _tokens(model: Transformer, found: Prediction) -> int:
    """Return the tokens of a step."""
    return found.plan.global_batch * model.seq

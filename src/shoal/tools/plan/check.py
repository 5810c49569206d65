"""A prediction compared with the steps that a run recorded, and a machine file moved towards them."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shoal.distributed.layout import Layout
from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.tools.plan.machine.machines import Efficiency, Machine, find_machine
from shoal.tools.plan.show.parts import time_bars
from shoal.tools.plan.time.known_step import machine_of_step
from shoal.tools.plan.time.step_error import StepBand, step_band
from shoal.tools.plan.time.step_time import StepParts, estimate_step
from shoal.tools.plan.work.divisions import check_division
from shoal.tools.plan.work.planned_step import PlannedStep, Recompute
from shoal.tools.plan.work.transformer import Transformer
from shoal.tools.report import LABELS, SHOWN, Attempt, profile, read_history
from shoal.util.clock import utc_now
from shoal.util.document import Document, Section, Table, Text
from shoal.util.errors import ShoalError
from shoal.util.safe_text import printable
from shoal.util.units import counted, duration

_PRECISIONS = {"fp32": "fp32", "bf16": "mixed", "fp16": "mixed"}
_MEASURED: Mapping[str, tuple[str, ...]] = {
    "forward and backward": ("forward", "backward"),
    "optimizer": ("update",),
    "communication and waiting": ("communication", "waiting"),
}
_REST = ("wait", "transfer", "checkpoint", "evaluation", "other")
"""Parts of a step that no prediction has."""


@dataclass(frozen=True, kw_only=True)
class PartCheck:
    """Seconds of one part of a step; `predicted` is None for parts that are not predicted."""

    name: str
    predicted: float | None
    measured: float


@dataclass(frozen=True, kw_only=True)
class EfficiencyChange:
    """An efficiency of a machine, and the one with which predictions fit a run."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class RunCheck:
    """A prediction and the measured steps of a run.

    `changes` are those of the machine with which predictions fit the run; `misfit` says why there is
    none.
    """

    plan: PlannedStep
    step: StepParts
    band: StepBand
    steps: int
    parts: tuple[PartCheck, ...]
    changes: tuple[EfficiencyChange, ...] = ()
    misfit: ShoalError | None = None

    @property
    def measured(self) -> float:
        """Seconds of a measured step."""
        return sum(part.measured for part in self.parts)

    @property
    def known_seconds(self) -> float:
        """Seconds of a measured step without what a prediction does not have."""
        return sum(part.measured for part in self.parts if part.predicted is not None)

    @property
    def known_step(self) -> str:
        """The step as `--known-step-time` takes it."""
        plan = self.plan
        flow = f" schedule={plan.schedule} stages={plan.stages}" if plan.layout.pipeline > 1 else ""
        return (
            f"{self.known_seconds:.4g} layout={plan.layout} batch={plan.global_batch} "
            f"micro_batch={plan.micro_batch} recompute={plan.recompute} "
            f"precision={plan.precision}{flow}"
        )

    @property
    def verdict(self) -> str:
        """One sentence: the ratio, the band, and the part that differs most."""
        low, high = (edge / self.step.total for edge in (self.band.low, self.band.high))
        ratio = self.measured / self.step.total
        where = "within" if low <= ratio <= high else "outside"
        largest = max(self.parts, key=lambda part: abs(part.measured - (part.predicted or 0.0)))
        return (
            f"A step takes {ratio:.2f} times the predicted time, {where} the band of {low:.2f} to "
            f"{high:.2f}. The largest difference is in {largest.name}."
        )


def check_run(
    directory: Path,
    model: Transformer,
    machine: Machine,
    *,
    micro_batch: int | None = None,
    recompute: Recompute = "none",
    schedule: str = "1f1b",
    stages: int | None = None,
) -> RunCheck:
    """Return a prediction for the last attempt of a run, and its steps without those that warm up.

    `micro_batch` is in samples. Default: the local batch. `schedule` is that of a pipeline, and
    `stages` its stages per rank. Default: those of the schedule.

    Raises:
        ShoalError: If the run has no steps or its events lack the layout or the batch size.
    """
    attempt = read_history(directory).latest
    found = None if attempt is None else profile(attempt)
    if attempt is None or found is None:
        raise _unusable(directory, "it has recorded no steps", "check a run that took some steps")
    plan = _plan_of(directory, attempt, micro_batch, recompute, schedule, stages)
    check_division(model, plan, f"--check {directory}, a run with {plan.layout}")
    usual = np.median(found.average(found.mean), axis=-1)
    measured = dict(zip(SHOWN, (float(each) for each in usual), strict=True))
    step = estimate_step(model, plan, machine)
    predicted = step.measured_parts
    parts = [
        PartCheck(name=name, predicted=predicted[name], measured=sum(measured[each] for each in own))
        for name, own in _MEASURED.items()
    ]
    names = {**LABELS, "wait": "data loading"}  # a prediction's part "data" is of data parallelism
    parts += [
        PartCheck(name=names[each], predicted=None, measured=measured[each])
        for each in _REST
        if measured[each] > 0
    ]
    band = step_band(step, machine)
    checked = RunCheck(plan=plan, step=step, band=band, steps=found.steps, parts=tuple(parts))
    try:
        fitted = machine_of_step(model, plan, machine, checked.known_seconds)
    except ShoalError as error:
        return replace(checked, misfit=error)
    return replace(checked, changes=tuple(_changes(machine.efficiency, fitted.efficiency)))


def _changes(before: Efficiency, after: Efficiency) -> Iterator[EfficiencyChange]:
    for name, old in vars(before).items():
        new = float(f"{getattr(after, name):.4g}")
        if new != old:
            yield EfficiencyChange(name=name, before=old, after=new)


def _plan_of(
    directory: Path,
    attempt: Attempt,
    micro_batch: int | None,
    recompute: Recompute,
    schedule: str,
    stages: int | None,
) -> PlannedStep:
    """Return the configuration of a run, from the events of its first rank."""
    start = next(iter(attempt.starts.values()), {})
    batch, layout, precision = (start.get(key) for key in ("batch_size", "layout", "precision"))
    if not isinstance(layout, str) or type(batch) is not int or batch < 1:
        raise _unusable(
            directory,
            f"its events have layout {layout!r} and batch size {batch!r}",
            "check a run whose batch size is a number of samples",
        )
    degrees = Layout.parse(layout).resolve(attempt.size)
    if degrees.expert > 1:
        raise _unusable(
            directory,
            f"its layout is {layout}, and neither --model nor the events of the run have the experts",
            'plan the module, and compare while it trains: shoal.Run(…, plan="plan.json")',
        )
    local = max(1, batch // degrees.data_size)
    if micro_batch is not None and (micro_batch > local or local % micro_batch):
        raise _unusable(
            directory,
            f"its local batch of {local} samples is not divisible by {micro_batch}",
            f"use --micro-batch {local}",
        )
    return PlannedStep(
        layout=degrees,
        global_batch=batch,
        micro_batch=micro_batch or local,
        recompute=recompute,
        precision=_PRECISIONS.get(str(precision), "fp32"),
        sequence_parallel=degrees.tensor > 1 and degrees.pipeline == 1,
        stages=(stages or SCHEDULES[schedule].stages) if degrees.pipeline > 1 else 1,
        schedule=schedule,
    )


def _unusable(directory: Path, found: str, fix: str) -> ShoalError:
    return ShoalError(given=f"--check {directory}", found=found, fix=fix)


def check_document(found: RunCheck) -> Document:
    """Return the predicted and the measured time of each part, and of the step."""
    head = ("part", "predicted", "measured")
    rows = [
        (
            each.name,
            "not predicted" if each.predicted is None else duration(each.predicted),
            duration(each.measured),
        )
        for each in found.parts
    ]
    table = Table(
        caption=f"{counted(found.steps, 'step')}, {found.plan.layout}",
        head=head,
        rows=[*rows, ("step", duration(found.step.total), duration(found.measured))],
        right=head[1:],
    )
    predicted = {each.name: each.predicted or 0.0 for each in found.parts}
    measured = {each.name: each.measured for each in found.parts}
    bars = time_bars("", "A step by part, predicted and measured", head[1:], [predicted, measured])
    changes = Table(
        caption="Efficiencies that fit the run",
        head=("efficiency", "machine", "fitted"),
        rows=[(each.name, f"{each.before:.4g}", f"{each.after:.4g}") for each in found.changes],
        right=("machine", "fitted"),
    )
    known = Text(
        text=f'To plan with them: --known-step-time "{found.known_step}", or --update to write them to '
        "the machine file."
        if found.misfit is None
        else f"No machine fits the run: {found.misfit.found}."
    )
    return Document(
        title=f"Prediction and run: {found.plan.layout}",
        verdict=found.verdict,
        about=f"shoal plan --check, {found.steps:,} steps",
        sections=[Section(heading="Parts", blocks=[*bars, table, changes, known])],
        values={
            "verdict": found.verdict,
            "layout": str(found.plan.layout),
            "micro_batch": found.plan.micro_batch,
            "steps": found.steps,
            "predicted_seconds": found.step.total,
            "measured_seconds": found.measured,
            "parts": found.parts,
            "known_step": found.known_step,
            "efficiencies": found.changes,
        },
    )


FEWEST = 16
"""Measured steps that an update needs."""


def efficiency_changes(found: RunCheck) -> list[EfficiencyChange]:
    """Return the changes that an update writes.

    Raises ShoalError if the run has too few steps, or takes a time that only another model takes.
    """
    if found.steps < FEWEST:
        raise ShoalError(
            given="--check … --update",
            found=f"the run has {found.steps} steps after the warm-up, fewer than {FEWEST}",
            fix="check a longer run",
        )
    if found.misfit is not None:
        raise found.misfit
    return list(found.changes)


def update_machine_file(path: str, run: Path, changes: Sequence[EfficiencyChange]) -> None:
    """Write changed efficiencies into a machine file, with the date, the run and the values before.

    All other lines stay. The file is replaced atomically.

    Raises ShoalError if the file can't be written, or has its efficiencies in another form.
    """
    file = Path(path).resolve()
    machine = find_machine(path)
    text = _with_values(file.read_text(encoding="utf-8"), machine.name, changes, run)
    with tempfile.TemporaryDirectory(dir=_folder(file, path)) as folder:
        target = Path(folder, "machine.toml")
        target.write_text(text, encoding="utf-8")
        _check_written(target, path, machine.name, changes)
        target.chmod(file.stat().st_mode & 0o777)
        target.replace(file)


def _folder(file: Path, path: str) -> Path:
    if not os.access(file.parent, os.W_OK):
        raise ShoalError(
            given=f"--update {path}",
            found=f"{file.parent} is not writable",
            fix="use a file in a directory where you have permission",
        )
    return file.parent


def _check_written(target: Path, path: str, name: str, changes: Sequence[EfficiencyChange]) -> None:
    """Raise ShoalError if a file that uses another form of TOML did not take the values."""
    with suppress(ShoalError):
        written = find_machine(str(target)).efficiency
        if all(getattr(written, each.name) == each.after for each in changes):
            return
    raise ShoalError(
        given=f"--update {path}",
        found=f"its efficiencies are not lines `name = value` of [{name}.efficiency]",
        fix="write them as docs/guides/plan.md shows",
    )


def _with_values(text: str, name: str, changes: Sequence[EfficiencyChange], run: Path) -> str:
    """Return the text of a machine file with changed efficiencies, and a comment about the run."""
    heading, lines = f"[{name}.efficiency]", text.splitlines()
    if heading not in _without_comments(lines):
        lines += ["", heading]
    bare = _without_comments(lines)
    first = bare.index(heading) + 1
    last = next((n for n in range(first, len(bare)) if bare[n].startswith("[")), len(bare))
    added = []
    for each in changes:
        value = f"{each.name} = {each.after:.4g}"
        place = next((n for n in range(first, last) if re.match(rf"{each.name}\s*=", bare[n])), None)
        if place is None:
            added.append(value)
        else:
            comment = re.search(r"\s*#.*$", lines[place])
            lines[place] = value + (comment[0] if comment else "")
    was = ", ".join(f"{each.name} {each.before:.4g}" for each in changes)
    note = f"# {utc_now():%Y-%m-%d}, run {printable(str(run))}; before: {was}"
    return "\n".join([*lines[:last], *added, *lines[last:], note]) + "\n"


def _without_comments(lines: Sequence[str]) -> list[str]:
    return [line.split("#")[0].strip() for line in lines]

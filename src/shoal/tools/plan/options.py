"""Options of `shoal plan`, and those that do not belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.tools.bench.options import fill_places
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.candidates import FixedOptions
from shoal.tools.plan.time.known_step import machine_of_step, parse_known_step
from shoal.tools.plan.training.measured_start import fill_in_measured
from shoal.tools.plan.training.whole_training import Training, parse_training
from shoal.tools.plan.work.planned_step import (
    ANY_PRECISION,
    FORMATS,
    RECOMPUTES,
    PlannedStep,
    Recompute,
)
from shoal.tools.plan.work.transformer import parse_model
from shoal.util.arguments import check_choice
from shoal.util.errors import ShoalError
from shoal.util.tables import plain_console, print_line

AUTO, USUAL = "auto", "replicate=-1"
"""The layout with which a search tries all, and the default of a module."""
_MOST = 65536
_SUBMITTED = "--submit 1 -- --time 20:00:00 train.py --layout {layout}"
_TRIED = "--try 3 -- train.py --layout {layout} --run {run} --steps {steps}"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of one command.

    `run` is the run of `--check`. `submitted` is the number of the layout to submit, and `tried` the
    number of layouts that run a script, with `words`.
    """

    model: str
    machine: Machine
    numbers: Sequence[int]
    batch: int
    precision: str
    top: int
    run: Path | None
    micro_batch: int | None
    recompute: Recompute | None
    layout: str | None
    split_points: tuple[str, ...]
    schedule: str | None
    stages: int | None
    fake: bool
    training: str | None
    what_if: Sequence[str]
    known_step: str | None
    submitted: int | None
    tried: int | None
    words: Sequence[str]

    @property
    def devices(self) -> int:
        """The number of devices; of several, the smallest."""
        return self.numbers[0]

    @property
    def traced(self) -> bool:
        """Whether the model is a module, and not the dimensions of a transformer."""
        return ":" in self.model

    @property
    def fixed(self) -> FixedOptions:
        """The options that a search for layouts of a transformer does not vary."""
        return FixedOptions(
            layout=None if self.layout == AUTO else self.layout,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            precision=self.precision,
            schedule=self.schedule,
            stages=self.stages,
        )

    def with_known_step(self) -> PlanOptions:
        """Return the options with the machine on which the known step takes its time."""
        if self.known_step is None:
            return self
        model = parse_model(self.model)
        plan, seconds = parse_known_step(self.known_step, model, self.machine)
        return replace(self, machine=machine_of_step(model, plan, self.machine, seconds))

    def training_on(self, devices: int) -> Training | None:
        """Return what `--training` describes; print each value that is measured in place of `auto`."""
        if self.training is None:
            return None
        machine = self.machine
        measured = fill_in_measured(self.training, devices, machine.per_host, gpus=not machine.is_cpu)
        print_line(plain_console(stderr=True), *measured[1])
        return parse_training(measured[0])

    def check(self) -> None:
        """Raise ShoalError for wrong values, and for options that would have no effect."""
        self._check_words()
        if self.traced and self.run is not None:
            raise ShoalError(
                given=f"--check with --model {self.model}",
                found="a run is compared with the prediction for the dimensions of a transformer",
                fix="use --model hidden=…,layers=…,heads=…,vocab=…,seq=…, or for a module, train with "
                'shoal.Run(…, plan="plan.json")',
            )
        known = [name for name, each in FORMATS.items() if not (self.traced and each.fp8)]
        known += [] if self.traced else [ANY_PRECISION]
        check_value = partial(check_choice, ShoalError, "shoal plan")
        check_value("--precision", self.precision, known)
        check_value("--recompute", self.recompute or "none", RECOMPUTES)
        check_value("--schedule", self.schedule or "1f1b", SCHEDULES, fix="pass --schedule 1f1b")
        if self.traced:
            self._check_traced()
        elif self.known_step is not None and any(each.startswith("machine=") for each in self.what_if):
            raise ShoalError(
                given="--known-step-time with --what-if machine=…",
                found="the step was not measured on the other machine",
                fix="plan each machine by itself",
            )
        else:
            self._check_dimensions()
        started = {"--submit": self.submitted, "--try": self.tried}
        if len(self.numbers) > 1:
            model = {f"--model {self.model}": self.traced}
            self._refuse_with_numbers(
                {**started, "--check": self.run, "--what-if": self.what_if, **model}
            )
        elif self.run is not None:
            _refuse(
                {
                    **started,
                    "--training": self.training,
                    "--what-if": self.what_if,
                    "--known-step-time": self.known_step,
                },
                "--check",
                "leave {} out",
            )

    def _check_traced(self) -> None:
        _refuse(
            {
                "--what-if": self.what_if,
                "--known-step-time": self.known_step,
                f"--stages {self.stages}": self.stages,
            },
            f"--model {self.model}",
            "leave {} out, or describe the model as in --model llama-7b",
        )
        if self.layout != AUTO and (self.tried or 1) > 1:
            raise ShoalError(
                given=f"--try {self.tried} with --layout {self.layout or USUAL}",
                found="it is one layout",
                fix=f"use --layout {AUTO}, or --try 1",
            )

    def _check_dimensions(self) -> None:
        fix = "leave it out, or trace your module: --model train.py:build"
        traced = {"--split-points": self.split_points, "--measure": not self.fake}
        _refuse(traced, f"--model {self.model}", fix, "it is for a traced module")
        if self.run is not None:
            layout = {f"--layout {self.layout}": self.layout}
            _refuse(layout, "--check", "leave it out", "the layout is that of the run")
        elif self.layout not in (None, AUTO) and "pipeline" not in str(self.layout):
            pipelined = {
                f"--schedule {self.schedule}": self.schedule,
                f"--stages {self.stages}": self.stages,
            }
            fix = "leave it out, or use --layout shard=-1,pipeline=2"
            _refuse(pipelined, f"--layout {self.layout}", fix, "the layout has no pipeline")

    def _refuse_with_numbers(self, options: Mapping[str, object]) -> None:
        for name in (name for name, value in options.items() if value):
            raise ShoalError(
                given=f"-n {','.join(map(str, self.numbers))} with {name}",
                found="it needs one number of devices",
                fix=f"use -n {self.devices}",
            )

    def _check_words(self) -> None:
        """Raise ShoalError if there is no such layout, or if the script would not get it."""
        count, option = (self.submitted, "--submit") if self.tried is None else (self.tried, "--try")
        words = " ".join(self.words)
        if count is None:
            if words:
                raise ShoalError(
                    given=words,
                    found="neither --submit nor --try: nothing starts",
                    fix=_SUBMITTED,
                )
            return
        given = f"{option} {count}"
        if self.tried is not None and self.submitted is not None:
            raise ShoalError(
                given=f"{given} --submit {self.submitted}",
                found="both start the script",
                fix=_SUBMITTED,
            )
        if count > self.top:
            raise ShoalError(
                given=given, found=f"--top {self.top} shows fewer layouts", fix=f"use --top {count}"
            )
        needed = {"{layout}": "the layout"}
        if self.tried is not None:
            needed["{run}"] = "the directory for its shoal.Run"
        for place, what in needed.items():
            if place not in words:
                raise ShoalError(
                    given=f"{given} -- {words}".rstrip(),
                    found=f"no {place} in the arguments: the script would not get {what}",
                    fix=_SUBMITTED if self.tried is None else _TRIED,
                )


def _refuse(
    options: Mapping[str, object],
    given: str,
    fix: str,
    found: str = "it needs the search for layouts of a transformer",
) -> None:
    for name in (name for name, value in options.items() if value):
        raise ShoalError(given=f"{name} with {given}", found=found, fix=fix.format(name))


def parse_devices(text: str) -> list[int]:
    """Return the numbers of devices that an option lists. Raise ShoalError if it lists others."""
    found: list[int] = []
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


def fill_words(words: Sequence[str], plan: PlannedStep, **others: str) -> list[str]:
    """Return words with the values of a plan, and others, for their names in braces."""
    own = {
        name: str(getattr(plan, name))
        for name in (
            *("layout", "micro_batch", "micro_batches", "recompute", "schedule", "stages"),
            *("reshard_after_forward", "accumulate"),
        )
    }
    return fill_places(words, {**own, "batch": str(plan.global_batch), **others})

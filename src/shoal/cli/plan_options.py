"""Options of `shoal plan`, and those that do not belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.util.errors import ShoalError

if TYPE_CHECKING:
    from shoal.tools.plan.machine.machines import Machine
    from shoal.tools.plan.training.whole_training import Training
    from shoal.tools.plan.work.planned_step import Recompute
    from shoal.util.document import Document

AUTO, USUAL = "auto", "replicate=-1"
"""The layout with which all layouts of a module are traced, and the default."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of one command. `tried` is the number of layouts that run the script `words`."""

    model: str
    machine: Machine
    devices: int
    batch: int
    precision: str
    top: int
    micro_batch: int | None
    recompute: Recompute
    layout: str
    split_points: tuple[str, ...]
    schedule: str
    fake: bool
    training: str | None
    what_if: tuple[str, ...]
    tried: int | None
    words: tuple[str, ...]
    html: Path | None
    as_json: bool

    @property
    def traced(self) -> bool:
        """Whether the model is a module, and not the dimensions of a transformer."""
        return ":" in self.model

    def training_on(self, devices: int) -> Training | None:
        """Return what `--training` describes; print each value that is measured in place of `auto`."""
        from shoal.tools.plan.training.measured_start import fill_in_measured
        from shoal.tools.plan.training.whole_training import parse_training
        from shoal.util.tables import plain_console, print_line

        if self.training is None:
            return None
        machine = self.machine
        measured = fill_in_measured(self.training, devices, machine.devices, gpus=not machine.is_cpu)
        for sentence in measured[1]:
            print_line(plain_console(stderr=True), sentence)
        return parse_training(measured[0])

    def check(self, *, of_run: bool) -> None:
        """Raise ShoalError for wrong values, and for options that would have no effect.

        `of_run` says that the prediction is that of a run.
        """
        from shoal.distributed.pipeline_schedules import SCHEDULES
        from shoal.tools.plan.work.planned_step import ANY_PRECISION, FORMATS, RECOMPUTES

        if self.traced and of_run:
            raise ShoalError(
                given=f"--check with --model {self.model}",
                found="a run is compared with the prediction for the dimensions of a transformer",
                fix="use --model hidden=…,layers=…,heads=…,vocab=…,seq=…, or for a module, train with "
                'shoal.Run(…, plan="plan.json")',
            )
        if self.html is not None and self.html.exists() and not self.html.is_dir():
            raise ShoalError(
                given=f"--html {self.html}",
                found="it is a file",
                fix="use a directory, such as --html plan-page",
            )
        traced = self.traced
        known = tuple(FORMATS) if traced else (*FORMATS, ANY_PRECISION)
        _check_choice("--precision", self.precision, known, "mixed")
        _check_choice("--recompute", self.recompute, RECOMPUTES, "none")
        _check_choice("--schedule", self.schedule, tuple(SCHEDULES), "1f1b")
        if traced:
            refuse_options({"--what-if": self.what_if}, f"--model {self.model}")
            if self.layout != AUTO and (self.tried or 1) > 1:
                raise ShoalError(
                    given=f"--try {self.tried} with --layout {self.layout}",
                    found="it is one layout",
                    fix=f"use --layout {AUTO}, or --try 1",
                )
            return
        fixed = {
            f"--layout {self.layout}": self.layout not in (AUTO, USUAL),
            "--split-points": self.split_points,
            f"--schedule {self.schedule}": self.schedule != "1f1b" and not of_run,
            "--measure": not self.fake,
        }
        if not of_run:
            fixed |= {
                f"--micro-batch {self.micro_batch}": self.micro_batch,
                f"--recompute {self.recompute}": self.recompute != "none",
            }
        for name, given in fixed.items():
            if given:
                raise ShoalError(
                    given=f"{name} with {'--check' if of_run else f'--model {self.model}'}",
                    found="it describes a traced module"
                    if of_run
                    else "the search for layouts of a transformer tries all values",
                    fix="leave it out"
                    if of_run
                    else "leave it out, or trace your module: --model train.py:build",
                )


def refuse_options(options: Mapping[str, object], given: str) -> None:
    """Raise ShoalError if one of these options of the search is given."""
    named = next((name for name, value in options.items() if value), None)
    if named is not None:
        other = "" if given == "--check" else ", or describe the model as in --model llama-7b"
        raise ShoalError(
            given=f"{named} with {given}",
            found="it needs the search for layouts of a transformer",
            fix=f"leave {named} out{other}",
        )


def _check_choice(option: str, given: str, known: Sequence[str], usual: str) -> None:
    if given not in known:
        raise ShoalError(
            given=f"{option} {given}",
            found=f"it is not one of {', '.join(known)}",
            fix=f"use {option} {usual}",
        )


def show_plan(document: Document, options: PlanOptions) -> None:
    """Print a document as the options ask, and write its page to the directory of `--html`."""
    from shoal.cli.output import show_document

    show_document(document, as_json=options.as_json)
    if options.html is not None:
        from shoal.tools.report.html import save_page
        from shoal.util.tables import plain_console, print_path

        path = save_page(document, options.html / "index.html", option="--html DIR")[0]
        print_path(plain_console(stderr=True), str(path))

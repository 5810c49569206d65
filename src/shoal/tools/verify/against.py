"""Compares the losses of a script with those of the script from which it was converted."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from shoal.launcher.signals import Interrupted
from shoal.tools.verify.audit import check_run, name_ranks
from shoal.tools.verify.observations import TIMED_OUT, LossRecord, RunRecord
from shoal.tools.verify.progress import VerifyProgress
from shoal.tools.verify.run_servers import RunServers, TimeLimitError
from shoal.tools.verify.variants import Variant, VerifyRequest, run_variant
from shoal.util.document import Document, KeyNumbers, Section, Table, Text, to_plain
from shoal.util.errors import LaunchError
from shoal.util.packages import versions

TOLERANCE = 1e-5
"""The largest relative difference of two losses that rounding in float32 explains."""
SMALL = 1e-3
"""A loss below this part of the largest one differs relative to that part."""
MOST_ELEMENTS = 1000
"""Above it, any ratio is close to an integer."""
Cause = tuple[str, str]
"""A difference between the scripts, and how to remove it."""


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """The losses of each run by its name, that of the old script first, and what explains differences.

    `differences` has the largest relative difference of each step, `first` the number of the first step
    whose losses differ. `stopped` says why the script did not run on all numbers of ranks.
    """

    command: str
    against: str
    losses: Mapping[str, Sequence[float]]
    differences: Sequence[float]
    first: int | None
    causes: Sequence[Cause]
    notes: Sequence[str]
    versions: Mapping[str, str]
    stopped: str = ""

    @property
    def same(self) -> bool:
        """Whether all runs took the same steps with the same losses."""
        return self.first is None and len({len(each) for each in self.losses.values()}) == 1

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if self.first is not None:
            return f"the losses differ from step {self.first} on"
        steps, most = len(self.differences), max(self.differences)
        digits = f"{math.floor(-math.log10(most))} digits" if most else "all digits"
        found = f"the losses of {steps} step{'s'[: steps != 1]} are the same in {digits}"
        lengths = ", ".join(f"{name} {len(each)}" for name, each in self.losses.items())
        found += "" if self.same else f", but the numbers of steps differ: {lengths}"
        return f"{found} ({self.stopped})" if self.stopped else found


def compare_losses(
    request: VerifyRequest,
    against: str,
    *,
    size: int,
    servers: RunServers,
    progress: VerifyProgress,
) -> LossReport:
    """Run the old script on `size` ranks, and the script on each number of ranks.

    Args:
        request: The script and its runs.
        against: Path of the old script, which gets the same arguments.
        size: Ranks of the old script.
        servers: The processes that start the runs, which may end the comparison early.
        progress: Shows each run.

    Returns:
        The losses, and the likely causes of their differences.

    Raises:
        LaunchError: If a script fails by itself, or its losses can't be observed.
    """
    runs = _run_all(request, against, size=size, servers=servers, progress=progress)
    slow = [run.name for run in runs if run.code == TIMED_OUT]
    records = [step_losses(run)[: request.steps] for run in runs]
    common = min(map(len, records))
    compared = [each[:common] for each in records]
    if slow:
        records = compared
    old, *new = compared
    least = SMALL * max((abs(each.loss) for each in old if math.isfinite(each.loss)), default=0.0)
    by_run = [
        [relative_difference(a.loss, b.loss, least) for a, b in zip(old, each, strict=True)]
        for each in new
    ]
    differences = [max(step) for step in zip(*by_run, strict=True)]
    wrong = next((n for n, each in enumerate(by_run, 1) if max(each) > TOLERANCE), None)
    causes: list[Cause] = []
    if wrong == 1:
        causes = _causes((against, request.script), runs[:2], compared[:2], _first(by_run[0]))
    elif wrong:
        advice = f"`shoal verify {request.script}` finds what depends on the number of ranks"
        causes = [(f"{runs[1].name}: the losses of {against}", advice)]
    return LossReport(
        command=shlex.join((request.script, *request.args)),
        against=against,
        losses={
            run.name: [record.loss for record in each] for run, each in zip(runs, records, strict=True)
        },
        differences=differences,
        first=None if wrong is None else _first(differences) + 1,
        causes=causes,
        notes=[f"ended after {request.limit:g} seconds: {name}" for name in slow],
        stopped=servers.reason,
        versions=versions(),
    )


def _run_all(
    request: VerifyRequest,
    against: str,
    *,
    size: int,
    servers: RunServers,
    progress: VerifyProgress,
) -> list[RunRecord]:
    """Return the runs: all, or at least two if the servers are stopped."""
    old = against if size == 1 else f"{against}, {name_ranks(size)}"
    wanted = [(against, old, size), *((request.script, name_ranks(n), n) for n in request.ranks)]
    runs: list[RunRecord] = []
    try:
        for script, name, ranks in wanted:
            progress.run_starts(name, request.steps)
            asked = replace(request, script=script)
            run = run_variant(asked, Variant(name=name, size=ranks, losses=True), servers)
            if servers.stopped is not None:
                raise servers.stopped
            check_run(asked, run)
            if not step_losses(run):
                raise LaunchError(
                    given=f"shoal verify --against {against} {request.script} ({name})",
                    found="no scalar whose backward pass ran before Optimizer.step",
                    fix=f"call loss.backward() on the scalar that {script} minimizes",
                )
            runs.append(run.alone())
    except (TimeLimitError, Interrupted) as stop:
        servers.stopped = stop
        if len(runs) < 2:
            raise LaunchError(
                given=f"shoal verify --against {against} {request.script}",
                found=f"{servers.reason} before two runs had ended",
                fix="compare fewer steps: --steps 10",
            ) from None
    return runs


def step_losses(run: RunRecord) -> list[LossRecord]:
    """Return the loss of each step: that of Shoal's StepResult, or the mean of the ranks' sums."""
    if own := [record for record in run.ranks[0].losses if record.shoal]:
        return own
    steps = zip(*(rank.losses for rank in run.ranks), strict=False)
    return [replace(step[0], loss=fmean(record.loss for record in step)) for step in steps]


def relative_difference(first: float, second: float, least: float) -> float:
    """Return the difference relative to the larger loss, or to `least`."""
    if first == second:
        return 0.0
    found = abs(first - second) / max(abs(first), abs(second), least)
    return math.inf if math.isnan(found) else found


def _first(differences: Sequence[float]) -> int:
    return next(n for n, difference in enumerate(differences) if difference > TOLERANCE)


def _causes(
    scripts: tuple[str, str],
    runs: Sequence[RunRecord],
    records: Sequence[Sequence[LossRecord]],
    at: int,
) -> list[Cause]:
    """Return what the records of two runs show about the first step that differs."""
    if found := [*_observed(scripts, runs, at), *_ratio(scripts, records, at)]:
        return found
    parts = "options of the optimizer, the clipping, and the backward passes of one step"
    advice = f"compare the {parts if at else 'loss functions, the models and the first batches'}"
    return [("initial parameters, samples and learning rates do not explain the difference", advice)]


def _observed(scripts: tuple[str, str], runs: Sequence[RunRecord], at: int) -> Iterator[Cause]:
    """Yield initial parameters, samples, learning rates and dropout that differ up to a step."""
    old, new = (run.ranks[0] for run in runs)
    start, other = old.steps[0], new.steps[0]
    if not (at or other.sharded) and start.parameters_before != other.parameters_before:
        yield (
            "the initial parameters differ",
            "seed both scripts with the same number, right before they build the model",
        )
    if not at and "dropout" in old.layers:
        yield (
            f"{old.layers['dropout']} draws other numbers in Shoal, by sample",
            "compare with rate 0",
        )
    for place in range(min(at + 1, *(run.length for run in runs))):
        samples = [run.global_samples(place) for run in runs]
        if all(samples) and samples[0] != samples[1]:
            shown = [f"{len(each)} samples, {each[:4]}…" for each in samples]
            yield (
                f"step {place + 1} trains with {shown[0]} in {scripts[0]}, {shown[1]} in {scripts[1]}",
                "set shuffle=False and the same global batch size in both",
            )
            break
    for place, (first, second) in enumerate(zip(old.steps, new.steps, strict=False)):
        if place <= at and not _close(first.lr, second.lr):
            rates = [", ".join(f"{rate:g}" for rate in step.lr) for step in (first, second)]
            yield (
                f"the learning rate of step {place + 1} is {rates[0]} in {scripts[0]}, {rates[1]} in "
                f"{scripts[1]}",
                "give both the same optimizer, and step the schedule as often",
            )
            break


def _close(first: Sequence[float], second: Sequence[float]) -> bool:
    return len(first) == len(second) and all(map(math.isclose, first, second))


def _ratio(
    scripts: tuple[str, str], records: Sequence[Sequence[LossRecord]], at: int
) -> Iterator[Cause]:
    """Yield what explains the ratio of the losses: a sum, accumulation, or another divisor."""
    ratios = [a.loss / b.loss if b.loss else math.nan for a, b in zip(*records, strict=True)]
    (old, new), ratio = (each[at] for each in records), ratios[at]
    script, converted = scripts
    # Other steps have this ratio only if the parameters stay the same.
    constant = len(ratios) > 1 and all(_near(each, ratio) for each in ratios)
    factor = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    if new.shoal and _near(ratio, new.count):
        yield (
            f"the loss of {script} is the sum over the {new.count:g} samples or tokens of a step, that "
            f"of {converted} their mean",
            f"divide the loss of {script} by their number",
        )
    elif not old.shoal and _near(ratio, old.count):
        yield (
            f"{script} adds the losses of {old.count:g} backward passes in each step",
            f"divide the loss of {script} by {old.count:g}",
        )
    elif constant or (not at and factor < MOST_ELEMENTS and _near(factor, round(factor))):
        yield (
            f"the loss of {script} is {ratio:g} times that of {converted} in "
            f"{'all steps' if constant else 'step 1'}",
            "divide both by the number of the same samples, elements or tokens, without a GradScaler",
        )


def _near(ratio: float, factor: float) -> bool:
    """Return whether a ratio is this factor up to rounding, and not 1."""
    return math.isclose(ratio, factor, rel_tol=1e-4) and not math.isclose(ratio, 1.0, rel_tol=1e-3)


def loss_document(report: LossReport) -> Document:
    """Return the losses side by side: the first steps, those around a difference, and the last."""
    steps, first = len(report.differences), report.first or 0
    near = {first - 1, first, first + 1} if first else set()
    shown = sorted(({1, 2, 3, steps} | near) & set(range(1, steps + 1)))
    numbers = (*report.losses, "largest relative difference")
    rows = [
        (
            str(step),
            *(f"{losses[step - 1]:.9g}" for losses in report.losses.values()),
            f"{report.differences[step - 1]:.1e}",
        )
        for step in shown
    ]
    table = Table(caption="Losses", head=("step", *numbers), rows=rows, right=("step", *numbers))
    causes = [Text(text=text, advice=advice, whole=True) for text, advice in report.causes]
    found = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    notes = [Text(text=f"note: {note}") for note in report.notes]
    return Document(
        title=f"shoal verify --against {report.against} {report.command}",
        verdict=f"{report.against} and {report.command}: {report.verdict}",
        sections=[
            Section(heading="Losses", blocks=[table]),
            Section(heading="Causes", blocks=causes),
            Section(heading="Runs", blocks=[*notes, KeyNumbers(pairs=[("versions", found)])]),
        ],
        values={**to_plain(report), "same": report.same, "verdict": report.verdict},
    )

"""`shoal bench modes`: the same function as a Python loop, torch operations, TorchScript, compiled.

The toy function squares five numbers ten times, as examples of TorchScript do, and then many numbers. A
model runs its forward and backward passes, as in training.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.distributed.world import World
from shoal.tools.bench.measurement import (
    LEAST,
    InterruptFlag,
    Output,
    Result,
    calls_for,
    in_turns,
    measure_alone,
    quartiles,
    target_errors,
    time_calls,
)
from shoal.tools.bench.options import check_seconds
from shoal.tools.bench.scaling.configurations import ScriptSubject, parse_subject
from shoal.tools.bench.scaling.models import make_model, one_batch
from shoal.util import accelerator
from shoal.util.arguments import check_integer
from shoal.util.clock import CLOCK
from shoal.util.document import Document, Section, Table, Text
from shoal.util.errors import LaunchError
from shoal.util.grouping import group_by
from shoal.util.tables import plain_console, print_line
from shoal.util.units import duration, percent, two_digits

PYTHON = "Python loop"
SAME = 1.05
"""Smaller differences are ignored."""
EQUAL = 1e-4
"""Results that differ by more, relative to the largest value, are not the same."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to compute a subject: seconds of a call (median, quartiles) and of the first one.

    `difference` is the largest difference of its results from those of torch's operations, relative to
    the largest value. If it could not run, `seconds` is None and `reason` has the reason.
    """

    subject: str
    way: str
    seconds: float | None = None
    low: float = 0.0
    high: float = 0.0
    first: float = 0.0
    samples: int = 0
    difference: float | None = None
    reason: str = ""


def modes_document(found: Sequence[Mode], model: str | None, batch: int) -> Document:
    """Return the advice, and a table for each subject; `batch` is the batch size of the model."""
    advice = mode_advice(found)
    tables = []
    for subject, own in group_by(found, lambda mode: mode.subject).items():
        what = f", forward and backward, batches of {batch}" if subject == model else ""
        head = ("", "a call", "spread", "first call", "differs by")
        rows = [_cells(mode) for mode in own]
        tables.append(Table(caption=f"{subject}{what}", head=head, rows=rows, right=head[1:4]))
    return Document(
        title="Execution modes",
        verdict="",
        sections=[
            Section(heading="Advice", blocks=[Text(text=sentence) for sentence in advice]),
            Section(heading="Times", blocks=tables),
        ],
        values={"advice": advice, "modes": found},
    )


def _cells(mode: Mode) -> tuple[str, ...]:
    if mode.seconds is None:
        return mode.way, "", "", "", mode.reason
    differs = ""
    if mode.difference is not None:
        differs = f"{mode.difference:.0e}" if mode.difference else "nothing"
    spread = percent((mode.high - mode.low) / mode.seconds, tenths=True)
    seconds, first = (duration(each, fixed=True) for each in (mode.seconds, mode.first))
    return mode.way, seconds, spread, first, differs


def mode_advice(found: Sequence[Mode]) -> list[str]:
    """Return a sentence for each subject, and one for each mode with other results."""
    said = [_sentence(subject, found) for subject in dict.fromkeys(mode.subject for mode in found)]
    said += [
        f"{mode.way} gives other results for {mode.subject}: they differ by {mode.difference:.0e}."
        for mode in found
        if mode.difference is not None and not mode.difference <= EQUAL
    ]
    return [sentence for sentence in said if sentence]


def _sentence(subject: str, found: Sequence[Mode]) -> str:
    """Return how the other modes compare with torch's operations run one by one."""
    own = {mode.way: mode for mode in found if mode.subject == subject}
    usual = own.get("torch operations") or own.get("eager")
    if usual is None or usual.seconds is None:
        return ""
    parts = [
        _compared(mode.way, mode.seconds, mode.first, usual.seconds)
        for mode in own.values()
        if mode is not usual and mode.seconds is not None
    ]
    took = duration(usual.seconds, fixed=True)
    return f"{subject}: {usual.way} {took} a call; {'; '.join(parts)}." if parts else ""


def _compared(way: str, seconds: float, first: float, usual: float) -> str:
    ratio = usual / seconds
    if 1 / SAME <= ratio <= SAME:
        return f"{way} as fast"
    if ratio < 1:
        return f"{way} takes {two_digits(1 / ratio)} times as long"
    calls = math.ceil(first / (usual - seconds))
    paid = f", which pays off after {calls:,} calls" if way != PYTHON else ""
    return f"{way} is {two_digits(ratio)} times as fast{paid}"


def mode_csv_rows(found: Sequence[Mode]) -> list[dict[str, object]]:
    """Return all modes as rows of a CSV file."""
    names = {"first": "first_call_seconds"}
    return [{names.get(name, name): value for name, value in asdict(mode).items()} for mode in found]


SQUARINGS = 10
NUMBERS = (5, 10_000)
TOY = "toy function of {:,} numbers"
_MOST = 200
_SAMPLE_SECONDS = 0.005
_MOST_CALLS = 10_000

Call = Callable[[], list[Tensor]]


def benchmark_modes(model: str | None, *, batch: int, seconds: float, output: Output) -> int:
    """Measure the toy function and a model, show the results, and return the exit code.

    Raises LaunchError for invalid options.
    """
    check_integer(LaunchError, "shoal bench modes", "--batch", batch, 1, usual=32)
    check_seconds("shoal bench modes", "--seconds", seconds)

    def measure(world: World, interrupts: InterruptFlag) -> Result | None:
        subjects = {TOY.format(count): _toy(count) for count in NUMBERS}
        if model is not None:
            subjects[model] = _ways(*_model(model, batch, world), world.device)
        print_line(
            plain_console(stderr=True),
            f"about {seconds:.0f} s, plus time to compile, up to a minute; Ctrl-C ends it and keeps "
            "the results so far",
        )
        found: list[Mode] = []
        for subject, ways in subjects.items():
            found += _measure(subject, ways, seconds / len(subjects), interrupts)
        if all(mode.seconds is None for mode in found):
            return None
        return modes_document(found, model, batch), mode_csv_rows(found)

    return measure_alone("shoal bench modes", measure, output)


def _toy(count: int) -> dict[str, Callable[[], Call]]:
    """Return the builders of each way to compute the toy function.

    Its numbers are close to 1; otherwise all results would be 0 or infinite.
    """
    numbers = 1 - torch.rand(count, generator=torch.Generator().manual_seed(0)) / 1000
    plain = numbers.tolist()

    def loop() -> list[Tensor]:
        return [torch.tensor(_squared_by_python(plain))]

    def calling(function: Callable[[Tensor], Tensor]) -> Call:
        return lambda: [function(numbers)]

    return {
        PYTHON: lambda: loop,
        "torch operations": lambda: calling(squared),
        "TorchScript": lambda: calling(torch.jit.script(squared)),
        "torch.compile": lambda: calling(torch.compile(squared)),
    }


def squared(x: Tensor) -> Tensor:
    """Ten times the square."""
    for _ in range(10):  # SQUARINGS: TorchScript knows no globals
        x = x * x
    return x


def _squared_by_python(values: list[float]) -> list[float]:
    for _ in range(SQUARINGS):
        values = [value * value for value in values]
    return values


def _model(text: str, batch: int, world: World) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return the model, and a function that computes its loss over one batch."""
    subject = parse_subject(text)
    if isinstance(subject, ScriptSubject):
        raise LaunchError(
            given=text,
            found="it is a script, and no model can be imported from it",
            fix="pass dense, gpt, resnet-small, or module:function for a function that returns "
            "(model, task, dataset)",
        )
    with target_errors(text):
        return one_batch(make_model(subject, batch), batch, world)


def _ways(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], device: torch.device
) -> dict[str, Callable[[], Call]]:
    """Return the builders of each way to run a model forward and backward, on its own copy."""

    def running(way: Callable[[nn.Module], Any]) -> Call:
        own = copy.deepcopy(model)
        ready = way(own)
        parameters = [each for each in own.parameters() if each.requires_grad]

        def call() -> list[Tensor]:
            torch.manual_seed(0)  # for dropout, since the modes are compared
            for each in parameters:
                each.grad = None
            value = loss(ready)
            value.backward()
            accelerator.synchronize(device)
            return [value.detach(), *(each.grad for each in parameters if each.grad is not None)]

        return call

    return {
        "eager": lambda: running(lambda own: own),
        "TorchScript": lambda: running(torch.jit.script),
        "torch.compile": lambda: running(torch.compile),
    }


def _measure(
    subject: str,
    ways: dict[str, Callable[[], Call]],
    seconds: float,
    interrupts: InterruptFlag,
) -> list[Mode]:
    """Measure all modes of one subject: first calls, then samples in turns."""
    runners: list[_Runner] = []
    failed: list[Mode] = []
    for way, prepare in ways.items():
        if interrupts.asked:
            failed.append(Mode(subject=subject, way=way, reason="ended before it began"))
            continue
        interrupts.at_once = True  # Ctrl-C must not wait for a compiler
        try:
            runners.append(_Runner(way, prepare))
        except (Exception, KeyboardInterrupt) as error:
            failed.append(Mode(subject=subject, way=way, reason=_reason(error)))
        finally:
            interrupts.at_once = False
    ends = CLOCK.now() + seconds
    for runner in in_turns(runners, _MOST, lambda: ends - CLOCK.now()):
        if not interrupts.asked:
            runner.sample()
    usual = next((one for one in runners if one.way in ("torch operations", "eager")), None)
    return [*(one.mode(subject, usual) for one in runners), *failed]


class _Runner:
    """One way to compute: its first call, and samples of later ones."""

    def __init__(self, way: str, prepare: Callable[[], Call]) -> None:
        self.way = way
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, but many still have it
            begun = CLOCK.now()
            self._call = prepare()
            self.result = [each.clone() for each in self._call()]
            self.first = CLOCK.now() - begun
        # TorchScript profiles the first calls, and rewrites its graph.
        time_calls(self._call, LEAST)
        took = time_calls(self._call)
        self._times = calls_for(_SAMPLE_SECONDS, took, _MOST_CALLS)
        self.samples = [took]

    def sample(self) -> None:
        """Measure a few calls."""
        self.samples.append(time_calls(self._call, self._times))

    def mode(self, subject: str, usual: _Runner | None) -> Mode:
        """Return the figures, compared with the results of another runner."""
        # The first sample is a single call, which counts only if there is no other.
        samples = self.samples[1:] or self.samples
        low, median, high = quartiles(samples)
        return Mode(
            subject=subject,
            way=self.way,
            seconds=median,
            low=low,
            high=high,
            first=self.first,
            samples=len(samples),
            difference=None if usual is None else _difference(self.result, usual.result),
        )


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of any tensor, relative to the largest value in it."""
    differences = [
        float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
        for one, other in zip(found, expected, strict=True)
        if other.numel()
    ]
    return max(differences, default=0.0)


def _reason(error: BaseException) -> str:
    """Return the first meaningful line of the message; compilers surround it with many others."""
    if isinstance(error, KeyboardInterrupt):
        return "ended by Ctrl-C"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]

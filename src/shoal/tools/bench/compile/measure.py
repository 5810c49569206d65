"""`shoal bench modes`: the same function as a Python loop, torch operations, TorchScript, compiled.

The toy function squares five numbers ten times, as examples of TorchScript do, and then many numbers. A
model runs its forward and backward passes, as in training.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.distributed.init import init
from shoal.distributed.world import World
from shoal.tools.bench.compile.display import PYTHON, Mode, mode_advice, mode_csv_rows
from shoal.tools.bench.import_target import require_alone, target_error
from shoal.tools.bench.scaling.interrupt import InterruptFlag
from shoal.tools.bench.scaling.models import make_model, one_batch
from shoal.tools.bench.scaling.subject import ScriptSubject, parse_subject
from shoal.tools.report.html import write_csv
from shoal.util import accelerator
from shoal.util.arguments import check_integer, check_number
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError, ShoalError
from shoal.util.grouping import group_by
from shoal.util.tables import plain_console, print_line, print_path, print_rows
from shoal.util.units import duration, percent

SQUARINGS = 10
NUMBERS = (5, 10_000)
TOY = "toy function of {:,} numbers"
_LEAST, _MOST = 3, 200
_SAMPLE_SECONDS = 0.005
_MOST_CALLS = 10_000

Call = Callable[[], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """The subjects of the measurement; `model` None for the toy function alone."""

    model: str | None
    batch: int
    seconds: float
    csv: Path | None
    json: bool


def benchmark_modes(asked: CompileOptions) -> int:
    """Measure, print, and return the exit code. Raises LaunchError for invalid options."""
    check_integer(LaunchError, "shoal bench modes", "--batch", asked.batch, 1, usual=32)
    check_number(LaunchError, "shoal bench modes", "--seconds", asked.seconds, above=True, most=86400)
    require_alone("shoal bench modes")
    screen = plain_console(stderr=True)
    world = init()
    try:  # not `with`, which would add a line of this file to the traceback
        subjects = {TOY.format(count): _toy(count) for count in NUMBERS}
        if asked.model is not None:
            subjects[asked.model] = _ways(*_model(asked.model, asked.batch, world), world.device)
        found: list[Mode] = []
        with InterruptFlag() as interrupts:
            print_line(
                screen,
                f"about {asked.seconds:.0f} s, plus time to compile, up to a minute; Ctrl-C ends it "
                "and keeps the results so far",
            )
            for subject, ways in subjects.items():
                share = asked.seconds / len(subjects)
                found += _measure(subject, ways, share, interrupts)
    finally:
        world.close()
    if any(mode.seconds is not None for mode in found):
        _report(asked, found)
    else:
        print_line(screen, "Ended before the first measurement.")
    return 128 + interrupts.asked if interrupts.asked else 0


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
    try:
        return one_batch(make_model(subject, batch), batch, world)
    except ShoalError:
        raise
    except Exception as error:
        raise target_error(text, error) from error


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
    for number in range(_MOST):
        if number >= _LEAST and CLOCK.now() > ends:
            break
        for runner in runners if number % 2 == 0 else reversed(runners):
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
        for _ in range(_LEAST):
            self._call()
        begun = CLOCK.now()
        self._call()
        took = CLOCK.now() - begun
        self._times = min(_MOST_CALLS, max(1, math.ceil(_SAMPLE_SECONDS / max(took, 1e-9))))
        self.samples = [took]

    def sample(self) -> None:
        """Measure a few calls."""
        call = self._call
        begun = CLOCK.now()
        for _ in range(self._times):
            call()
        self.samples.append((CLOCK.now() - begun) / self._times)

    def mode(self, subject: str, usual: _Runner | None) -> Mode:
        """Return the figures, compared with the results of another runner."""
        # The first sample is a single call, which counts only if there is no other.
        samples = self.samples[1:] or self.samples
        low = high = statistics.median(samples)
        if len(samples) > 1:
            low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Mode(
            subject=subject,
            way=self.way,
            seconds=statistics.median(samples),
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


def _report(asked: CompileOptions, found: Sequence[Mode]) -> None:
    console = plain_console()
    sentences = mode_advice(found)
    print_line(console, *sentences, "")
    headers = ("", "a call", "spread", "first call", "differs by")
    for subject, own in group_by(found, lambda mode: mode.subject).items():
        what = f", forward and backward, batches of {asked.batch}" if subject == asked.model else ""
        print_rows(console, f"{subject}{what}", headers, map(_cells, own), right=headers[1:4])
    if asked.csv is not None:
        write_csv(asked.csv, mode_csv_rows(found))
        print_path(console, f"figures: {asked.csv}")
    if asked.json:
        plain = {"advice": sentences, "modes": [asdict(mode) for mode in found]}
        print_path(console, json.dumps(plain))


def _cells(mode: Mode) -> tuple[str, ...]:
    if mode.seconds is None:
        return mode.way, "", "", "", mode.reason
    differs = ""
    if mode.difference is not None:
        differs = f"{mode.difference:.0e}" if mode.difference else "nothing"
    spread = percent((mode.high - mode.low) / mode.seconds, tenths=True)
    seconds, first = (duration(each, fixed=True) for each in (mode.seconds, mode.first))
    return mode.way, seconds, spread, first, differs

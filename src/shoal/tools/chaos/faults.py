"""The kinds of faults, the plan of a storm, drawn from a seed, and the fewest that still fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shoal.util.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """One kind of fault.

    `sign` is a pattern of the message about it; empty if none is expected. `during_save` means that it
    happens at a file operation of a save, otherwise after a step. `ends` is True if the processes of
    the attempt end because of it. `lasts` is True if it persists until checkpoints have been saved
    again or could not be. `damages` is True if it destroys the latest checkpoint, if there is an older
    one; messages about it come from the next attempt.
    """

    name: str
    text: str
    sign: str = ""
    during_save: bool = False
    ends: bool = False
    lasts: bool = False
    damages: bool = False


PLACES = {
    "forward": "the forward pass of a step",
    "backward": "the backward pass of a step",
    "update": "the optimizer step, before parameters change",
}
"""The places within a step at which a rank can be killed."""

KINDS = {
    kind.name: kind
    for kind in (
        FaultKind(name="kill", text="SIGKILL to one rank after a step", sign="SIGKILL", ends=True),
        FaultKind(
            name="kill-in-save",
            text="SIGKILL to one rank at a file operation of a save",
            sign="SIGKILL",
            during_save=True,
            ends=True,
        ),
        *(
            FaultKind(
                name=f"kill-in-{place}",
                text=f"SIGKILL to one rank in {text}",
                sign="SIGKILL",
                ends=True,
            )
            for place, text in PLACES.items()
        ),
        FaultKind(name="kill-launcher", text="SIGKILL to the launcher", ends=True),
        FaultKind(name="kill-all", text="SIGKILL to all processes simultaneously", ends=True),
        FaultKind(
            name="stop", text="SIGSTOP to one rank, SIGCONT after one second", sign="does not answer"
        ),
        FaultKind(
            name="segfault",
            text="a segmentation fault in one rank",
            sign="SIGSEGV|Segmentation fault",
            ends=True,
        ),
        FaultKind(
            name="memory",
            text="a failed allocation in one rank (RLIMIT_AS)",
            sign="MemoryError",
            ends=True,
        ),
        FaultKind(
            name="kill-worker",
            text="SIGKILL to a child of a rank, such as a loader worker",
            sign="worker",
        ),
        FaultKind(name="disk-full", text="no free bytes (tmpfs)", sign="No space left", lasts=True),
        FaultKind(
            name="inodes-full", text="no free inodes (tmpfs)", sign="No space left|inodes", lasts=True
        ),
        FaultKind(
            name="read-only",
            text="EROFS from a file operation of a save, raised before it",
            sign="Read-only",
            during_save=True,
        ),
        FaultKind(
            name="io-error",
            text="EIO from a file operation of a save, raised before it",
            sign="Input/output error",
            during_save=True,
        ),
        FaultKind(
            name="quota",
            text="EDQUOT from a file operation of a save, raised before it",
            sign="quota",
            during_save=True,
        ),
        FaultKind(name="clock-jump", text="time.time() of one rank jumps by an hour, forward or back"),
        FaultKind(
            name="second-launcher",
            text="the same command a second time while the first one runs",
            sign="another Run is open",
        ),
        FaultKind(
            name="remove-checkpoint",
            text="the latest checkpoint removed, then SIGKILL to all processes",
            ends=True,
            damages=True,
        ),
        FaultKind(
            name="bit-flip",
            text="one bit of the latest checkpoint inverted, then SIGKILL to all processes",
            sign="skipped",
            ends=True,
            damages=True,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a storm: after `step`, or at `operation` of the save of that step, on `rank`."""

    number: int
    kind: str
    rank: int
    step: int
    operation: str = ""

    @property
    def place(self) -> str:
        """Where it happens, for the report."""
        where = f"save of step {self.step}: {self.operation}" if self.operation else f"step {self.step}"
        return f"rank {self.rank}, {where}"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The undisturbed run: ranks, last step, file operations by (rank, step of the save), children."""

    size: int
    steps: int
    operations: dict[tuple[int, int], tuple[str, ...]]
    children: frozenset[int] = frozenset()


def plan_faults(seed: int, count: int, kinds: Sequence[str], survey: Survey) -> tuple[Fault, ...]:
    """Draw faults, in the order of their steps; the same seed and run give the same plan.

    Kinds that the run has no place for, such as a worker that it does not start, are left out.
    """
    possible = [kind for kind in kinds if _is_possible(KINDS[kind], survey)]
    if not possible:
        raise LaunchError(
            given=f"--faults {','.join(kinds)}",
            found="the script has no place for any of them: it saves nothing, or starts no workers",
            fix="use other faults: shoal chaos --faults kill,stop",
        )
    draw = random.Random(seed)
    faults = []
    for number in range(count):
        # Each kind once before any kind twice.
        kind = KINDS[possible[number]] if number < len(possible) else KINDS[draw.choice(possible)]
        if kind.during_save:
            rank, step = draw.choice(sorted(survey.operations))
            operation = draw.choice(survey.operations[rank, step])
        else:
            ranks = sorted(survey.children) if kind.name == "kill-worker" else range(survey.size)
            rank, step, operation = (
                draw.choice(ranks),
                draw.randint(_first(kind, survey), survey.steps),
                "",
            )
        faults.append(Fault(number=number, kind=kind.name, rank=rank, step=step, operation=operation))
    return tuple(sorted(faults, key=lambda fault: (fault.step, fault.number)))


def _first(kind: FaultKind, survey: Survey) -> int:
    """Return the first step at which a fault has an effect."""
    if not kind.damages:
        return 1
    # An older checkpoint must exist, from which a restore can resume.
    return sorted({step for _, step in survey.operations})[1] + 1


def _is_possible(kind: FaultKind, survey: Survey) -> bool:
    if kind.name == "kill-worker":
        return bool(survey.children)
    if kind.damages:
        saves = sorted({step for _, step in survey.operations})
        return len(saves) > 1 and saves[1] < survey.steps
    return not kind.during_save or bool(survey.operations)


def check_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds in a list such as "kill,stop". Raises LaunchError for unknown ones."""
    names = tuple(KINDS) if text == "all" else tuple(text.split(","))
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise LaunchError(
            given=f"--faults {text}",
            found=f"unknown: {', '.join(unknown)}",
            fix=f"known faults: {', '.join(KINDS)}; `all` for all of them",
        )
    return names


T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a part of `items` that fails, and does not without any one of its items.

    Halves are tried first, then smaller parts (Zeller and Hildebrandt, Simplifying and Isolating
    Failure-Inducing Input, 2002). Each part is tried once.
    """
    left = list(items)
    size = len(left) // 2
    while size >= 1:
        start = 0
        while start < len(left) and len(left) > 1:
            rest = left[:start] + left[start + size :]
            if rest and fails(rest):
                left = rest
            else:
                start += size
        size //= 2
    return left

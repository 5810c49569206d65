"""Efficiencies of a machine file that follow measured runs."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.tools.plan.check import RunCheck
from shoal.tools.plan.machine.machines import Machine, find_machine, limited_efficiency
from shoal.util.clock import utc_now
from shoal.util.errors import ShoalError
from shoal.util.safe_text import printable

FEWEST = 16
"""Measured steps that an update needs."""
LARGEST = 1.5
"""The largest factor of one update, so that one unusual run does not spoil the file."""
FARTHEST = 20
"""The largest ratio of measured and predicted time with which a run changes a file."""
COMPUTATION = ("product", "attention", "memory", "launch", "host")
_SECONDS = ("launch", "host")
"""Efficiencies in seconds; the others are fractions of a rate."""


@dataclass(frozen=True, kw_only=True)
class EfficiencyChange:
    """An efficiency before and after an update."""

    name: str
    before: float
    after: float


def efficiency_changes(found: RunCheck, machine: Machine) -> list[EfficiencyChange]:
    """Return the efficiencies that move half of the way, in logarithms, to what a run has measured.

    Forward and backward move all efficiencies of the computation by one factor: one run can't tell
    them apart. Communication moves that of the links within the node, or between nodes if ranks are
    on several.

    Raises ShoalError if the run has too few steps, or takes a time that only another model takes.
    """
    if found.steps < FEWEST:
        raise ShoalError(
            given="--check … --update",
            found=f"the run has {found.steps} steps after the warm-up, fewer than {FEWEST}",
            fix="check a longer run",
        )
    parts = {part.name: part for part in found.parts}
    link = "link" if found.plan.layout.size <= machine.devices else "network"
    ours = sum(part.predicted or 0.0 for part in found.parts)
    theirs = sum(part.measured for part in found.parts if part.predicted is not None)
    if not 1 / FARTHEST <= theirs / ours <= FARTHEST:
        raise ShoalError(
            given="--check … --update",
            found=f"the run takes {theirs / ours:.2g} times the predicted time: it is of another model",
            fix="use the --model of the run, or measure the machine: shoal bench machine",
        )
    changes = []
    for part, names in (
        ("forward and backward", COMPUTATION),
        ("communication and waiting", (link,)),
    ):
        predicted, measured = parts[part].predicted, parts[part].measured
        if not predicted or not measured:
            continue
        factor = min(LARGEST, max(1 / LARGEST, (measured / predicted) ** 0.5))
        for name in names:
            before = getattr(machine.efficiency, name)
            moved = before * factor if name in _SECONDS else before / factor
            after = float(f"{limited_efficiency(name, moved):.4g}")
            if after != before:
                changes.append(EfficiencyChange(name=name, before=before, after=after))
    return changes


def update_machine_file(path: str, run: Path, changes: Sequence[EfficiencyChange]) -> None:
    """Write changed efficiencies into a machine file, with the date, the run and the values before.

    All other lines stay. The file is replaced at once.

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

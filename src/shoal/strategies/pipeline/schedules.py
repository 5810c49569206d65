"""Timetables of pipeline schedules: what each rank computes in each unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from shoal.distributed.pipeline_schedules import SCHEDULES, PipelineAction, action_lists
from shoal.util.errors import StepError


@dataclass(frozen=True)
class Timetable:
    """Timetable of a pipeline: a row per rank, a column per unit of time.

    A forward and each half of a backward pass take one unit, "B" takes two. In the text that `str`
    returns, `2F5` is the forward pass of micro-batch 5 through stage 2.
    """

    rows: tuple[tuple[PipelineAction | None, ...], ...]
    """The action of each rank in each unit of time; None while it waits."""

    @property
    def bubble(self) -> float:
        """Fraction of the time that ranks wait, 0 to 1."""
        return sum(row.count(None) for row in self.rows) / sum(map(len, self.rows))

    def __str__(self) -> str:
        texts = [[_text(work) for work in row] for row in self.rows]
        width = max(len(text) for row in texts for text in row)
        lines = [
            f"rank {rank}  " + " ".join(text.ljust(width) for text in row).rstrip()
            for rank, row in enumerate(texts)
        ]
        return "\n".join([*lines, f"waiting {self.bubble:.0%}"])

    def draw(self, path: str | Path) -> Path:
        """Write the timetable as an SVG file that follows the reader's light or dark mode."""
        path = Path(path)
        if path.suffix != ".svg":
            raise StepError(
                given=f"draw({str(path)!r})",
                found="the file name must end in .svg",
                fix="draw('schedule.svg')",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_svg(self.rows), encoding="utf-8")
        return path


def timetable(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None
) -> Timetable:
    """Return the timetable of a schedule. Raise StepError if it does not support these numbers."""
    chosen = SCHEDULES[schedule]
    per_rank = stages_per_rank or chosen.stages
    if not chosen.allows(per_rank) or ranks < 2 or micro_batches < 1:
        raise StepError(
            given=f"a timetable of {schedule!r}: {ranks} ranks, {per_rank} stage(s) on each, "
            f"{micro_batches} micro-batches",
            found="the schedule does not support these numbers",
            fix="timetable(ranks=4, micro_batches=8)",
        )
    orders = action_lists(schedule, ranks, per_rank, micro_batches)
    return Timetable(_timed(orders, ranks * per_rank))


def _timed(
    actions: Sequence[Sequence[PipelineAction]], stages: int
) -> tuple[tuple[PipelineAction | None, ...], ...]:
    """Return the actions of each rank in order, each as early as its dependencies allow."""
    rows: list[list[PipelineAction | None]] = [[] for _ in actions]
    waiting = [list(reversed(row)) for row in actions]
    done: dict[PipelineAction, int] = {}
    now = 0
    while any(waiting):
        for row, pending in zip(rows, waiting, strict=True):
            if len(row) > now:
                continue  # still busy
            if pending and all(done.get(need, now + 1) <= now for need in _needs(pending[-1], stages)):
                work = pending.pop()
                length = 2 if work.kind == "B" else 1
                row.extend([work] * length)
                done[work] = now + length
                if work.kind == "B":
                    done[work._replace(kind="I")] = now + length
            else:
                row.append(None)
        now += 1
        if all(len(row) == now and row[-1] is None for row in rows) and any(waiting):
            raise RuntimeError(f"the schedule deadlocks at {[row[-1:] for row in waiting]}")
    length = max(map(len, rows))
    return tuple((*row, *[None] * (length - len(row))) for row in rows)


def _needs(work: PipelineAction, stages: int) -> list[PipelineAction]:
    if work.kind == "F":
        return [work._replace(stage=work.stage - 1)] if work.stage else []
    if work.kind == "W":
        return [work._replace(kind="I")]
    if work.stage == stages - 1:
        return [work._replace(kind="F")]
    return [PipelineAction("I", work.stage + 1, work.micro)]


def _text(work: PipelineAction | None) -> str:
    return "·" if work is None else f"{work.stage}{work.kind}{work.micro}"


_CELL, _ROW, _LEFT, _TOP = 30, 30, 56, 8
_COLOURS = {"F": "#2f5f93", "B": "#b85a08", "I": "#b85a08", "W": "#37762f"}
_WORDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


def _svg(rows: Sequence[Sequence[PipelineAction | None]]) -> str:
    width = _LEFT + _CELL * len(rows[0]) + 8
    height = _TOP + _ROW * len(rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<style>text{font:11px sans-serif;fill:#333}.in{fill:#fff;text-anchor:middle}"
        "@media(prefers-color-scheme:dark){text{fill:#ccc}.in{fill:#fff}}</style>",
    ]
    for rank, row in enumerate(rows):
        y = _TOP + rank * _ROW
        parts.append(f'<text x="4" y="{y + 18}">rank {rank}</text>')
        for time, work in enumerate(row):
            if work is None or (time and work == row[time - 1]):
                continue
            x, cells = _LEFT + time * _CELL, 2 if work.kind == "B" else 1
            shade = 1 - 0.25 * (work.stage // len(rows))
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL * cells - 2}" height="{_ROW - 4}" rx="3" '
                f'fill="{_COLOURS[work.kind]}" fill-opacity="{shade:.2f}"><title>'
                f"{escape(_WORDS[work.kind])} of micro-batch {work.micro}, stage {work.stage}"
                f'</title></rect><text class="in" x="{x + (_CELL * cells - 2) / 2}" y="{y + 17}">'
                f"{work.micro}</text>"
            )
    x = _LEFT
    for kind in dict.fromkeys(work.kind for row in rows for work in row if work is not None):
        y = height - 22
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{_COLOURS[kind]}"/>'
            f'<text x="{x + 17}" y="{y + 10}">{_WORDS[kind]}</text>'
        )
        x += 30 + 7 * len(_WORDS[kind])
    return "\n".join([*parts, "</svg>"]) + "\n"

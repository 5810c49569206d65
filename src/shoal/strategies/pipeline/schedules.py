"""Timetables of pipeline schedules: what each rank computes in each unit of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from shoal.util.errors import StepError


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule of torch with `stages` per rank, exactly this number if `fixed`."""

    torchs: str
    stages: int = 1
    fixed: bool = True
    folded: bool = False
    """Whether rank 0 has the first stage and the last: the stages go down the ranks and up again."""
    splits: bool = False
    """Whether backward runs in two parts, for inputs and for weights."""

    def allows(self, per_rank: int) -> bool:
        """Return whether the schedule supports this number of stages per rank."""
        return per_rank == self.stages if self.fixed else per_rank >= 1


SCHEDULES = {
    "gpipe": PipelineSchedule("GPipe"),
    "1f1b": PipelineSchedule("1F1B"),
    "interleaved": PipelineSchedule("Interleaved1F1B", 2, fixed=False),
    "looped": PipelineSchedule("LoopedBFS", 2, fixed=False),
    "zero-bubble": PipelineSchedule("InterleavedZeroBubble", 2, fixed=False, splits=True),
    "zbv": PipelineSchedule("ZBVZeroBubble", 2, folded=True, splits=True),
    "dualpipev": PipelineSchedule("DualPipeV", 2, folded=True, splits=True),
}


class PipelineAction(NamedTuple):
    """One action: "F" forward, "B" backward, "I" backward for inputs, "W" backward for weights."""

    kind: str
    stage: int
    micro: int


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


@lru_cache(maxsize=256)
def action_lists(
    schedule: str, ranks: int, per_rank: int, micro_batches: int
) -> tuple[tuple[PipelineAction, ...], ...]:
    """Return the actions of each rank in their order. Raise StepError for wrong micro-batches."""
    if SCHEDULES[schedule].fixed and per_rank == 1:
        ahead = [micro_batches if schedule == "gpipe" else ranks - rank for rank in range(ranks)]
        return tuple(_forwards_ahead(rank, some, micro_batches) for rank, some in enumerate(ahead))
    return _torchs(schedule, ranks, per_rank, micro_batches)


def _forwards_ahead(stage: int, ahead: int, micro_batches: int) -> tuple[PipelineAction, ...]:
    """Return up to `ahead` more forward than backward passes. torch lists 1F1B's last rank too late."""
    begun = min(ahead, micro_batches)
    works = [PipelineAction("F", stage, micro) for micro in range(begun)]
    for micro in range(micro_batches):
        works.append(PipelineAction("B", stage, micro))
        if begun + micro < micro_batches:
            works.append(PipelineAction("F", stage, begun + micro))
    return tuple(works)


def _torchs(
    schedule: str, ranks: int, per_rank: int, micro_batches: int
) -> tuple[tuple[PipelineAction, ...], ...]:
    from shoal._torch.pipelining import pipeline_order  # imports torch's pipelining

    stages = [_Stage(ranks, ranks * per_rank) for _ in range(per_rank)]
    try:
        order = pipeline_order(SCHEDULES[schedule].torchs, stages, micro_batches)
    except ValueError as error:
        raise micro_batches_refused(schedule, ranks, micro_batches, error) from None
    return tuple(tuple(_works(order[rank])) for rank in range(ranks))


def micro_batches_refused(schedule: str, ranks: int, micro_batches: int, error: Exception) -> StepError:
    """Return the error of a schedule that does not support this number of micro-batches."""
    return StepError(
        given=f"shoal.Pipeline(schedule={schedule!r}) on {ranks} ranks with {micro_batches} "
        "micro-batch(es)",
        found=str(error),
        fix=f"shoal.Loader(…, micro_batches={max(2 * ranks, micro_batches // ranks * ranks)})",
    )


class _Stage:
    """The attributes of a stage that torch's schedules read to plan."""

    submod = None
    group_rank = 0
    has_backward = True
    device = "cpu"

    def __init__(self, ranks: int, stages: int) -> None:
        self.group_size = ranks
        self.num_stages = stages
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.stage_index = 0
        self.is_first = self.is_last = True


def _works(actions: Sequence[Any]) -> Iterator[PipelineAction]:
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            kind = part.computation_type.value
            if kind in _WORDS:  # others move parameters and sum gradients
                yield PipelineAction(kind, part.stage_index, part.microbatch_index)


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

"""When a rank computes what in a predicted step."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Seconds of a step in which a rank computes something, such as "forward"."""

    kind: str
    start: float
    end: float


def add_span(spans: list[Span], new: Span) -> None:
    """Add a span, or lengthen the last one if it is of the same kind and nothing lies between."""
    last = spans[-1] if spans else None
    if last is not None and last.kind == new.kind and last.end == new.start:
        spans[-1] = last._replace(end=new.end)
    elif new.end > new.start:
        spans.append(new)

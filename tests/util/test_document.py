from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.util.document import (
    BarPlot,
    Document,
    Figure,
    KeyNumbers,
    LinePlot,
    Section,
    Series,
    SpanPlot,
    Table,
    Text,
    to_json,
)
from shoal.util.tables import rendered

LAYOUT = "replicate=16,shard=4"


def shown(*blocks: Text | KeyNumbers | Table | Figure, width: int = 80) -> str:
    document = Document(title="t", verdict="It holds.", sections=[Section(heading="h", blocks=blocks)])
    return rendered(document, width)


def test_a_terminal_shows_the_verdict_then_the_blocks_that_are_not_only_for_the_page() -> None:
    empty = Table(caption="nothing", head=("a",), rows=[])
    text = shown(Text(text="why", advice="do"), Text(text="paper", only="page"), empty)
    assert text == "It holds.\n\nwhy\n    do\n"


def test_a_table_loses_empty_columns_and_on_a_narrow_terminal_wide_ones() -> None:
    row = ("1" * 30, "", "2" * 30, "3" * 30)
    table = Table(caption="c", head=("a", "b", "v", "w"), rows=[row], wide=("v", "w"))
    assert {"a", "v", "w"} <= {*shown(table, width=100).split()}
    assert "b" not in shown(table, width=100).split()
    assert {"a", "v"} == {*shown(table).split()} & {"a", "v", "w"}
    assert {"a"} == {*shown(table, width=60).split()} & {"a", "v", "w"}


def test_a_layout_stays_on_one_line() -> None:
    words = "a long sentence that explains at length why this layout was not chosen " * 3
    cells = (LAYOUT, words, words, "1.23 million tokens per second")
    table = Table(caption="c", head=("layout", "x", "y", "z"), rows=[cells], whole=("layout",))
    lines = shown(table).splitlines()
    assert any(LAYOUT in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_the_first_bar_is_drawn_on_a_terminal() -> None:
    parts = {"forward": [3.0, 9.0], "backward": [1.0, 9.0]}
    plot = BarPlot(labels=["a", "b"], parts=parts, x="ms", of="layout")
    lines = shown(Figure(name="f", caption="A step", drawing=plot, only="")).splitlines()
    bars = {line.split()[0]: line.count("#") for line in lines if "#" in line}
    assert bars == {"forward": 22, "backward": 8}


def test_drawings_have_their_numbers_as_tables() -> None:
    line = Series(label="a", x=[1, 2], y=[0.5, None], low=[0.4, 0.1], high=[0.6, 0.2])
    other = Series(label="ideal", x=[1], y=[1234.5])
    table = LinePlot(series=[line, other], x="step", y="loss").table()
    assert table.head == ("line", "step", "loss", "minimum", "maximum")
    assert table.rows[:2] == [("a", "1", "0.5", "0.4", "0.6"), ("a", "2", "", "0.1", "0.2")]
    assert table.rows[2] == ("ideal", "1", "1234", "", "")
    spans = [[("F", 0.0, 1.0), ("B", 2.0, 4.0)], [("F", 1.0, 2.0)]]
    rows = SpanPlot(labels=["0", "1"], spans=spans, x="ms", of="rank").table()
    assert rows.head == ("rank", "F", "B", "waiting")
    assert rows.rows == [("0", "1", "2", "1"), ("1", "1", "0", "3")]


class Kind(enum.Enum):
    GOOD = "good"


@dataclass
class Found:
    kind: Kind
    path: Path
    values: tuple[float, ...]
    array: np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def test_json_has_the_values_and_null_for_what_is_not_finite() -> None:
    found = Found(Kind.GOOD, Path("/a"), (1.5, math.inf), np.array([1.0, math.nan]))
    document = Document(title="", verdict="", sections=[], values={"found": found, "n": None})
    assert json.loads(to_json(document), parse_constant=str) == {
        "found": {"kind": "good", "path": "/a", "values": [1.5, None], "array": [1.0, None]},
        "n": None,
    }

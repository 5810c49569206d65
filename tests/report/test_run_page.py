from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from helpers.synthetic_runs import BEGAN, Plant, lines, simulate, write, write_two_steps
from shoal.cli.main import app
from shoal.tools.report import History, attempts, read_history
from shoal.tools.report.html import to_csv
from shoal.tools.report.html.page import COLOURS, draw, render_page
from shoal.tools.report.run_page import tables
from shoal.util.document import (
    AreaPlot,
    Document,
    DocumentBlock,
    LinePlot,
    Section,
    Series,
    Table,
    Text,
)
from shoal.util.errors import CheckpointError, LaunchError

PLANTS = [
    Plant(part="wait", ranks=[1], seconds=5e-3),
    Plant(part="checkpoint", ranks=[0, 1, 2], seconds=0.05, every=100),
]
HOSTILE = "<img src=x onerror=alert(1)>$\\frac\x1b[31m\u202eevil"


def shoal(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def add(directory: Path, rank: int, *events: Mapping[str, Any]) -> None:
    with (directory / "events" / f"rank-{rank}.jsonl").open("a") as file:
        file.writelines(json.dumps({"t": BEGAN + 60, **event}) + "\n" for event in events)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two attempts, with all that may be recorded, and names that nobody would trust."""
    directory = write(tmp_path / "run", simulate(3, 300, PLANTS))
    start = {"host": HOSTILE, "config": {"name": HOSTILE, "rate": 0.1}, "device_name": HOSTILE}
    write(directory, simulate(3, 300, PLANTS), append=True, began=BEGAN + 20, first=250, start=start)
    kind = {"kind": "all_reduce", "group": HOSTILE, "ranks": 3, "backend": "gloo", "calls": 300}
    sums = {"bytes": 3e9, "seconds": 2.0, "exact": False, "algorithm": 1.5e9, "bus": 2e9}
    flops = {"name": "step", "per_sample": 1e9, "peak": 1e13, "peak_reason": "stated"}
    for rank in range(3):
        add(
            directory,
            rank,
            {"event": "save", "step": 400, "seconds": 1.5 + rank, "blocked": 0.05, "path": "x"},
            {"event": "save_failed", "step": 500, "error": HOSTILE},
            {"event": "collectives", "seconds": 10, "step": 550, "kinds": [kind | sums]},
            {"event": "usage", "step": 500, "rss": 2e9, "power": 300.0, "energy": 7.2e6},
            {"event": "flops", **flops},
            {"event": "experts", "name": "step", "step": 550, "layers": {HOSTILE: [9, 0, 0, 1]}},
        )
    add(directory, 1, {"event": "end", "step": 550, "reason": "error", "error": HOSTILE})
    return directory


class Checked(HTMLParser):
    """What a page consists of; it is balanced, or this fails."""

    EMPTY = frozenset({"meta", "link", "br", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.full
def test_the_page_and_its_files(run: Path) -> None:
    result = shoal("report", run)
    assert result.exit_code == 0, result.output
    folder = run / "report"
    html = (folder / "index.html").read_text()
    assert "data (rank 1 on node0" in result.output
    names = {path.name for path in folder.iterdir()}
    figures = {"step-by-rank", "step-over-time", "loss", "throughput", "memory"}
    assert names == {f"{f}.{e}" for f in figures for e in ("png", "svg", "csv")} | {"index.html"}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")

    page = Checked(html)
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"script", "img", "iframe", "object", "embed", "base", "form"}
    ids = [found["id"] for _, found in page.seen if "id" in found]
    assert len(ids) == len(set(ids))
    for tag, found in page.seen:
        assert not any(name.startswith("on") for name in found), tag
        for name in ("href", "xlink:href", "src", "action", "poster"):
            assert (found.get(name) or "#").startswith(("#", "data:")), (tag, found)
    assert "url(http" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;$\\frac\\x1b[31m\\u202eevil" in html
    headings = ("Where the time goes", "Stragglers", "Mixtures of experts", "Collectives", ">Attempts<")
    for heading in headings:
        assert heading in html

    rows = list(csv.reader(io.StringIO((folder / "step-by-rank.csv").read_text())))
    numbers = json.loads(shoal("report", run, "--json").output)
    waited = [float(row[rows[0].index("data")]) for row in rows[1:]]
    assert waited == pytest.approx([1e3 * numbers["ranks"][rank]["wait"] for rank in "012"], rel=1e-3)


def test_the_text_fits_80_columns_and_obeys_no_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = shoal("report", run, "--text")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= max(80, len(f"Run {run}"))
    assert "efficient: " in lines[0]
    assert "\x1b" not in result.output
    assert "\\x1b[31m" in result.output
    assert not (run / "report").exists()


def test_the_numbers(run: Path) -> None:
    found = json.loads(shoal("report", run, "--json").output)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["efficient"] == found["shares"]["computing"]
    assert {(each["rank"], each["part"]) for each in found["stragglers"]} == {(1, "wait")}
    first, second = found["attempts"]
    assert (first["last"], first["done_again"], second["first"]) == (300, 50, 251)
    assert second["end"].endswith("on rank 1 on " + HOSTILE + ", after step 550")
    assert second["saves"][0] == {"step": 400, "blocked": 0.05, "seconds": 3.5, "error": ""}
    assert found["mfu"] == pytest.approx(1e9 * found["samples_per_second"] / 3 / 1e13)


def test_ranks_that_divide_a_model_divide_what_it_computes(tmp_path: Path) -> None:
    write(tmp_path, simulate(4, 100), start={"layout": "replicate=2,tensor=2"})
    add(tmp_path, 0, {"event": "flops", "name": "step", "per_sample": 1e9, "peak": 1e13})
    found = json.loads(shoal("report", tmp_path, "--json").output)
    assert found["mfu"] == pytest.approx(1e9 * found["samples_per_second"] / 4 / 1e13)


def test_all_steps_of_a_batch_count_for_what_is_computed(tmp_path: Path) -> None:
    write(tmp_path, simulate(1, 100))
    seldom = json.loads(list(lines(simulate(1, 25), 0, name="generator"))[1]) | {"wall": [0] * 25}
    for name, per_sample in (("step", 1e9), ("generator", 4e9)):
        add(tmp_path, 0, {"event": "flops", "name": name, "per_sample": per_sample, "peak": 1e13})
    add(tmp_path, 0, seldom)
    found = json.loads(shoal("report", tmp_path, "--json").output)
    assert found["mfu"] == pytest.approx((1e9 + 4e9 / 4) * found["samples_per_second"] / 1e13)


def test_numbers_without_bounds_are_json_nevertheless(tmp_path: Path) -> None:
    write(tmp_path, simulate(1, 100))
    add(tmp_path, 0, {"event": "flops", "name": "step", "per_sample": 1e308, "peak": 1e-300})
    found = json.loads(shoal("report", tmp_path, "--json").output, parse_constant=pytest.fail)
    assert found["mfu"] is None


def test_each_of_several_steps_keeps_its_own_curve(tmp_path: Path) -> None:
    write_two_steps(tmp_path, ticks=100, every=5, began=BEGAN, first=0)
    write_two_steps(tmp_path, ticks=100, every=5, began=BEGAN + 60, first=60)
    found = attempts.binned_curves(read_history(tmp_path), "loss")
    assert found["critic"].step.tolist() == list(range(1, 161))
    assert found["generator"].step.tolist() == list(range(1, 33))
    assert json.loads(shoal("report", tmp_path, "--json").output)["attempts"][0]["done_again"] == 40


def test_what_was_done_again_is_in_no_curve_twice(run: Path) -> None:
    steps = attempts.binned_curves(read_history(run), "loss")["step"].step
    assert list(steps) == sorted(set(steps))


def test_how_an_attempt_ended(tmp_path: Path) -> None:
    for events, words in (
        ([], "no event for "),
        ([{"event": "end", "reason": "closed", "step": 9}], "ended"),
        (
            [{"event": "preempted", "by": "SIGTERM", "on": 1, "step": 12}],
            "preempted by SIGTERM on rank 1 on node0, saved at step 12",
        ),
        (
            [{"event": "end", "reason": "error", "error": "ValueError", "step": 1234}],
            "ValueError on rank 0 on node0, after step 1,234",
        ),
    ):
        write(tmp_path, simulate(2, 20))
        add(tmp_path, 0, *events)
        attempt = read_history(tmp_path).attempts[0]
        assert attempts.describe_outcome(attempt, last=True, now=BEGAN + 1000).startswith(words)
        now = attempts.describe_outcome(attempt, last=True, now=attempt.seen + 3)
        assert now.startswith(words if events else "running, last event 3 s ago")
        later = attempts.describe_outcome(attempt, last=False, now=BEGAN + 1000)
        assert later == "killed or lost, without a final event" or events


@pytest.mark.parametrize("made", ["nothing", "empty", "garbage"])
def test_a_run_of_which_nothing_can_be_told(tmp_path: Path, made: str) -> None:
    events = tmp_path / "events"
    if made != "nothing":
        events.mkdir()
        content = os.urandom(100_000) if made == "garbage" else b""
        (events / "rank-0.jsonl").write_bytes(content)
    result = shoal("report", tmp_path, "--text")
    if made == "nothing":
        assert isinstance(result.exception, CheckpointError)
        assert "it is not a run directory" in result.exception.found
    else:
        assert result.exit_code == 0, result.output
        assert result.output.startswith("Nothing has been recorded yet.")


@pytest.mark.full
def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-0.jsonl").write_text("")
    assert shoal("report", tmp_path).exit_code == 0
    Checked((tmp_path / "report" / "index.html").read_text())


def test_where_nothing_may_be_written_it_says_what_to_type(run: Path) -> None:
    (run / "report").write_text("in the way")
    result = shoal("report", run)
    assert isinstance(result.exception, LaunchError)
    assert "-o DIR" in result.exception.fix


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LaunchError, match=re.escape("pip install '.[report]' in your Shoal checkout")):
        draw(LinePlot(series=[Series(label="a", x=[1], y=[1])], x="x", y="y"))


def test_many_ranks_are_shown_by_the_slowest(tmp_path: Path) -> None:
    plant = Plant(part="forward", ranks=[70], seconds=5e-3)
    history = read_history(write(tmp_path, simulate(80, 64, [plant])))
    one = judged(history)
    table, _ = tables.rank_tables(one)
    assert len(table.rows) == tables.MOST
    assert "70" in [row[0] for row in table.rows]
    assert "of 80 that waited least" in table.caption


def judged(history: History) -> Any:
    from shoal.tools.report import find_bottleneck

    return find_bottleneck(history).judged[0]


def test_formulas_are_harmless_in_spreadsheets() -> None:
    table = Table(caption="", head=["a", "b"], rows=[["=1+1", "-2.5"], ["+x", "plain, with comma"]])
    assert to_csv(table.lines) == "a,b\n'=1+1,-2.5\n'+x,\"plain, with comma\"\n"


def test_texts_of_a_page_are_escaped() -> None:
    table = Table(caption=HOSTILE, head=[HOSTILE], rows=[[HOSTILE]])
    blocks: list[DocumentBlock] = [Text(text=HOSTILE, advice=HOSTILE), table]
    page = Document(title=HOSTILE, verdict=HOSTILE, sections=[Section(heading=HOSTILE, blocks=blocks)])
    html = render_page(page, {})
    assert "<img" not in html
    assert "\x1b" not in html
    Checked(html)


def test_sixteen_parts_of_a_step_look_different() -> None:
    parts = {str(part): [1.0, 1.0] for part in range(16)}
    drawn = draw(AreaPlot(xs=[0.0, 1.0], parts=parts, x="step", y="s")).wide
    fills = re.findall(r'<path [^>]*style="fill: ([^";]+)', drawn)
    assert len({*fills} - {"none"}) >= 16


def test_of_a_run_with_one_step_the_parts_are_drawn() -> None:
    """An area over one place would have no width, a line through one point no length."""
    fills = {"a": (COLOURS[0], "")}
    area = draw(AreaPlot(xs=[3.0], parts={"a": [1.0]}, x="step", y="ms", fills=fills)).wide
    found = re.search(rf'<path d="([^"]*)"[^>]*style="[^"]*fill: {COLOURS[0]}', area)
    assert found is not None
    places = [float(x) for x in re.findall(r"[ML] ([\d.]+)", found[1])]
    assert max(places) - min(places) > 100
    line = Series(label="a", x=[3.0], y=[1.0])
    drawn = draw(LinePlot(series=[line], x="step", y="ms")).wide
    assert re.search(rf'<use [^>]*style="fill: {COLOURS[0]}', drawn)

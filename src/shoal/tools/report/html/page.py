"""A document as one HTML file, and its figures as further files.

Figures are drawn twice for the page, wide and for a phone, in colours that differ without colour vision
and on light and dark backgrounds. Text and axes take the colour of the page. Only this module imports
matplotlib, and uses only its objects, so no state is kept between figures.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from shoal.tools.report.html.palette import PALETTE
from shoal.util.document import AreaPlot, BarPlot, Document, Drawing, Fill, LinePlot, SpanPlot
from shoal.util.errors import LaunchError, raised_as
from shoal.util.regular_file import appearing
from shoal.util.safe_text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_page(document: Document, path: Path, *, option: str) -> list[Path]:
    """Write a document as HTML to `path`, and next to it each figure as PNG, SVG and CSV.

    The directory is created if necessary. Returns all paths. Raises LaunchError, with the command-line
    option that sets the path, if it can't be written.
    """
    files: dict[Path, bytes] = {}
    with raised_as(
        LaunchError, given=f"a page in {path}", fix=f"write where you have permission: {option}"
    ):
        path.parent.mkdir(parents=True, exist_ok=True)  # before drawing the figures, which is slow
        plots = {figure.name: draw(figure.drawing) for figure in document.figures()}
        for figure in document.figures():
            plot, table = plots[figure.name], to_csv(figure.drawing.table().lines)
            parts = {"png": plot.png, "svg": plot.svg.encode(), "csv": table.encode()}
            files |= {path.with_name(f"{figure.name}.{end}"): part for end, part in parts.items()}
        for file, content in (files | {path: render_page(document, plots).encode()}).items():
            with appearing(file) as partial:
                partial.write_bytes(content)
    return [path, *files]


_IDS = r'( id="|url\(#|href="#)'


def render_page(document: Document, plots: Mapping[str, Plot]) -> str:
    """Return the document as one HTML file. All strings are escaped; only drawings are not."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        # with ids that are unique in the page
        "inline": lambda svg, prefix: Markup(re.sub(_IDS, rf"\g<1>{prefix}-", svg)),
        "base64": lambda content: base64.b64encode(content).decode(),
        "csv": lambda table: to_csv(table.lines).encode(),
    }
    here = resources.files(__package__)
    template = environment.from_string(here.joinpath("page.html.jinja").read_text(encoding="utf-8"))
    style = here.joinpath("page.css").read_text(encoding="utf-8")
    return template.render(
        page=document, sections=document.shown("page"), plots=plots, style=Markup(style)
    )


def _shown(value: object) -> object:
    # Only drawings and the style are markup already.
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def to_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV; the first row has the names of the columns.

    A string that a spreadsheet would interpret as a formula gets an apostrophe in front.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow(
            [f"'{cell}" if isinstance(cell, str) and _is_formula(cell) else cell for cell in row]
        )
    return text.getvalue()


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows, all with the columns of the first, as CSV. Raises LaunchError if that fails."""
    with raised_as(LaunchError, given=f"the table {path}", fix="use another file"):
        path.write_text(to_csv([list(rows[0]), *(list(row.values()) for row in rows)]))


def _is_formula(cell: str) -> bool:
    if cell[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False


# Okabe and Ito, 2008, without the yellow, which is too pale on white, and with greys.
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#757575",
    "#9467bd",
    "#44aa99",
    "#bdbdbd",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_INK, _PAPER, _GRID = "#010203", "#fdfcfb", "#a1a2a3"
"""Placeholders for the colours of the page, which a drawing does not know."""
_WIDE, _NARROW = (9.2, 3.4), (3.7, 3.2)
_FILLS = [(each.colour, each.hatch) for each in PALETTE.values()]
_FILLS += [(colour, "....") for colour, _ in _FILLS]
_MOST = 1500
"""Maximum number of points of a line; more are not visible."""


@dataclass(frozen=True)
class Plot:
    """A drawing as SVG and PNG: for the page, wide and for a phone; and as files."""

    wide: str
    narrow: str
    svg: str
    png: bytes


def draw(drawing: Drawing) -> Plot:
    """Draw a figure. Raises LaunchError without matplotlib."""
    match drawing:
        case LinePlot():
            return _draw(partial(_lines, drawing))
        case BarPlot():
            return _draw(partial(_bars, drawing), height=0.28 * len(drawing.labels))
        case SpanPlot():
            return _draw(partial(_spans, drawing), height=0.28 * len(drawing.labels))
        case AreaPlot():
            return _draw(partial(_areas, drawing))


def _lines(plot: LinePlot, axes: Axes, small: bool) -> None:
    own = 0
    for each in plot.series:
        colour = _GRID if each.faint else COLOURS[own % len(COLOURS)]
        marker = "" if each.faint else MARKERS[own % len(MARKERS)]
        own += not each.faint
        stride = max(1, len(each.x) // _MOST)
        xs = list(each.x)[::stride]
        ys = [float("nan") if value is None else value for value in each.y][::stride]
        axes.plot(
            xs,
            ys,
            label=printable(each.label),
            color=colour,
            linewidth=1.6,
            linestyle="--" if each.faint else "-",
            marker=(marker or "o") if each.points or len(xs) == 1 else "",
            markersize=5,
        )
        if each.low is not None and each.high is not None:
            low, high = list(each.low)[::stride], list(each.high)[::stride]
            axes.fill_between(xs, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    _scales(axes, log_x=plot.log_x, log_y=plot.log_y, ticks=plot.ticks)
    if plot.zero and not plot.log_y:
        axes.set_ylim(bottom=0)
    _ends(axes, legend=len(plot.series) > 1, small=small)


def _bars(plot: BarPlot, axes: Axes, small: bool) -> None:
    left = [0.0] * len(plot.labels)
    for part, values in plot.parts.items():
        look = _look(plot.fills, plot.parts, part)
        axes.barh(range(len(left)), list(values), left=left, height=0.78, label=printable(part), **look)
        left = [a + b for a, b in zip(left, values, strict=True)]
    if plot.limit is not None:
        name, place = plot.limit
        axes.axvline(place, label=printable(name), color=_INK, linewidth=1.2, linestyle="--")
    _label_rows(axes, plot, small)


def _spans(plot: SpanPlot, axes: Axes, small: bool) -> None:
    for kind in plot.kinds:
        label = printable(kind)
        for place, row in enumerate(plot.spans):
            places = [(start, end - start) for own, start, end in row if own == kind]
            if places:
                look = _look(None, plot.kinds, kind)
                axes.broken_barh(places, (place - 0.4, 0.8), label=label, **look)
                label = "_" + label.lstrip("_")  # a second entry of the legend is not shown
    axes.margins(x=0)
    _label_rows(axes, plot, small)


def _label_rows(axes: Axes, plot: BarPlot | SpanPlot, small: bool) -> None:
    axes.set_yticks(range(len(plot.labels)), [printable(label) for label in plot.labels])
    axes.set_ylim(len(plot.labels) - 0.4, -0.6)
    axes.set_xlabel(plot.x)
    _ends(axes, legend=True, small=small, grid="x")


def _areas(plot: AreaPlot, axes: Axes, small: bool) -> None:
    # An area over a single point has no width.
    xs = [plot.xs[0] - 0.5, plot.xs[0] + 0.5] if len(plot.xs) == 1 else list(plot.xs)
    below = [0.0] * len(xs)
    for part, values in plot.parts.items():
        own = list(values) * (len(xs) // len(values))
        above = [a + b for a, b in zip(below, own, strict=True)]
        look = _look(plot.fills, plot.parts, part)
        axes.fill_between(xs, below, above, label=printable(part), step=None, **look)
        below = above
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    _ends(axes, legend=True, small=small)


def _look(fills: Mapping[str, Fill] | None, parts: Iterable[str], part: str) -> dict[str, Any]:
    """Return the look of the area of a part, chosen by its place among the parts without `fills`."""
    colour, hatch = fills[part] if fills else _FILLS[list(parts).index(part) % len(_FILLS)]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": _PAPER, "linewidth": 0.4}


def _scales(axes: Axes, *, log_x: bool, log_y: bool, ticks: Sequence[float] | None) -> None:
    if log_x:
        axes.set_xscale("log", base=2)
    if log_y:
        from matplotlib.ticker import FuncFormatter, LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        for level in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            # Powers of ten would be written as formulas.
            level(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    if ticks is not None:
        axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)


def _ends(axes: Axes, *, legend: bool, small: bool, grid: Literal["x", "y"] = "y") -> None:
    axes.grid(axis=grid, color=_GRID, alpha=0.45, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure = axes.figure
    if legend:
        size = 8.5 if small else 9.5
        _, labels = axes.get_legend_handles_labels()
        # A legend wider than its figure would be cut off; letters are half as wide as high.
        column = size * (0.52 * max(map(len, labels), default=0) + 2.6)
        most = int(72 * (_NARROW if small else _WIDE)[0] / column)
        figure.legend(
            loc="outside upper left",
            ncols=max(1, min(5, most)),
            fontsize=size,
            frameon=False,
            handlelength=1.4,
            handletextpad=0.4,
            columnspacing=0.8,
            borderaxespad=0.2,
        )
    figure.align_labels()


def _draw(draw: Callable[[Axes, bool], None], *, height: float = 0.0) -> Plot:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise LaunchError(
            given="a page with figures",
            found="matplotlib, which draws them, is not installed",
            fix="run pip install '.[report]' in your Shoal checkout, or use shoal report RUN --text "
            "for a report without figures",
        ) from None
    kept: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "shoal",
        "text.parse_math": False,  # names may have dollars in them
        "font.family": ["DejaVu Sans"],
        "font.size": 9.5,
        "axes.facecolor": "none",
        "hatch.linewidth": 0.6,
        "axes.formatter.useoffset": False,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK
        ),
    }
    drawn = {}
    with mpl.rc_context(kept):
        for size in (_WIDE, _NARROW):
            figure = Figure(figsize=(size[0], max(size[1], height + 1.2)), layout="constrained")
            draw(figure.add_subplot(), size is _NARROW)
            drawn[size] = figure
        wide, narrow = (_written(drawn[size], "svg").decode() for size in (_WIDE, _NARROW))
        png = _written(drawn[_WIDE], "png", dpi=150, facecolor="white")
    return Plot(_inside(wide), _inside(narrow), _alone(wide), png)


def _written(figure: Any, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {}
    options.setdefault("facecolor", "none")
    figure.savefig(content, format=kind, metadata=metadata, **options)
    return content.getvalue()


def _alone(svg: str) -> str:
    """Return the drawing as a separate file, on white."""
    shown = svg.replace(_INK, "#1b2126").replace(_PAPER, "#ffffff")
    return re.sub(r"(<svg\b[^>]*)>", r'\1 style="background: #ffffff">', shown, count=1)


def _inside(svg: str) -> str:
    """Return the drawing as a part of the page: in its colours, without a head, with unique ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace(_INK, "currentColor").replace(_PAPER, "var(--page)").replace(_GRID, "var(--soft)")
    used = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', svg))
    return re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else "", svg)

"""Curves and stacked bars of characters, as pure functions of numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from shoal.tools.report.dashboard.theme import PARTS, TerminalStyle
from shoal.util.units import compact

BLOCKS = " ▁▂▃▄▅▆▇█"
LEVELS = " _.-=+*%#"
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a braille character's left and right column, from the top."""
STROKES = "'-_"
FEWEST = 8
"""The number of values from which outliers are looked for."""
LOGARITHMIC = 30.0
"""The ratio of the highest to the lowest value from which a scale is logarithmic."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A mapping from values to heights between 0 and 1."""

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def of(cls, values: Sequence[float], *, zero: bool) -> Scale:
        """Return the scale for these finite values; from zero if `zero`.

        A scale from zero ignores single outliers, which are drawn at its end.
        """
        low, high = min(values), max(values)
        if zero and low >= 0:
            return cls(low=0.0, high=_usual_end(values), logarithmic=False)
        return cls(low=low, high=high, logarithmic=low > 0 and high / low > LOGARITHMIC)

    def height(self, value: float) -> float:
        """Return the height of a value; the middle if all values are the same."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        # Halved, since the difference of two large numbers may overflow.
        length = high / 2 - low / 2
        return min(1.0, max(0.0, (value / 2 - low / 2) / length)) if length > 0 else 0.5


def _usual_end(values: Sequence[float]) -> float:
    """Return the highest of the values that are not far outliers (Tukey's outer fence)."""
    if len(values) < FEWEST:
        return max(values)
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    fence = third + 3 * max(third - first, 0.05 * abs(middle))
    return max(value for value in values if value <= fence)


def resample(values: Sequence[float], count: int, weights: Sequence[float] = ()) -> list[float]:
    """Return `count` values: weighted means of neighbours, or repeated values; NaN for no values."""
    found = []
    for column in range(count):
        begin = column * len(values) // count
        end = max(begin + 1, (column + 1) * len(values) // count)
        shares = weights[begin:end] or [1.0] * (end - begin)
        part = zip(values[begin:end], shares, strict=True)
        known = [(value, weight) for value, weight in part if math.isfinite(value) and weight > 0]
        whole = math.fsum(weight for _, weight in known)
        mean = math.fsum(value * (weight / whole) for value, weight in known)
        found.append(mean if known else math.nan)
    return found


def draw_curve(
    values: Sequence[float],
    width: int,
    height: int,
    look: TerminalStyle,
    *,
    zero: bool,
    weights: Sequence[float] = (),
) -> list[Text]:
    """Return a curve with the ends of its scale at the left, in exactly `height` lines of `width`.

    With `zero` the area below it is filled. Lines are empty if there is no value or no room.
    """
    if height < 1 or not any(map(math.isfinite, values)):
        return [Text() for _ in range(height)]
    scale = _scale(values, width * (1 if zero else 2), weights, zero=zero)
    labels = [""] * height
    labels[-1], labels[0] = compact(scale.low), compact(scale.high)
    gutter = max(map(len, labels)) + 1
    room = width - gutter
    if room < 2:
        return [Text() for _ in range(height)]
    columns = resample(values, room * (2 if look.unicode and not zero else 1), weights)
    heights = [scale.height(value) if math.isfinite(value) else None for value in columns]
    if look.unicode:
        rows = _blocks(heights, height) if zero else _braille(heights, height)
    else:
        rows = _strokes(heights, height, filled=zero)
    return [
        Text.assemble((label.rjust(gutter - 1) + " ", "dim"), (row, "cyan"))
        for label, row in zip(labels, rows, strict=True)
    ]


def _scale(values: Sequence[float], columns: int, weights: Sequence[float], *, zero: bool) -> Scale:
    """Return the scale for the means that are drawn in `columns`, if there are fewer than values."""
    if zero and columns < len(values):
        values = resample(values, columns, weights)
    return Scale.of([value for value in values if math.isfinite(value)], zero=zero)


def draw_sparkline(
    values: Sequence[float],
    width: int,
    look: TerminalStyle,
    *,
    zero: bool,
    weights: Sequence[float] = (),
) -> str:
    """Return a curve in one line."""
    if width < 1 or not any(map(math.isfinite, values)):
        return ""
    scale = _scale(values, width, weights, zero=zero)
    levels = BLOCKS if look.unicode else LEVELS
    signs = []
    for value in resample(values, width, weights):
        known = math.isfinite(value)
        signs.append(levels[1 + round(scale.height(value) * (len(levels) - 2))] if known else " ")
    return "".join(signs)


def _blocks(heights: Sequence[float | None], rows: int) -> list[str]:
    eighths = [0 if height is None else max(1, round(height * 8 * rows)) for height in heights]
    return [
        "".join(BLOCKS[min(8, max(0, each - 8 * below))] for each in eighths)
        for below in reversed(range(rows))
    ]


def _braille(heights: Sequence[float | None], rows: int) -> list[str]:
    cells = [[0] * (len(heights) // 2) for _ in range(rows)]
    for column, _, dots in _line(heights, 4 * rows):
        for dot in dots:
            cells[dot // 4][column // 2] |= DOTS[column % 2][dot % 4]
    return ["".join(chr(0x2800 + bits) if bits else " " for bits in row) for row in cells]


def _strokes(heights: Sequence[float | None], rows: int, *, filled: bool) -> list[str]:
    cells = [[" "] * len(heights) for _ in range(rows)]
    for column, stroke, strokes in _line(heights, 3 * rows):
        for row in range(stroke // 3, rows) if filled else [each // 3 for each in strokes]:
            cells[row][column] = ":" if filled else "|"
        cells[stroke // 3][column] = STROKES[stroke % 3]
    return ["".join(row) for row in cells]


def _line(heights: Sequence[float | None], dots: int) -> Iterator[tuple[int, int, range]]:
    """Yield the column of each height, its dot, and the dots that join it to the one before."""
    before: int | None = None
    for column, height in enumerate(heights):
        now = None if height is None else round((1 - height) * (dots - 1))
        if now is not None:
            start = now if before is None else before
            yield column, now, range(min(now, start + 1), max(now, start - 1) + 1)
        before = now


def divide_cells(parts: Sequence[float], cells: int) -> list[int]:
    """Return the cells of each part, `cells` in total, by largest remainders; 0 if all parts are 0."""
    whole = math.fsum(parts)
    if not 0 < whole < math.inf or cells < 1:
        return [0] * len(parts)
    wanted = [part / whole * cells for part in parts]
    given = [math.floor(want) for want in wanted]
    by_remainder = sorted(range(len(parts)), key=lambda each: given[each] - wanted[each])
    for each in by_remainder[: cells - sum(given)]:
        given[each] += 1
    return given


def draw_bar(parts: dict[str, float], longest: float, width: int, look: TerminalStyle) -> Text:
    """Return a step as a stacked bar, `width` cells long for `longest` seconds.

    Each part begins with its letter. Without colour the part is filled with the letter.
    """
    known = [(part, drawable_seconds(parts.get(part.name, 0.0))) for part in PARTS]
    whole = math.fsum(seconds for _, seconds in known)
    length = round(min(1.0, whole / longest) * width) if longest > 0 else 0
    line = Text()
    for (part, _), cells in zip(
        known, divide_cells([seconds for _, seconds in known], length), strict=True
    ):
        text = part.letter.ljust(cells)[:cells] if look.colour else part.letter * cells
        line.append(text, part.style(look))
    line.append(" " * (width - length))
    return line


def drawable_seconds(value: float) -> float:
    """Return a time that can be drawn: finite and not negative."""
    return value if 0 < value < 1e12 else 0.0

"""The look of the page: letters and colours of parts, signs, numbers, and text that fits."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TextIO

from rich.cells import get_character_cell_size
from rich.text import Text

from shoal.tools.report import PALETTE
from shoal.util.safe_text import printable
from shoal.util.units import duration

SIGNS = "━─·…▸↑↓█▁⣿"
"""Characters that the terminal's encoding must have; otherwise the page is drawn in ASCII."""


@dataclass(frozen=True, kw_only=True)
class TerminalStyle:
    """The abilities of the terminal. Without colour the letters of parts fill their bars."""

    colour: bool = True
    unicode: bool = True

    @classmethod
    def of(cls, stream: TextIO, *, colour: bool) -> TerminalStyle:
        """Return the look for output to `stream`."""
        try:
            SIGNS.encode(stream.encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return cls(colour=colour, unicode=False)
        return cls(colour=colour)

    def sign(self, sign: str, plain: str) -> str:
        """Return `sign`, or `plain` if the encoding lacks it."""
        return sign if self.unicode else plain

    @property
    def dot(self) -> str:
        """The separator between two items on a line."""
        return self.sign(" · ", " - ")

    def safe(self, text: str) -> str:
        """Return foreign text, with characters escaped on whose width terminals disagree."""
        shown = "".join(map(_settled, printable(text.replace("\t", " "))))
        return shown if self.unicode else shown.encode("ascii", "replace").decode()

    def cut(self, line: Text, width: int) -> Text:
        """Return `line` if it fits into `width` cells, else its beginning with an ellipsis."""
        if line.cell_len <= width:
            return line
        mark = self.sign("…", "~")
        kept = line.copy()
        kept.truncate(max(0, width - len(mark)), overflow="crop")
        kept.append(mark[:width], "dim")
        return kept

    def fitted(self, line: Text, width: int) -> Text:
        """Return `line` cut or padded to exactly `width` cells."""
        kept = self.cut(line, width).copy()
        kept.pad_right(width - kept.cell_len)
        return kept

    def wrapped(self, text: str, width: int, lines: int) -> list[Text]:
        """Return text in at most `lines` lines, broken between words if possible."""
        words, rows = text.split(), [""]
        for word in words:
            longer = f"{rows[-1]} {word}".strip()
            if Text(longer).cell_len > width and rows[-1] and len(rows) < lines:
                rows.append(word)
            else:
                rows[-1] = longer
        return [self.cut(Text(row), width) for row in rows]


def _settled(character: str) -> str:
    """Return the character, or its escape if terminals disagree on its width: marks, joiners, emoji."""
    if character.isascii():
        return character
    cells, kind = get_character_cell_size(character), unicodedata.category(character)
    wide = cells == 2 and unicodedata.east_asian_width(character) in "WF" and kind[0] in "LNP"
    narrow = cells == 1 and character < "\u1100" and kind[0] in "LNPSZ"
    signs = cells == 1 and "\u2000" <= character < "\u2100" and kind[0] == "P"
    if wide or narrow or signs:
        return character
    return character.encode("unicode_escape").decode()


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of a step: its letter, and its long and short name."""

    name: str
    letter: str
    word: str
    short: str

    def style(self, look: TerminalStyle) -> str:
        """Return the style of its cells; the letters are readable without colour."""
        paint = PALETTE[self.name]
        return f"{paint.ink} on {paint.colour}" if look.colour else ""


PARTS = (
    StepPart(name="wait", letter="D", word="data", short="data"),
    StepPart(name="transfer", letter="T", word="transfer", short="move"),
    StepPart(name="forward", letter="F", word="forward", short="fwd"),
    StepPart(name="backward", letter="B", word="backward", short="bwd"),
    StepPart(name="communication", letter="C", word="communication", short="comm"),
    StepPart(name="waiting", letter="w", word="waits for the slowest", short="waits"),
    StepPart(name="update", letter="U", word="optimizer", short="upd"),
    StepPart(name="checkpoint", letter="K", word="checkpoint", short="save"),
    StepPart(name="evaluation", letter="E", word="evaluation", short="eval"),
    StepPart(name="other", letter="o", word="other", short="other"),
)
WORDS = {part.name: part.word for part in PARTS}


def push_right(line: Text, text: str, width: int) -> Text:
    """Return `line` with `text` at the right end of `width` cells, if there is room for it."""
    space = width - line.cell_len - len(text)
    if space >= 2:
        line.append(" " * space + text, "dim")
    return line


def ascii_duration(seconds: float) -> str:
    """Return the time of a part of a step in ASCII, which lacks `µ`."""
    return duration(seconds, microseconds=False)

"""Colours and hatches of the parts of a step, the same in the report, studies and the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BLACK, WHITE = "#000000", "#ffffff"


@dataclass(frozen=True)
class Paint:
    """The colour of a part's area, the hatch on it, and the ink of letters on it."""

    colour: str
    hatch: str = ""
    ink: str = BLACK


PALETTE: Mapping[str, Paint] = {
    "forward": Paint("#0072b2", ink=WHITE),
    "backward": Paint("#56b4e9", "////"),
    "update": Paint("#009e73"),
    "communication": Paint("#e69f00"),
    "waiting": Paint("#d55e00", "||||"),
    "wait": Paint("#cc79a7"),
    "transfer": Paint("#9467bd", "\\\\\\\\"),
    "checkpoint": Paint("#757575", ink=WHITE),
    "evaluation": Paint("#44aa99", "xxxx"),
    "other": Paint("#bdbdbd"),
}
"""By part: the colours of Okabe and Ito, 2008, without the yellow, which is too pale on white, with two
of Tol's and two greys. Hatches distinguish the parts without colour vision."""

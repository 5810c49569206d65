"""Colours and hatches of the parts of a step, the same in the report, studies and the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BLACK, WHITE = "#000000", "#ffffff"


@dataclass(frozen=True)
class PartColor:
    """The colour of a part's area, the hatch on it, and the ink of letters on it."""

    colour: str
    hatch: str = ""
    ink: str = BLACK


PALETTE: Mapping[str, PartColor] = {
    "forward": PartColor("#0072b2", ink=WHITE),
    "backward": PartColor("#56b4e9", "////"),
    "update": PartColor("#009e73"),
    "communication": PartColor("#e69f00"),
    "waiting": PartColor("#d55e00", "||||"),
    "wait": PartColor("#cc79a7"),
    "transfer": PartColor("#9467bd", "\\\\\\\\"),
    "checkpoint": PartColor("#757575", ink=WHITE),
    "evaluation": PartColor("#44aa99", "xxxx"),
    "other": PartColor("#bdbdbd"),
}
"""By part: the colours of Okabe and Ito, 2008, without the yellow, which is too pale on white, with two
of Tol's and two greys. Hatches distinguish the parts without colour vision."""

"""The machine, the choices of `shoal.init` and their reasons: `shoal info`, alone or in a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.distributed import env_vars
from shoal.distributed.init import init
from shoal.tools.doctor.info.documents import info_document
from shoal.tools.doctor.info.ranks import RankInfo, gather
from shoal.util.decision import Decision
from shoal.util.errors import ShoalError
from shoal.util.tables import print_document

if TYPE_CHECKING:
    from rich.console import Console

JOIN_SECONDS = 60.0
"""How long the ranks of a launch wait for each other; it can be short, as no rank prepares data."""


def print_info(console: Console) -> None:
    """Join the world that a launcher started, and print on rank 0 its settings and their reasons.

    If the environment contradicts itself or the world can't be formed, print the information that is
    available and raise the ShoalError.
    """
    try:
        placement = env_vars.placement()
    except ShoalError:
        print_document(console, info_document(launchers=env_vars.launcher_variables()))
        raise
    decisions: Sequence[Decision[object]] = placement.choices
    ranks: list[RankInfo] = []
    try:
        with init(prepare_timeout=JOIN_SECONDS) as world:
            ranks, decisions = gather(world), world.decisions
    finally:
        if placement.rank == 0:
            print_document(console, info_document(decisions=decisions, ranks=ranks))

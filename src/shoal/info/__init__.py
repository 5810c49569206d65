"""What is here, what was chosen and why: `shoal info`, alone or in every rank of a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal import environ
from shoal.errors import ShoalError
from shoal.info import page
from shoal.info.machine import describe
from shoal.info.ranks import gather
from shoal.world import init

if TYPE_CHECKING:
    from rich.console import Console

JOIN_SECONDS = 60.0
"""How long the ranks of a launch wait for each other: nobody prepares data here."""


def show(console: Console) -> None:
    """Join the world that a launcher started and print, on rank 0, what it is and why.

    Where the environment contradicts itself or the world can't form, what could be found is printed
    and the ShoalError raised.
    """
    try:
        placement = environ.placement()
    except ShoalError:
        page.machine(console, describe())
        page.launchers(console, environ.launcher_variables())
        raise
    try:
        with init(prepare_timeout=JOIN_SECONDS) as world:
            ranks, choices = gather(world), world.choices
    except ShoalError:
        if placement.rank == 0:
            page.machine(console, describe())
            page.choices(console, placement.choices)
        raise
    if placement.rank == 0:
        page.machine(console, describe())
        page.choices(console, choices)
        if len(ranks) > 1:
            page.ranks(console, ranks)

"""The machine, the choices of `shoal.init` and their reasons: `shoal info`, alone or in a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.distributed import env_vars
from shoal.distributed.init import init
from shoal.tools.doctor.info import display
from shoal.tools.doctor.info.machine import describe
from shoal.tools.doctor.info.ranks import gather
from shoal.util.errors import ShoalError

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
        display.print_machine(console, describe())
        display.print_launchers(console, env_vars.launcher_variables())
        raise
    try:
        with init(prepare_timeout=JOIN_SECONDS) as world:
            ranks, choices = gather(world), world.decisions
    except ShoalError:
        if placement.rank == 0:
            display.print_machine(console, describe())
            display.print_choices(console, placement.choices)
        raise
    if placement.rank == 0:
        display.print_machine(console, describe())
        display.print_choices(console, choices)
        if len(ranks) > 1:
            display.print_ranks(console, ranks)

"""The schedulers that `shoal submit` knows."""

from __future__ import annotations

import shutil

from shoal.tools.submit.gridengine.scheduler import GridEngine
from shoal.tools.submit.kubernetes.scheduler import Kubernetes
from shoal.tools.submit.pbs.scheduler import PBS
from shoal.tools.submit.ray.scheduler import Ray
from shoal.tools.submit.scheduler import Scheduler
from shoal.tools.submit.slurm.scheduler import Slurm
from shoal.util.errors import LaunchError

SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Slurm(),
    "gridengine": GridEngine(),
    "pbs": PBS(),
    "kubernetes": Kubernetes(),
    "ray": Ray(),
}
"""Each scheduler under its name in site files; the first one is the default."""


def find_scheduler(name: str, given: str) -> Scheduler:
    """Return the scheduler of that name. Raises LaunchError, about `given`, if there is none."""
    if name not in SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        raise LaunchError(
            given=given,
            found=f"scheduler = {name!r}; Shoal supports {known}",
            fix=f"use one of {known}",
        )
    return SCHEDULERS[name]


def scheduler_here() -> Scheduler:
    """Return the first scheduler whose commands this machine has, or the default one."""
    there = (each for each in SCHEDULERS.values() if shutil.which(each.profile.own_program))
    return next(there, next(iter(SCHEDULERS.values())))

"""The beginning of every script: join the other processes, or make a world of one."""

from __future__ import annotations

import contextlib
import sys

import torch

from shoal.distributed import env_vars
from shoal.distributed.determinism import DeterministicMode
from shoal.distributed.initialize import LAYOUT, PREPARE_TIMEOUT, TIMEOUT, join
from shoal.distributed.layout import Layout
from shoal.distributed.watchdog.diagnosis import WaitLimits
from shoal.distributed.world import World


def init(
    *,
    layout: str | Layout = LAYOUT,
    backend: str | None = None,
    device: str | torch.device | None = None,
    devices_per_rank: int = 1,
    seed: int = 0,
    timeout: float = TIMEOUT,
    prepare_timeout: float = PREPARE_TIMEOUT,
    deterministic: bool = False,
) -> World:
    """Join the processes that a launcher started, or make a world of one.

    `layout` says how the ranks are divided, `backend` how they talk ("nccl" on CUDA, "gloo" on the
    CPU unless given; "mpi" under MPI's launchers), `device` where this rank computes (by local rank
    unless given): the first of `devices_per_rank` neighbours, `World.devices`, for a model that is
    placed on several. `seed` is the root of every random stream. `timeout` is how long a rank may wait
    for others, in seconds, from the first optimizer step on; before it, and within `World.preparing`,
    `prepare_timeout` holds. Then the rank that did not arrive is named, and all ranks end.
    `deterministic` asks torch for deterministic algorithms. Use it as a context manager, so that
    nothing is left behind.

    With several ranks, torch gets as many threads as this rank has cores for itself, unless
    OMP_NUM_THREADS says otherwise; torchrun's own OMP_NUM_THREADS=1 does not. Rank 0 says so on
    stderr. Call `torch.set_num_threads` afterwards for another number.

    `World.decisions` has what was decided and why; `shoal info` prints it.

    Raises LaunchError for an environment that contradicts itself or a group that can't form,
    LayoutError for a layout that does not fit.
    """
    deterministic_mode = DeterministicMode(enabled=deterministic)  # NCCL's groups read it
    try:
        joined = join(
            layout=layout,
            backend=backend,
            device=device,
            devices_per_rank=devices_per_rank,
            timeout=timeout,
            prepare_timeout=prepare_timeout,
        )
    except BaseException:
        deterministic_mode.restore()
        raise
    if joined.told:
        with contextlib.suppress(OSError):  # as in `World.print`
            print(f"shoal: {joined.told}", file=sys.stderr, flush=True)
    if folder := env_vars.failures():
        # Jobs of `shoal submit` alone need it.
        from shoal.distributed.failure_reports import report_into

        report_into(folder, rank=joined.placement.rank, size=joined.placement.size)
    limits = WaitLimits(step=timeout, prepare=prepare_timeout)
    return World(joined, seed, limits, deterministic_mode=deterministic_mode)

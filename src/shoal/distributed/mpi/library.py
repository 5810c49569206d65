"""The launcher's MPI library in this process: initialized for threads, the backend of torch's process
groups, finalized by all ranks.
"""

from __future__ import annotations

import atexit
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shoal._torch import c10d
from shoal.distributed import env_vars
from shoal.distributed.cluster_env import Placement
from shoal.util.clock import PollBackoff
from shoal.util.errors import LaunchError

if TYPE_CHECKING:
    from shoal.distributed.mpi.process_group import Group


_LIBRARIES = {"Open MPI": "libmpi.so.40", "Hydra": "libmpi.so.12"}
"""The library that mpi4py loads for ranks of these launchers. With several MPIs installed, its own
choice may not be that of mpirun. The numbers are those of the ABIs.
"""
_NAMED_OTHERWISE = {
    "Hydra": "; Debian's MPICH goes by another name: ln -s /usr/lib/*/libmpich.so.12 DIR/libmpi.so.12 "
    "and export LD_LIBRARY_PATH=DIR"
}
_MPIRUN = "mpirun -n 4 python train.py"


def require(device: torch.device) -> None:
    """Raise LaunchError if ranks on such a device can't communicate through MPI."""
    if device.type != "cpu":
        raise LaunchError(
            given=f"backend='mpi', and {device} as the device",
            found="through MPI, Shoal sends tensors in host memory only",
            fix="use backend='nccl' on GPUs, or leave it out; or use device='cpu'",
        )
    if find_spec("mpi4py") is None:
        raise LaunchError(
            given="backend='mpi'",
            found="the package mpi4py is not installed",
            fix="pip install mpi4py, or leave backend out",
        )


def begin(placement: Placement) -> Any:
    """Return the initialized module mpi4py.MPI, whose world has the launcher's ranks.

    Raises LaunchError if the launcher is not of MPI, or of another MPI, or if the MPI does not allow
    calls from several threads.
    """
    given = f"backend='mpi' on rank {placement.rank} of {placement.size} ({placement.launcher})"
    if placement.launcher in ("torchrun", "shoal run"):
        raise LaunchError(
            given=given,
            found=f"{placement.launcher} starts processes that are not MPI ranks",
            fix=f"use {_MPIRUN}, or leave backend out",
        )
    if placement.launcher == "srun" and placement.size > 1 and not env_vars.speaks_mpi():
        raise LaunchError(
            given=given,
            found="srun has started its tasks without MPI: each would be a world of size 1",
            fix="use srun --mpi=pmix for Open MPI, pmi2 for MPICH (srun --mpi=list lists all; in a "
            "batch script, export SLURM_MPI_TYPE=pmix); or mpirun, or leave backend out",
        )
    mpi = _load(placement.launcher, given)
    if mpi.Is_finalized():
        raise LaunchError(
            given=given,
            found="MPI.Finalize() was called in this process, and MPI can't be initialized twice",
            fix="remove MPI.Finalize(): it is called when Python exits",
        )
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    atexit.unregister(_leave)
    atexit.register(_leave, mpi, os.getpid())
    _check(mpi, placement, given)
    return mpi


def leaving(code: object) -> None:
    """Note that this rank exits by `sys.exit(code)`, since Python does not report that at its end."""
    if "mpi4py.MPI" in sys.modules and code not in (None, 0):
        atexit.unregister(_leave)
        given = code if isinstance(code, int) else 1
        atexit.register(_leave, sys.modules["mpi4py.MPI"], os.getpid(), given)


def describe(mpi: Any) -> str:
    """Return the versions of mpi4py and of the MPI that it uses."""
    import mpi4py

    name, version = mpi.get_vendor()
    return f"mpi4py {mpi4py.__version__} on {name} {'.'.join(map(str, version))}"


def _load(launcher: str, given: str) -> Any:
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False, finalize=False)
    wanted = {}
    if name := _LIBRARIES.get(launcher):
        wanted["MPI4PY_LIBMPI"] = f"{Path(sys.prefix, 'lib', name)}:{name}"  # the first: PyPI's
    with env_vars.set_defaults(wanted):
        try:
            from mpi4py import MPI as mpi  # noqa: N811  (a module)
        except (ImportError, RuntimeError) as error:
            raise LaunchError(
                given=given,
                found=f"mpi4py finds no MPI library: {str(error).splitlines()[-1]}",
                fix="load the module of the MPI whose mpirun you use, or "
                f"export MPI4PY_LIBMPI=/path/to/libmpi.so{_NAMED_OTHERWISE.get(launcher, '')}",
            ) from None
    return mpi


def _check(mpi: Any, placement: Placement, given: str) -> None:
    world, library = mpi.COMM_WORLD, describe(mpi)
    if world.size != placement.size:
        raise LaunchError(
            given=given,
            found=f"{library}, whose world has {world.size} rank(s): it is not the launcher's MPI",
            fix=f"use srun --mpi={'pmix' if 'Open MPI' in library else 'pmi2'}, or mpirun"
            if placement.launcher == "srun"
            else "use the mpirun of the library that mpi4py has, or "
            "export MPI4PY_LIBMPI=/path/to/libmpi.so with the library of your mpirun",
        )
    if world.rank != placement.rank:
        raise LaunchError(
            given=given,
            found=f"{library}, for which this is rank {world.rank}",
            fix=f"start the ranks with MPI's own launcher, in their order: {_MPIRUN}",
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise LaunchError(
            given=given,
            found=f"{library}, without MPI_THREAD_MULTIPLE: only one thread at a time may call it",
            fix="use an MPI library built with thread support; if the script imports mpi4py itself, "
            "leave mpi4py.rc.thread_level as it is; or leave backend out",
        )


def _leave(mpi: Any, process: int, code: int = 0) -> None:
    """Finalize MPI when Python exits, which waits for all ranks; a rank that fails aborts them."""
    import mpi4py

    if os.getpid() != process or mpi.Is_finalized():  # not in a fork of this process
        return
    if getattr(sys, "last_value", None) is not None:  # its traceback has just been printed
        code = 1
    if code:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        mpi.COMM_WORLD.Abort(code)
    if mpi4py.rc.finalize is False:  # else the code that imported MPI before finalizes it
        request, patience = mpi.COMM_WORLD.Ibarrier(), PollBackoff()
        while not request.Test():
            patience.pause()
        mpi.Finalize()


BACKEND = "shoal_mpi"
"""Name of the backend in torch, which reserves "mpi"."""
_TAGS = 32767
"""Largest tag that every MPI supports, by the standard."""


def serve(placement: Placement) -> tuple[str, str]:
    """Initialize MPI and register a backend for a world of it; return its name and its description.

    Raises LaunchError if MPI's world is not that of the launcher.
    """
    mpi = begin(placement)
    create = _maker(mpi)

    def make(options: Any, _: Any) -> Group:
        ranks = options.global_ranks_in_group
        _await_members(options.store, len(ranks) or placement.size, options.timeout)
        return create(ranks, str(options.group_id), options.timeout)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
    return BACKEND, describe(mpi)


def provide() -> None:
    """Let `init_process_group("mpi")` use this backend, with MPI's ranks and torch's time limit."""
    create: Callable[[Sequence[int], str, timedelta], Group] | None = None

    def make(ranks: Sequence[int]) -> Group:
        nonlocal create
        if create is None or not ranks:  # a new default group
            require(torch.device("cpu"))
            create = _maker(begin(env_vars.placement()))
        return create(ranks, str(ranks), dist.default_pg_timeout)

    c10d.provide_mpi(make)


def _maker(mpi: Any) -> Callable[[Sequence[int], str, timedelta], Group]:
    """Return the function that makes the groups of one world.

    All members call it with their ranks (none: all ranks), a name for the group and its time limit.
    """
    from shoal.distributed.mpi.base_group import SharedState
    from shoal.distributed.mpi.process_group import (
        Group,  # imports mpi4py.MPI, which must be the launcher's
    )

    shared, world = SharedState(), mpi.COMM_WORLD.group

    def create(ranks: Sequence[int], name: str, timeout: timedelta) -> Group:
        tag = zlib.crc32(name.encode()) % _TAGS
        collectives = mpi.COMM_WORLD.Create_group(
            world.Incl(list(ranks) or list(range(world.size))), tag
        )
        return Group(shared, collectives, collectives.Dup(), limit=timeout.total_seconds())

    return create


def _await_members(store: Any, size: int, timeout: timedelta) -> None:
    """Wait until all ranks are present or the time is over; MPI itself would wait forever for them."""
    if store.add("members", 1) == size:
        store.set("complete", "")
    store.wait(["complete"], timeout)

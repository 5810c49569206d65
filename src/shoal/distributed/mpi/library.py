"""The MPI library of this process: that of its launcher, begun for threads, left by all together."""

from __future__ import annotations

import atexit
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shoal.distributed import env_vars
from shoal.distributed.cluster_env import Placement
from shoal.distributed.mpi.backoff import Patience
from shoal.util.errors import LaunchError

_LIBRARIES = {"Open MPI": "libmpi.so.40", "Hydra": "libmpi.so.12"}
"""What mpi4py loads for ranks of these launchers: with several MPIs installed its own choice may be
another than mpirun's. The numbers are those of the ABIs."""
_NAMED_OTHERWISE = {
    "Hydra": "; Debian's MPICH goes by another name: ln -s /usr/lib/*/libmpich.so.12 DIR/libmpi.so.12 "
    "and export LD_LIBRARY_PATH=DIR"
}
_MPIRUN = "mpirun -n 4 python train.py"


def require(device: torch.device) -> None:
    """Raises LaunchError where ranks on such a device can't talk through MPI."""
    if device.type != "cpu":
        raise LaunchError(
            given=f"backend='mpi', and {device} as the device",
            found="through MPI Shoal sends what is in the CPU's memory",
            fix="backend='nccl' on GPUs, or leave it out; or device='cpu'",
        )
    if find_spec("mpi4py") is None:
        raise LaunchError(
            given="backend='mpi'",
            found="the package mpi4py is not installed",
            fix="pip install mpi4py, or leave backend out",
        )


def begin(placement: Placement) -> Any:
    """The module mpi4py.MPI, begun: its world has the ranks that the launcher gave to this process.

    Raises LaunchError for a launcher that is not MPI's, or another MPI's, and for an MPI that does not
    let several threads call it.
    """
    given = f"backend='mpi' on rank {placement.rank} of {placement.size}, by {placement.launcher}"
    if placement.launcher in ("torchrun", "shoal run"):
        raise LaunchError(
            given=given,
            found=f"{placement.launcher} starts processes that are no ranks of MPI",
            fix=f"{_MPIRUN}, or leave backend out",
        )
    if placement.launcher == "srun" and placement.size > 1 and not env_vars.speaks_mpi():
        raise LaunchError(
            given=given,
            found="srun has told its tasks nothing of MPI: each would be a world of its own",
            fix="srun --mpi=pmix for Open MPI, pmi2 for MPICH (srun --mpi=list names what there is; "
            "in a batch script, export SLURM_MPI_TYPE=pmix); or mpirun, or leave backend out",
        )
    mpi = _load(placement.launcher, given)
    if mpi.Is_finalized():
        raise LaunchError(
            given=given,
            found="MPI.Finalize() has been called in this process, and MPI can't begin again",
            fix="leave MPI.Finalize() out: it is done when Python ends",
        )
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    atexit.unregister(_leave)
    atexit.register(_leave, mpi, os.getpid())
    _check(mpi, placement, given)
    return mpi


def leaving(code: object) -> None:
    """This rank ends by `sys.exit(code)`, of which Python tells nobody at its end."""
    if "mpi4py.MPI" in sys.modules and code not in (None, 0):
        atexit.unregister(_leave)
        given = code if isinstance(code, int) else 1
        atexit.register(_leave, sys.modules["mpi4py.MPI"], os.getpid(), given)


def describe(mpi: Any) -> str:
    """Which mpi4py, and on which MPI it stands."""
    import mpi4py

    name, version = mpi.get_vendor()
    return f"mpi4py {mpi4py.__version__} on {name} {'.'.join(map(str, version))}"


def _load(launcher: str, given: str) -> Any:
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False, finalize=False)
    wanted = {}
    if name := _LIBRARIES.get(launcher):
        wanted["MPI4PY_LIBMPI"] = f"{Path(sys.prefix, 'lib', name)}:{name}"  # the first is PyPI's
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
            found=f"{library}, whose world has {world.size} rank(s): it is not that launcher's MPI",
            fix=f"srun --mpi={'pmix' if 'Open MPI' in library else 'pmi2'}, which it speaks, or mpirun"
            if placement.launcher == "srun"
            else "use the mpirun of the library that mpi4py has, or "
            "export MPI4PY_LIBMPI=/path/to/libmpi.so with that of your mpirun",
        )
    if world.rank != placement.rank:
        raise LaunchError(
            given=given,
            found=f"{library}, for which this is rank {world.rank}",
            fix=f"start with MPI's own launcher, and its ranks in their order: {_MPIRUN}",
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise LaunchError(
            given=given,
            found=f"{library}, begun without MPI_THREAD_MULTIPLE: one thread at a time may call it",
            fix="an MPI built for threads; in a script that imports mpi4py itself, leave "
            "mpi4py.rc.thread_level as it is; or leave backend out",
        )


def _leave(mpi: Any, process: int, code: int = 0) -> None:
    """At the end of Python. MPI.Finalize waits for all ranks, so one that fails ends them instead."""
    import mpi4py

    if os.getpid() != process or mpi.Is_finalized():  # not in what was forked from this process
        return
    if getattr(sys, "last_value", None) is not None:  # its traceback has just been printed
        code = 1
    if code:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        mpi.COMM_WORLD.Abort(code)
    if mpi4py.rc.finalize is False:  # else whoever imported MPI before lets it end
        request, patience = mpi.COMM_WORLD.Ibarrier(), Patience()
        while not request.Test():
            patience.pause()
        mpi.Finalize()

"""`shoal run` without its imports: launchers that are forked from a process which has imported torch.

The launcher, the agent, the ranks, their sockets, files, restarts and signals are those of `shoal run`.
Only two programs start differently: the launcher, and the fork server of multiprocessing, are forks of
this process. Each would otherwise import torch, which takes longer than the training.
"""

from __future__ import annotations

import gc
import json
import multiprocessing.util
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, NoReturn

from shoal.tools.chaos import rank

MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
)
PACKAGES = ("checkpoint", "data", "distributed", "launcher", "strategies", "telemetry", "training")


def prepare() -> None:
    """Import the modules that ranks import while they train, so that their forks have them."""
    names = [*MODULES]
    for package in PACKAGES:
        found = import_module(f"shoal.{package}")
        names += [each.name for each in walk_packages(found.__path__, f"{found.__name__}.")]
    for name in names:
        if ".mpi" not in name:  # MPI starts threads
            with suppress(ImportError):  # an optional dependency is missing
                import_module(name)
    resource_tracker.ensure_running()
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process with threads can't be forked safely")


def fork_launcher(order: Mapping[str, Any], folder: Path, home: Path, output: Path) -> int:
    """Start what `shoal chaos` starts for an attempt, and return its process id."""
    file = folder / "order.json"
    file.write_text(json.dumps(order))
    pid = os.fork()
    if pid == 0:
        _run_launcher(file, home, output)
    return pid


def _run_launcher(order: Path, home: Path, output: Path) -> NoReturn:
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        lines = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for source, target in ((null, 0), (lines, 1), (lines, 2)):
            os.dup2(source, target)
        os.chdir(home)
        tempfile.tempdir = str(order.parent)
        setattr(multiprocessing.util, "spawnv_passfds", _fork_python)  # noqa: B010
        sys.argv = ["chaos", str(order)]
        rank.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_python(path: str, args: Sequence[str], passed: Sequence[int]) -> int:
    """Do what multiprocessing's function does, `python -c CODE`, in a fork of this process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number in range(1, signal.NSIG):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in passed:
                with suppress(OSError):
                    os.close(int(name))
        exec(args[-1], {"__name__": "__main__"})
        code = 0
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)

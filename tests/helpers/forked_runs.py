"""Observed runs whose ranks are forked from the test's process, which has imported torch already."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch._dynamo  # noqa: F401  # optimizers import it at their first step

from shoal.tools.verify.run_servers import ObservedScript, RunServers


class ForkedRuns(RunServers):
    """Runs without servers, and so without their hash seeds."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(Path(), processes=1)

    def expect(self, *_: int) -> None:
        pass

    def run(self, script: ObservedScript, processes: int, *, hash_seed: int, limit: float) -> int:
        return fork_ranks(script, processes, limit)


def fork_ranks(job: ObservedScript, size: int, limit: float) -> int:
    """Do what `RunServer.run` does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _run_rank(job, rank, size, port)
        ranks.append(pid)
    deadline = time.monotonic() + limit
    code = 0
    while ranks:
        for pid in list(ranks):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ranks.remove(pid)
                code = code or os.waitstatus_to_exitcode(status)
        if code or time.monotonic() > deadline:
            code = code or 124
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return code
        time.sleep(0.01)
    return code


def _run_rank(job: ObservedScript, rank: int, size: int, port: int) -> NoReturn:
    code = 1
    try:
        output = Path(job.observer.folder) / "output.txt"
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="forked",
        )
        if accelerate := sys.modules.get("accelerate.state"):  # an earlier test may have made its state
            accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        job.run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)

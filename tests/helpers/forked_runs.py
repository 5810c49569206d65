"""Observed runs whose ranks are forked from the test's process, which has imported torch already."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch._dynamo  # optimizers import it at their first step

from shoal.tools.verify.variants import ObservedScript, read_order


def fork_ranks(folder: Path, home: Path, *, hash_seed: int, limit: float) -> int:
    """Do what `variants.start_ranks` does, except for the hash seed."""
    job, size = read_order(folder / "order.json")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _run_rank(job, home, folder / "output.txt", rank, size, port)
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


def _run_rank(
    job: ObservedScript, home: Path, output: Path, rank: int, size: int, port: int
) -> NoReturn:
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        os.chdir(home)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="forked",
        )
        torch.set_num_threads(1)
        torch.default_generator.manual_seed(67280421310721)  # that of a new process
        np.random.seed()
        random.seed()
        if accelerate := sys.modules.get("accelerate.state"):  # an earlier test may have made its state
            accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        job.run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)

"""The time before the first step of a training: in the queue, and for the imports of its ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from datetime import datetime

from shoal.tools.submit.slurm.queue import ask_queue_time
from shoal.util.clock import CLOCK
from shoal.util.errors import ShoalError
from shoal.util.python import code_command
from shoal.util.units import duration

_IMPORTS = "import time, torch, shoal; shoal.init, shoal.Run; print(time.process_time())"
_LIMIT = 300.0


def fill_in_measured(text: str, devices: int, in_node: int, *, gpus: bool) -> tuple[str, list[str]]:
    """Return the values of --training with a number for each `auto`, and a sentence about each.

    `queue=auto` is the answer of Slurm to a job of this size, `start=auto` the processor time of the
    imports of a rank, which share the cores of this machine.

    Raises ShoalError if Slurm does not answer.
    """
    per_node = min(in_node, devices)
    nodes = -(-devices // per_node)

    def queue() -> tuple[float, str]:
        found = ask_queue_time(
            nodes, per_node, per_node if gpus else 0, now=datetime.fromtimestamp(CLOCK.wall())
        )
        return found.seconds / 3600, f"Queue: {found.text}."

    def start() -> tuple[float, str]:
        seconds, cores = _imports(), len(os.sched_getaffinity(0))
        seconds *= max(1.0, per_node / cores)
        said = f"Start: imports take {duration(seconds)} for {per_node} ranks on {cores} cores"
        return seconds, f"{said}; the model, the data and the restore come on top."

    ways: dict[str, Callable[[], tuple[float, str]]] = {"queue=auto": queue, "start=auto": start}
    parts, sentences = [], []
    for part in (piece.strip() for piece in text.split(",")):
        if part not in ways:
            parts.append(part)
            continue
        value, sentence = ways[part]()
        sentences.append(sentence)
        if value:
            parts.append(f"{part.partition('=')[0]}={value!r}")
    return ",".join(parts), sentences


def _imports() -> float:
    """Return the seconds of processor time that the imports of a rank take."""
    command = code_command(_IMPORTS)
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
    if done.returncode:
        raise ShoalError(
            given="start=auto",
            found=f"a new Python can't import torch and shoal: {done.stderr.strip()[-200:]}",
            fix="give the seconds to the first step, as in start=60",
        )
    return float(done.stdout)

"""The driver of a job on a cluster of Ray: a placement group with one `shoal run` on each node.

Ray runs it, and tasks of it on the nodes; only there is ray imported.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.distributed import env_vars
from shoal.distributed.cluster_env import REQUEUE
from shoal.util.clock import CLOCK
from shoal.util.tables import plain_console, print_path

_LOOK = 2.0
"""Seconds between two looks for the mark of `shoal cancel`."""

_SET_PARENT_DEATH_SIGNAL = 1  # of <linux/prctl.h>


def drive(file: str) -> int:
    """Run the job of a file, and return its exit code.

    A node that is lost ends the others; all of them start again when Ray has another one.
    """
    job = json.loads(Path(file).read_text())
    # Ranks print equal lines, each of which counts.
    env_vars.write_defaults({"RAY_DEDUP_LOGS": "0"})
    import ray
    from ray.util.placement_group import placement_group

    ray.init(log_to_driver=True)
    nodes, cancelled = job["nodes"], Path(job["cancelled"])
    group = placement_group(
        [job["bundle"]] * nodes,
        strategy="STRICT_SPREAD",
        bundle_label_selector=[job["labels"]] * nodes,
    )
    end = 0.0
    for _ in range(1 + job["replacements"]):
        places = [_task(group, find_address, node, {}).remote() for node in range(nodes)]
        while ray.wait(places, num_returns=nodes, timeout=_LOOK)[1]:
            if cancelled.exists():
                return 128 + signal.SIGTERM
        end = end or CLOCK.wall() + job["seconds"]
        code = _attempt(group, job, places[0], end)
        if code not in (None, REQUEUE) or cancelled.exists() or CLOCK.wall() > end:
            return REQUEUE if code is None else code
    return code or 1


def _attempt(group: Any, job: dict[str, Any], place: Any, end: float) -> int | None:
    """Return the exit code of the launchers of all nodes; None if a node is lost."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    tasks: list[Any] = []
    codes: list[int] = []
    try:
        command = [*job["launcher"], *job["script"]]
        if job["nodes"] > 1:
            meeting = ["--nodes", str(job["nodes"]), "--rendezvous", ray.get(place)]
            command = [*job["launcher"], *meeting, *job["script"]]
        where = (job["directory"], job["variables"], job["cancelled"], end)
        tasks = [
            _task(group, run_node, node, job["bundle"]).remote(command, *where)
            for node in range(job["nodes"])
        ]
        left = tasks
        while left and min(codes, default=0) >= 0:
            done, left = ray.wait(left)
            codes += ray.get(done)
    except RayTaskError:
        raise
    except RayError as error:
        codes.append(-signal.SIGKILL)
        why = f"Ray lost a node or its task: {type(error).__name__}"
    else:
        why = f"a launcher was killed by signal {-min(codes)}"
    if min(codes) < 0:
        print_path(plain_console(), f"shoal: {why}; all nodes start again")
        for task in tasks:
            ray.cancel(task, force=True)
        ray.wait(tasks, num_returns=len(tasks))
        return None
    return next((code for code in codes if code not in (0, REQUEUE)), max(codes))


def _task(group: Any, function: Callable[..., Any], node: int, bundle: dict[str, int]) -> Any:
    """Return a function as a task in the bundle of a node."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return ray.remote(function).options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        memory=bundle.get("memory"),
        max_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, node),
    )


def find_address() -> str:
    """Return the address of this node, as Ray knows it, with a free port."""
    import ray

    host = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind((host, 0))
        port = server.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run_node(
    command: Sequence[str], directory: str, variables: dict[str, str], cancelled: str, end: float
) -> int:
    """Run the launcher of a node, and return its exit code.

    It is asked to save and end at the time `end`, or if there is a file `cancelled`.
    """
    library = ctypes.CDLL(None)
    # Ray sets the number of threads to the CPUs of all processes of the node.
    with env_vars.set_variables({"OMP_NUM_THREADS": None, **variables}):
        launcher = subprocess.Popen(
            command,
            cwd=directory,
            # Ray gives the resources of a task that it kills to others.
            preexec_fn=lambda: library.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509 - it takes no lock
        )
    asked = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            return launcher.wait(_LOOK)
        if not asked and (CLOCK.wall() > end or Path(cancelled).exists()):
            asked = True
            launcher.terminate()

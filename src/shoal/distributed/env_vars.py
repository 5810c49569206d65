"""Access to the process environment; no other module reads or writes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from secrets import token_hex

from shoal.distributed.cluster_env import (
    Commands,
    Placement,
    adopt,
    detect,
    kill_times,
    marks_found,
)
from shoal.distributed.cluster_env.job_environments import ALONE, JobNodes, check_alone, read_nodes
from shoal.distributed.placement import LAST_PORT, integer, ports_of
from shoal.util.safe_text import is_secret, passwords

SAFE_PATH = "PYTHONSAFEPATH"
"""Keeps a new Python from looking for modules in the current directory."""

THREADS = "OMP_NUM_THREADS"
"""Sets the number of threads of torch and the libraries that it uses."""

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The network interfaces that Gloo, and NCCL or RCCL, take."""

TENSORPIPE = "TP_SOCKET_IFNAME"
"""Sets the network interface of torch's RPC."""

ASSIGNED_DEVICE = "ACCELERATE_TORCH_DEVICE"
"""The device that Ray Train has assigned to a worker."""

SITE = "SHOAL_SITE"
"""Sets the site of `shoal submit` if its command line has none."""

REPORTS = "SHOAL_REPORTS"
"""Sets the pipe by which a rank reports its failure to the launcher: process id and file descriptor."""

FAILURES = "SHOAL_FAILURES"
"""Sets the directory in which a rank of a batch job writes the report of its failure."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def placement(
    env: Mapping[str, str] | None = None,
    *,
    cpus: int | None = None,
    commands: Commands | None = None,
) -> Placement:
    """Return the placement of this process by the variables of its launcher.

    Without a launcher, the world size is 1. `env` is the environment (default: of this process), `cpus`
    the number of cores that this process may use (default: its CPU affinity), and `commands` returns
    the command lines of its ancestors. Raises LaunchError if variables are missing or contradict each
    other.
    """
    return detect(
        os.environ if env is None else env,
        len(os.sched_getaffinity(0)) if cpus is None else cpus,
        _ancestors if commands is None else commands,
    )


def adopted_placement(rank: int, size: int) -> Placement:
    """Return the placement of this process as a rank of a process group that exists; see `adopt`."""
    cpus = len(os.sched_getaffinity(0))
    return adopt(os.environ, cpus, _ancestors, rank=rank, size=size)


def warn_alone() -> str:
    """Return a warning for a world of one in a job with other hosts; see `check_alone`."""
    return "" if os.environ.get(ALONE) == "1" else check_alone(os.environ)


def warn_of_kill(launcher: str, seconds: float | None) -> str:
    """Return a warning if a launcher would kill ranks before such a save is complete, or "".

    A job of `shoal submit` gets its signal in time.
    """
    if seconds is None or os.environ.get(FAILURES):
        return ""
    script = Path(sys.argv[0]).name or "-"
    return kill_times.warn_of_kill(launcher, seconds, os.environ, _ancestors, script)


def nodes_of_job() -> JobNodes | None:
    """Return the nodes of this process's job; see `read_nodes`."""
    return read_nodes(os.environ)


def ports() -> tuple[int, ...]:
    """Return all ports of SHOAL_PORTS in a random order, for a rendezvous whose address is sent."""
    return ports_of(os.environ, token_hex(8), tries=LAST_PORT).value


def _ancestors() -> list[str]:
    """Return the command lines of this process's ancestors, nearest first."""
    import psutil

    lines = []
    for process in psutil.Process().parents():
        try:
            lines.append(" ".join(process.cmdline()))
        except psutil.Error:
            break
    return lines


def launcher_variables() -> dict[str, str]:
    """Return the launchers in the order of detection, each with those of its variables that are set."""
    return marks_found(os.environ)


def visible_devices() -> dict[str, str]:
    """Return the variables that restrict the visible GPUs, if set; an empty one hides all."""
    return {name: os.environ[name] for name in _VISIBLE if name in os.environ}


def variable(name: str) -> str:
    """Return a variable of this process, or "" if it is not set."""
    return os.environ.get(name, "")


def allocator_settings() -> str:
    """Return the settings of torch's allocator on GPUs, or "" if there are none."""
    return next((os.environ[name] for name in _ALLOCATOR if os.environ.get(name)), "")


def worker_threads(processes: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each of `processes` on this machine: the cores divided by `processes`.

    Empty if the user has set it already.
    """
    env = os.environ if env is None else env
    if env.get(THREADS):
        return {}
    return {THREADS: str(max(1, len(os.sched_getaffinity(0)) // processes))}


def worker_variables(
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    node: int,
    nodes: int,
    address: str,
    port: int,
    attempt: int,
    restarts: int,
    run_id: str,
    store: bool,
) -> dict[str, str]:
    """Return the placement of one worker as variables with torchrun's names.

    With `store`, the launcher hosts the store at `address` and `port`, and workers do not create one.
    """
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": restarts,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": store,
    }
    return {name: str(value) for name, value in values.items()}


def speaks_mpi() -> bool:
    """Return whether the launcher has set the variables by which MPI ranks find each other."""
    return any(name.startswith(("PMI_", "PMI2_", "PMIX_")) for name in os.environ)


def job_nodes() -> int:
    """Return the number of nodes of the Slurm job in which this process runs; 1 outside of one."""
    return integer(os.environ, "SLURM_JOB_NUM_NODES", 1) if os.environ.get("SLURM_JOB_ID") else 1


def reports() -> int | None:
    """Return the pipe to the launcher of this process, not of an ancestor; None if there is none."""
    process, _, descriptor = os.environ.get(REPORTS, "").partition(":")
    return int(descriptor) if process == str(os.getpid()) else None


def failures() -> Path | None:
    """Return the directory for the report of this rank's failure; None if no process reads it."""
    return Path(os.environ[FAILURES]) if os.environ.get(FAILURES) else None


def config_folder() -> Path:
    """Return the directory of the user's settings: `$XDG_CONFIG_HOME/shoal` or `~/.config/shoal`."""
    return _user_folder("XDG_CONFIG_HOME", "~/.config")


def state_folder() -> Path:
    """Return the directory of the user's lists of runs: `$XDG_STATE_HOME/shoal` or
    `~/.local/state/shoal`.
    """
    return _user_folder("XDG_STATE_HOME", "~/.local/state")


def _user_folder(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    # The specification of these variables says that relative paths are invalid.
    base = Path(given) if os.path.isabs(given) else Path(default).expanduser()
    return base / "shoal"


def beginning_with(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables whose names begin with one of these prefixes."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def secrets() -> list[str]:
    """Return the values to hide: variables whose names suggest secrets, and passwords in URLs."""
    named = [value for name, value in os.environ.items() if is_secret(name)]
    return [*named, *(password for value in os.environ.values() for password in passwords(value))]


def python_path() -> list[str]:
    """Return the entries of PYTHONPATH."""
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def outside_of_jobs() -> dict[str, str]:
    """Return the environment without the variables of a Slurm job around this process.

    A job that is submitted from within another would take its numbers of nodes and tasks for its own.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return dict(os.environ)
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SRUN_", "SLURMD_")) or name == "SLURM_CONF"
    }


@contextmanager
def set_variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process within a block (None removes one), then restore them."""
    before = {name: os.environ.get(name) for name in values}
    write_variables(values)
    try:
        yield
    finally:
        write_variables(before)


def on_this_node() -> AbstractContextManager[None]:
    """Let processes that start in a block use this node only, whatever nodes their job has."""
    return set_variables({ALONE: "1"})


def safe_path() -> AbstractContextManager[None]:
    """Let processes that multiprocessing starts in a block import nothing from the current directory.

    It starts Python with `-c`, where a file could have the name of a module.
    """
    return set_variables({SAFE_PATH: "1"})


@contextmanager
def set_defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process within a block if they are not set yet."""
    with set_variables({name: value for name, value in values.items() if name not in os.environ}):
        yield


def write_variables(values: Mapping[str, str | None]) -> None:
    """Set variables of this process permanently (None removes one)."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def write_defaults(values: Mapping[str, str]) -> dict[str, str]:
    """Set variables if they are not set yet, and return those that were set."""
    unset = {name: value for name, value in values.items() if name not in os.environ}
    write_variables(unset)
    return unset


def remove_defaults(values: Mapping[str, str]) -> None:
    """Remove variables that `write_defaults` has set, but not those that were changed since."""
    write_variables({name: None for name, value in values.items() if os.environ.get(name) == value})

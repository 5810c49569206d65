"""The only reader and writer of the process environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shoal.distributed.cluster_env import Commands, Placement, detect, marks_found
from shoal.util.text import is_secret, passwords

SAFE_PATH = "PYTHONSAFEPATH"
"""Keeps a new Python from looking for modules in the current directory."""

THREADS = "OMP_NUM_THREADS"
"""How many threads torch and the libraries beneath it start with."""

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The network interfaces that Gloo, and NCCL or RCCL, take."""

TENSORPIPE = "TP_SOCKET_IFNAME"
"""The network interface that torch's RPC takes."""

SITE = "SHOAL_SITE"
"""The site that `shoal submit` takes where none is named."""

REPORTS = "SHOAL_REPORTS"
"""The pipe by which a rank tells the launcher how it failed: its process id and file descriptor."""

FAILURES = "SHOAL_FAILURES"
"""The directory in which a rank of a batch job leaves the report of its failure."""

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def placement(
    env: Mapping[str, str] | None = None,
    *,
    cpus: int | None = None,
    commands: Commands | None = None,
) -> Placement:
    """Read where this process sits from `env` (default: the process environment).

    Launchers are asked in the order of `cluster_env.LAUNCHERS`; where none left its variables, the
    world is one process. `cpus` is how many cores this process may run on (default: its CPU
    affinity), `commands` gives the command lines of its ancestors.
    Raises LaunchError for environments that are half set or contradict themselves.
    """
    return detect(
        os.environ if env is None else env,
        len(os.sched_getaffinity(0)) if cpus is None else cpus,
        _ancestors if commands is None else commands,
    )


def _ancestors() -> list[str]:
    """The command lines of this process's ancestors, nearest first."""
    import psutil

    lines = []
    for process in psutil.Process().parents():
        try:
            lines.append(" ".join(process.cmdline()))
        except psutil.Error:
            break
    return lines


def launcher_variables() -> dict[str, str]:
    """The launchers in the order in which they are asked, each with those of its marks that are set."""
    return marks_found(os.environ)


def visible_devices() -> dict[str, str]:
    """The variables that restrict which GPUs a process sees, if set; an empty one hides all."""
    return {name: os.environ[name] for name in _VISIBLE if name in os.environ}


def threads_variable() -> str:
    """OMP_NUM_THREADS as this process was given it; empty if it was not."""
    return os.environ.get(THREADS, "")


def interface_variable() -> str:
    """GLOO_SOCKET_IFNAME as the user has set it; empty if not."""
    return os.environ.get(GLOO, "")


def worker_threads(processes: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variable that gives each of `processes` on this machine its share of the cores.

    Empty where the user has set OMP_NUM_THREADS already.
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
) -> dict[str, str]:
    """The variables that tell one worker its place, named as torchrun names them.

    The store at `address` and `port` is the launcher's, so no worker opens one.
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
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in values.items()}


def speaks_mpi() -> bool:
    """Whether what started this process has told it how ranks of MPI find each other."""
    return any(name.startswith(("PMI_", "PMI2_", "PMIX_")) for name in os.environ)


def reports() -> int | None:
    """The pipe to the launcher of this very process, and not of one that started it; None without."""
    process, _, descriptor = os.environ.get(REPORTS, "").partition(":")
    return int(descriptor) if process == str(os.getpid()) else None


def failures() -> Path | None:
    """Where this rank is to leave the report of its failure; None where nobody reads it."""
    return Path(os.environ[FAILURES]) if os.environ.get(FAILURES) else None


def config_folder() -> Path:
    """Where the user's own settings are: `$XDG_CONFIG_HOME/shoal`, or `~/.config/shoal`."""
    return _user_folder("XDG_CONFIG_HOME", "~/.config")


def state_folder() -> Path:
    """Where lists of the user's own runs are: `$XDG_STATE_HOME/shoal`, or `~/.local/state/shoal`."""
    return _user_folder("XDG_STATE_HOME", "~/.local/state")


def _user_folder(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    # Relative paths are invalid by the specification of these variables.
    base = Path(given) if os.path.isabs(given) else Path(default).expanduser()
    return base / "shoal"


def site() -> str:
    """The site that the user has named for all submissions; empty for none."""
    return os.environ.get(SITE, "")


def beginning_with(prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables whose names begin with one of these."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def secrets() -> list[str]:
    """The values that nobody else should see: of variables with such names, and passwords in URLs."""
    named = [value for name, value in os.environ.items() if is_secret(name)]
    return [*named, *(password for value in os.environ.values() for password in passwords(value))]


def python_path() -> list[str]:
    """The entries of PYTHONPATH."""
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def outside_of_jobs() -> dict[str, str]:
    """The environment without what a Slurm job around this process says of itself.

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
    """Set variables of this process for the length of a block (None removes one), then restore."""
    before = {name: os.environ.get(name) for name in values}
    write_variables(values)
    try:
        yield
    finally:
        write_variables(before)


@contextmanager
def set_defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Set those of the variables that are not set yet for the length of a block."""
    with set_variables({name: value for name, value in values.items() if name not in os.environ}):
        yield


def write_variables(values: Mapping[str, str | None]) -> None:
    """Set variables of this process for good (None removes one)."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def write_defaults(values: Mapping[str, str]) -> dict[str, str]:
    """Set those of the variables for good that are not set yet, and return them."""
    unset = {name: value for name, value in values.items() if name not in os.environ}
    write_variables(unset)
    return unset

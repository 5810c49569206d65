"""Environments recorded from real launchers: what each rank of a command was given.

Recorded anew by running, on a machine that has the launcher,
`python tests/helpers/recordings.py NAME srun -N3 -n5 …`: everything after the
name is the launcher and its options; it starts this file once for each rank and writes
`tests/distributed/recorded/NAME.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "distributed" / "recorded"

_KEPT = (
    *("SLURM", "PMI_", "PMIX_", "OMPI_COMM_", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_num_nodes"),
    *("MPI_", "I_MPI_HYDRA_UUID", "CUDA_VISIBLE_DEVICES", "MASTER_", "OMP_NUM_THREADS"),
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_R"),
    *("PET_", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX"),
    *("RAY_RAYLET_PID", "RAY_JOB_ID", "RAY_TRAIN_V2_ENABLED", "ACCELERATE_TORCH_DEVICE", "NODE_RANK"),
)
# Of this machine, or long and of no use.
_DROPPED = (
    *("SLURM_CONF", "SLURM_SUBMIT", "SLURM_WORKING", "SLURM_JOB_U", "SLURM_JOB_G", "SLURM_JOB_NAME"),
    *("SLURM_SRUN_COMM", "SLURM_LAUNCH_NODE", "SLURM_TOPOLOGY", "SLURM_RLIM", "SLURM_PRIO"),
    *("SLURM_TASK_PID", "SLURM_HOSTFILE", "SLURM_STEP_LAUNCHER", "SLURM_UMASK", "SLURM_PACK"),
    *("PMIX_MCA", "PMIX_DSTORE", "PMIX_SERVER", "PMIX_SYSTEM", "PMIX_PREFIX", "PMIX_BFROP"),
    *("PMIX_PARAM", "SLURM_CPU_BIND", "SLURM_EXPORT", "SLURM_PMIXP"),
)


@dataclass(frozen=True)
class Recording:
    """What `command` gave each of its ranks, in rank order, and how many cores each could use."""

    name: str
    command: str
    environments: list[dict[str, str]]
    cpus: list[int]
    ancestors: list[str]


def load(name: str) -> Recording:
    """One recording by its name."""
    content = json.loads((FOLDER / f"{name}.json").read_text())
    environments = [{**content["all"], **rank} for rank in content["ranks"]]
    return Recording(name, content["command"], environments, content["cpus"], content["ancestors"])


def names(*starts: str) -> list[str]:
    """The recordings whose names start so."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if path.stem.startswith(starts))


def _keep(name: str) -> bool:
    pack = name.endswith(("_PACK_GROUP_0", "_PACK_GROUP_1"))
    return name.startswith(_KEPT) and not name.startswith(_DROPPED) and not pack


def _show(folder: Path) -> None:
    import psutil

    shown = {
        "env": {name: value for name, value in os.environ.items() if _keep(name)},
        "cpus": len(os.sched_getaffinity(0)),
        "ancestors": [" ".join(p.cmdline()) for p in psutil.Process().parents()[:1]],
    }
    (folder / f"{os.getpid()}-{os.uname().nodename}").write_text(json.dumps(shown))


def _record(name: str, command: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        me = [sys.executable] if "torchrun" not in name else []
        subprocess.run([*command, *me, __file__, "--show", folder], check=True)
        ranks = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    of_rank = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    key = next((key for key in of_rank if key in ranks[0]["env"]), "")
    ranks.sort(key=lambda rank: int(rank["env"].get(key, 0)))
    first = ranks[0]["env"]
    common = {k: v for k, v in first.items() if all(rank["env"].get(k) == v for rank in ranks)}
    content = {
        "command": " ".join(Path(word).name for word in command),
        "all": dict(sorted(common.items())),
        "ranks": [
            dict(sorted((k, v) for k, v in rank["env"].items() if k not in common)) for rank in ranks
        ],
        "cpus": [rank["cpus"] for rank in ranks],
        "ancestors": [" ".join(Path(w).name for w in line.split()) for line in ranks[0]["ancestors"]],
    }
    text = json.dumps(content, indent=1)
    (FOLDER / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--show":
        _show(Path(sys.argv[2]))
    else:
        _record(sys.argv[1], sys.argv[2:])

"""Placement by the variables of torchrun and `shoal run`, or all of them set by hand."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.distributed.placement import (
    Placement,
    divided,
    integer,
    master_port,
    refuse_many_worlds,
    require,
    spell,
)
from shoal.util.decision import Decision
from shoal.util.errors import LaunchError

RUN_ID = "shoal-run"
"""The run identifier that `shoal run` passes to torch elastic, by which workers detect it."""

NODES_RUN_ID = "shoal-run-nodes"
"""The beginning of that identifier if `shoal run` started on several nodes, even if one is left."""

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# The variables in which a launcher around torchrun sets the number of processes it started.
_OUTER = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def torchrun(env: Mapping[str, str], cpus: int) -> Placement:
    """Return the placement by torchrun's variables, which torch.distributed.run documents."""
    require(env, _NAMES)
    rank, size = integer(env, "RANK"), integer(env, "WORLD_SIZE")
    local_size = integer(env, "LOCAL_WORLD_SIZE")
    if local_size < 1 or (size % local_size and not env.get("GROUP_WORLD_SIZE")):
        raise LaunchError(
            given=f"WORLD_SIZE={size}, LOCAL_WORLD_SIZE={local_size}",
            found="WORLD_SIZE is not a multiple of LOCAL_WORLD_SIZE",
            fix="set GROUP_RANK and GROUP_WORLD_SIZE (node rank and number of nodes), as torchrun does",
        )
    nodes = integer(env, "GROUP_WORLD_SIZE", size // local_size)
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    several = run_id.startswith(NODES_RUN_ID)
    if nodes == 1 and not several:
        check_outer(env, size)
    launcher = "shoal run" if several or run_id == RUN_ID else "torchrun"
    cores = divided(cpus, local_size)
    address, port = env["MASTER_ADDR"], master_port(env)
    return Placement(
        rank=rank,
        size=size,
        local_rank=integer(env, "LOCAL_RANK"),
        local_size=local_size,
        node=integer(env, "GROUP_RANK", rank // local_size),
        nodes=nodes,
        cores=cores.value,
        address=address,
        port=port,
        launcher=launcher,
        attempt=integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
        job=run_id if several else "",
        reason=spell(env, _NAMES),
        choices=(
            cores,
            Decision(what="address", value=(address,), reason=f"{launcher}: MASTER_ADDR={address}"),
            Decision(what="port", value=(port,), reason=f"{launcher}: MASTER_PORT={port}"),
        ),
    )


def check_outer(env: Mapping[str, str], size: int) -> None:
    """Raise LaunchError if another launcher started this world several times."""
    by_agent = bool(env.get("TORCHELASTIC_RUN_ID"))
    for name in _OUTER:
        # The variables of a batch script do not describe a step.
        outer = integer(env, name, 1) if name[:5] != "SLURM" or env.get("SLURM_STEP_ID") else 1
        if outer > 1 and (by_agent or outer != size):
            raise refuse_many_worlds(
                spell(env, (name, "WORLD_SIZE", "GROUP_WORLD_SIZE")),
                f"{outer} processes were started, and each started {size} ranks for one node only",
                name if name[:5] != "SLURM" else "SLURM_STEP_ID SLURM_STEP_NUM_TASKS",
            )

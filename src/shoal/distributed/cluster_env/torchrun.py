"""torchrun, `shoal run`, and all of their variables set by hand."""

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
"""The run identifier that `shoal run` gives to torch elastic, by which workers know it."""

NODES_RUN_ID = "shoal-run-nodes"
"""What it begins with where they are on several machines, of which only one may be left."""

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Where a launcher around torchrun says how many processes it started.
_OUTER = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def torchrun(env: Mapping[str, str], cpus: int) -> Placement:
    """Placement by torchrun's variables, which torch.distributed.run documents."""
    require(env, _NAMES)
    rank, size = integer(env, "RANK"), integer(env, "WORLD_SIZE")
    local_size = integer(env, "LOCAL_WORLD_SIZE")
    if local_size < 1 or (size % local_size and not env.get("GROUP_WORLD_SIZE")):
        raise LaunchError(
            given=f"WORLD_SIZE={size}, LOCAL_WORLD_SIZE={local_size}",
            found="the world does not divide into machines of that many processes",
            fix="set GROUP_RANK and GROUP_WORLD_SIZE (machine and machines), as torchrun does",
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
    """Raise LaunchError where another launcher started several times what is a whole world here."""
    by_agent = bool(env.get("TORCHELASTIC_RUN_ID"))
    for name in _OUTER:
        # The batch script's variables speak of no step.
        outer = integer(env, name, 1) if name[:5] != "SLURM" or env.get("SLURM_STEP_ID") else 1
        if outer > 1 and (by_agent or outer != size):
            raise refuse_many_worlds(
                spell(env, (name, "WORLD_SIZE", "GROUP_WORLD_SIZE")),
                f"{outer} processes were started, and each started {size} for one machine alone",
                name if name[:5] != "SLURM" else "SLURM_STEP_ID SLURM_STEP_NUM_TASKS",
            )

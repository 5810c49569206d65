"""Variables of a job with two nodes, as its environment sets them on each; sources in the table."""

from __future__ import annotations

from pathlib import Path

# On node `index`, with the first one's address and with two processes on each.
ON_EACH = {
    "Kubeflow Trainer": {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "{index}",
        "PET_MASTER_ADDR": "{first}", "PET_MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": "{index}",
    },
    "SkyPilot": {
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "{index}", "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "SKYPILOT_NODE_IPS": "{first}\n127.9.9.9",
    },
    "dstack": {
        "DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "{index}", "DSTACK_GPUS_PER_NODE": "2",
        "DSTACK_MASTER_NODE_IP": "{first}", "DSTACK_NODES_IPS": "{first}\n127.9.9.9",
    },
    "LeaderWorkerSet": {
        "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "{index}", "LWS_LEADER_ADDRESS": "{first}",
    },
    "AWS Batch": {
        "AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "{index}",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0", "AWS_BATCH_JOB_ATTEMPT": "3",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "{first}",
    },
    "SageMaker": {
        "SM_HOSTS": '["{first}","127.9.9.9"]', "SM_CURRENT_HOST": "{here}", "SM_NUM_GPUS": "2",
    },
    "PAI": {
        "RANK": "{index}", "WORLD_SIZE": "2", "NPROC_PER_NODE": "2", "MASTER_ADDR": "{first}",
        "MASTER_PORT": "29456",
    },
    "Kubernetes": {
        "WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "{index}", "MASTER_ADDR": "{first}",
        "MASTER_PORT": "29456",
    },
    "Volcano (pytorch)": {
        "WORLD_SIZE": "2", "RANK": "{index}", "MASTER_ADDR": "{first}", "MASTER_PORT": "23456",
        "VC_TASK_INDEX": "0", "VC_MASTER_NUM": "1", "VC_WORKER_NUM": "1",
    },
    "Volcano": {
        "VC_WORKER_NUM": "2", "VC_TASK_INDEX": "{index}", "VC_WORKER_HOSTS": "{first},127.9.9.9",
    },
    "HTCondor": {"_CONDOR_NPROCS": "2", "_CONDOR_PROCNO": "{index}", "MASTER_ADDR": "{first}"},
}  # fmt: skip

# On the second host of a job of which the script runs on the first; lines are in a file.
ON_FIRST = {
    "PBS": {"PBS_NODEFILE": "{first}\n{here}\n", "PBS_NODENUM": "{index}"},
    "Grid Engine": {"PE_HOSTFILE": "{first} 4 all.q UNDEFINED\n{here} 4 all.q UNDEFINED\n"},
    "LSF": {"LSB_MCPU_HOSTS": "{first} 1 {here} 1"},
    "OAR": {"OAR_NODEFILE": "{first}\n{first}\n{here}\n"},
}


def variables(
    name: str, index: int, folder: Path, *, first: str = "first", here: str
) -> dict[str, str]:
    """The variables on one node; `here` is its name."""
    env = {}
    for key, value in {**ON_EACH, **ON_FIRST}[name].items():
        env[key] = value.format(index=index, first=first, here=here)
        if value.endswith("\n"):
            (folder / key).write_text(env[key])
            env[key] = str(folder / key)
    return env

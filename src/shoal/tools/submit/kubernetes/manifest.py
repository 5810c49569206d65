"""The JobSet of a job, by pure functions of the job and its paths."""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from shoal.distributed.cluster_env import REQUEUE
from shoal.tools.submit.scheduler import MARK, Job, JobContext, checked, refuse_used
from shoal.util.errors import LaunchError
from shoal.util.python import installed_shoal_command

SET_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""The label of the pods of a JobSet, with its name."""

_checked = partial(checked, "Kubernetes")
_NODE, _DIGEST, _LONGEST, _WAIT = "node", "abcdef", 63, 86400
_LETTERS = "of lowercase letters, digits and dashes"
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?)"
_KEY = rf"(?:{_LABEL}(?:\.{_LABEL})*/)?{_VALUE}"
_VOLUME = rf"{_LABEL}(?:\.{_LABEL})*:/[^:\x00-\x1f]*"

# A rank that got a signal to end before it could save ends with 143.
_TERMINATED = 128 + 15


def render(job: Job, place: JobContext) -> str:
    """Return the JobSet as JSON. Raises LaunchError for values that Kubernetes would reject."""
    text = json.dumps(job_set(job, place), indent=2, ensure_ascii=False) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LaunchError(
            given=f"{error.object[: error.start].splitlines()[-1].strip()}…",
            found="a path or an argument that is not UTF-8, which Kubernetes does not take",
            fix="rename it",
        ) from None
    return text


def job_set(job: Job, place: JobContext) -> dict[str, Any]:
    """Return the JobSet. Its one Job has a pod for each node, in the order of their indices.

    Fields are those of jobset.x-k8s.io/v1alpha2 (JobSet 0.12) and batch/v1.
    """
    _check_supported(job)
    name = _name(job, place)
    metadata: dict[str, Any] = {
        "name": name,
        "annotations": {"kubernetes.io/description": f"{MARK} for the site {job.site}."},
    }
    if job.account is not None:
        metadata["namespace"] = _checked(
            "--account", job.account, _LABEL, f"the name of a namespace, {_LETTERS}"
        )
    if job.partition is not None:
        queue = _checked(
            "--partition", job.partition, _LABEL, f"the name of a queue of Kueue, {_LETTERS}"
        )
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": queue}
    ignored: list[dict[str, Any]] = [
        {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"onExitCodes": {"operator": "In", "values": [REQUEUE, _TERMINATED]}},
    ]
    # Any other failure ends the Job, and the JobSet starts all pods again, or fails.
    one_job = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "activeDeadlineSeconds": max(1, job.time - job.lead),
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", **rule} for rule in ignored if job.requeue]
        },
        "template": {"spec": _pod(job, place, name)},
    }
    late = {"name": "time", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": job.restarts, "rules": [late]},
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": one_job}}],
        },
    }


def _pod(job: Job, place: JobContext, name: str) -> dict[str, Any]:
    mounts = _mounts(job, place)
    # torch's loader workers need more shared memory than the 64 MiB of a container.
    shared = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    claims = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(mounts.values())
    ]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.lead,
        "containers": [_container(job, place, name, mounts)],
        "volumes": [shared, *claims],
    }
    if job.constraint is not None:
        pairs = [
            _checked("--constraint", pair, f"{_KEY}={_VALUE}?", "labels of nodes, as in gpu=a100")
            for pair in job.constraint.split(",")
        ]
        pod["nodeSelector"] = dict(pair.split("=") for pair in pairs)
    return pod


def _container(job: Job, place: JobContext, name: str, mounts: dict[str, str]) -> dict[str, Any]:
    variables = {
        "PYTHONUNBUFFERED": "1",
        **dict(place.variables),
        "WORLD_SIZE": str(job.nodes),
        "MASTER_ADDR": f"{name}-{_NODE}-0-0.{name}",
    }
    if place.python_path:
        variables["PYTHONPATH"] = ":".join(place.python_path)
    if job.ports is not None:
        variables["SHOAL_PORTS"] = job.ports
    # Pods start when their nodes have pulled the image, and a lost one when there is a node for it.
    wait = ["--wait", str(min(job.time, _WAIT))]
    command = installed_shoal_command("run", "-n", str(job.per_node), *wait, python=place.python)
    if not job.container:
        raise LaunchError(
            given=f"no image for the site {job.site}",
            found="pods run the programs of an image",
            fix='pass --container IMAGE, or add image = "IMAGE" to the site\'s file',
        )
    paths = {"shm": "/dev/shm", **{f"volume-{number}": path for number, path in enumerate(mounts)}}
    return {
        "name": "train",
        "image": _checked("--container", job.container, r"\S+", "the name of an image, without spaces"),
        "command": [_literal(word) for word in (*command, place.script, "--", *place.args)],
        "workingDir": place.directory,
        "env": [{"name": key, "value": _literal(value)} for key, value in variables.items()],
        "resources": _resources(job),
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in paths.items()],
    }


def _resources(job: Job) -> dict[str, Any]:
    """Return requests, and limits of what can't be shared. Kueue counts requests."""
    limits: dict[str, str] = {}
    if job.gpus:
        resource = job.gpu_resource or "nvidia.com/gpu"
        _checked("gpu_resource", resource, _KEY, "a resource, as in nvidia.com/gpu")
        limits[resource] = str(job.gpus)
    if job.memory is not None:
        quantity = r"\d+(\.\d+)?([mkMGTPE]|[KMGTPE]i)?"
        limits["memory"] = _checked("--mem", job.memory, quantity, "a quantity, as in 64Gi")
    cpus = {} if job.cpus is None else {"cpu": str(job.cpus * job.per_node)}
    return {"requests": {**cpus, **limits}, "limits": limits}


def _mounts(job: Job, place: JobContext) -> dict[str, str]:
    """Return the claim at each path. Raises LaunchError if a path of the job is in none of them."""
    mounts: dict[str, str] = {}
    for volume in job.volumes:
        _checked("volumes", volume, _VOLUME, "a claim and an absolute path, as in data:/mnt/data")
        claim, _, path = volume.partition(":")
        mounts[path] = claim
    for path in (place.folder, place.script, place.directory):
        if not any(Path(path).is_relative_to(mount) for mount in mounts):
            raise LaunchError(
                given=path,
                found=f"pods have only the volumes of the site {job.site}: "
                f"{', '.join(mounts) or 'it has none'}",
                fix="submit from a directory on a volume that this machine mounts at the same path, or "
                'add the volume to the site\'s file: volumes = ["CLAIM:/PATH"]',
            )
    return mounts


def _name(job: Job, place: JobContext) -> str:
    """Return the name of the JobSet, which differs between submissions.

    JobSet requires that the names of pods are DNS labels: this name, those of the Job and the pod, and
    five random characters.
    """
    digest = hashlib.sha256(f"{place.folder} {job.name}".encode(errors="surrogateescape")).hexdigest()
    name = re.sub(r"[._]", "-", job.name.lower())
    longest = _LONGEST - len(f"-{_DIGEST}-{_NODE}-0-{job.nodes - 1}-abcde")
    pattern = rf"[a-z](?:[-a-z0-9]{{0,{longest - 2}}}[a-z0-9])?"
    what = f"up to {longest} letters, digits and dashes, the first of them a letter"
    return f"{_checked('--name', name, pattern, what)}-{digest[: len(_DIGEST)]}"


def _literal(text: str) -> str:
    """Return a text in which Kubernetes replaces no `$(NAME)`."""
    return text.replace("$", "$$")


def _check_supported(job: Job) -> None:
    """Raise LaunchError for what a JobSet has no form of."""
    leave = "leave it out"
    processes = f"-n {job.processes} on {job.nodes} nodes"
    others: dict[str, tuple[object, str]] = {
        "--qos": (job.qos, leave),
        "--sweep": (job.sweep, leave),
        "--chain": (job.chain > 1, f"{leave}; submit the same run again to resume it"),
        "--stage": (job.stage, leave),
        "--directive": (job.options, leave),
        "shoal bench scaling --submit": (job.turns, leave),
        processes: (
            job.processes != job.nodes * job.per_node,
            f"give each node as many processes: -n {job.nodes * job.per_node}",
        ),
    }
    refuse_used(
        others, "a job of Shoal on Kubernetes is one command, the same in each pod, without this"
    )

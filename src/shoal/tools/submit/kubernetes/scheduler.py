"""Kubernetes: the implementation of the contract of schedulers, by kubectl."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from shoal.tools.submit.commands import SchedulerCommands
from shoal.tools.submit.kubernetes import manifest
from shoal.tools.submit.kubernetes.queue import parse_job_set
from shoal.tools.submit.scheduler import Job, JobContext, QueuedJob, SchedulerProfile

_COMMANDS = SchedulerCommands(
    title="Kubernetes",
    submit="kubectl create",
    ping="kubectl version",
    unreached=re.compile(r"unable to connect to the server|connection to the server", re.IGNORECASE),
    unknown=re.compile("NotFound"),
)
_PODS = 1024


class Kubernetes:
    """Kubernetes with JobSet. The id of a job is NAMESPACE/NAME of its JobSet."""

    profile = SchedulerProfile(
        title="Kubernetes",
        submit_program="kubectl create -f",
        own_program="kubectl",
        launchers=("shoal",),
        signal_delay=0,
        file="jobset.json",
        site_keys=("gpu_resource", "image", "volumes"),
    )

    def render(self, job: Job, place: JobContext) -> str:
        """Return the JobSet as JSON."""
        return manifest.render(job, place)

    def check_available(self) -> None:
        """Raise LaunchError if the server does not answer, or has no JobSets."""
        _COMMANDS.run(["kubectl", "get", "jobsets", "--output=name"])

    def check_queue(self, job: Job) -> None:
        """Raise nothing: a queue of Kueue checks its own limits."""

    def submit(self, script: Path, *, after: str | None) -> str:
        """Create the JobSet."""
        made = _COMMANDS.run(["kubectl", "create", "--output=json", f"--filename={script}"])
        found = json.loads(made)["metadata"]
        return f"{found['namespace']}/{found['name']}"

    def queued(self, jobs: Sequence[str]) -> list[QueuedJob]:
        """Return the JobSets that exist; they stay until they are deleted."""
        found = []
        for job in jobs:
            one = ["jobset", _name(job), "--ignore-not-found"]
            text, pods = (
                _COMMANDS.run(["kubectl", "get", *_namespace(job), "--output=json", *words])
                for words in (one, ["pods", _selector(job)])
            )
            found += [parse_job_set(job, text, pods)] if text.strip() else []
        return found

    def log_command(self, jobs: Sequence[str], files: Sequence[Path], *, follow: bool) -> list[str]:
        """Return the command that prints the logs of the pods."""
        how = [
            "--prefix",
            "--tail=-1",
            f"--max-log-requests={_PODS}",
            *(["--follow"] if follow else []),
        ]
        return ["kubectl", "logs", *_namespace(jobs[-1]), _selector(jobs[-1]), *how]

    def cancel(self, jobs: Sequence[str]) -> None:
        """Delete the JobSets and their pods at once."""
        self._delete(jobs)
        for job in jobs:
            pods = [*_namespace(job), "pods", _selector(job), "--now", "--wait=false"]
            _COMMANDS.run(["kubectl", "delete", *pods])

    def cancel_after_save(self, jobs: Sequence[str], *, signal: str, to_batch: bool) -> None:
        """Delete the JobSets: pods get SIGTERM, and the time that their grace period gives them."""
        self._delete(jobs)

    def _delete(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            one = [*_namespace(job), "jobset", _name(job), "--ignore-not-found", "--wait=false"]
            _COMMANDS.run(["kubectl", "delete", *one])

    def draft_site(self, name: str) -> str:
        """Draft a site file with the claims of the current namespace."""
        claims = json.loads(_COMMANDS.run(["kubectl", "get", "pvc", "--output=json"]))["items"]
        names = [claim["metadata"]["name"] for claim in claims]
        return f"""\
# Drafted by `shoal sites new` from kubectl. Add an image, and the path at which this machine mounts
# each volume.

about = {json.dumps(name)}
scheduler = "kubernetes"
tried = "no job yet; drafted from kubectl"
image = ""
volumes = {json.dumps([f"{claim}:/mnt/{claim}" for claim in names])}
"""


def _namespace(job: str) -> list[str]:
    return [f"--namespace={job.partition('/')[0]}"]


def _name(job: str) -> str:
    return job.partition("/")[2]


def _selector(job: str) -> str:
    return f"--selector={manifest.SET_LABEL}={_name(job)}"

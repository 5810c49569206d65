"""Ray: the implementation of the contract of schedulers, by Ray's own commands for jobs."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.distributed.cluster_env import REQUEUE
from shoal.tools.submit.commands import SchedulerCommands
from shoal.tools.submit.ray import job_file
from shoal.tools.submit.scheduler import Job, JobContext, JobPhase, QueuedJob, SchedulerProfile
from shoal.util.errors import LaunchError
from shoal.util.python import module_command

_COMMANDS = SchedulerCommands(
    title="Ray",
    submit="ray job submit",
    ping="RAY_ADDRESS=http://HEAD:8265 ray list nodes",
    unreached=re.compile(r"failed to connect|could not find any running ray", re.IGNORECASE),
    unknown=re.compile("does not exist|not running"),
)
_PHASES: dict[str, JobPhase] = {"PENDING": "waiting", "RUNNING": "running"}
_DRIVER = "shoal.tools.submit.ray"


class Ray:
    """A cluster of Ray, at Ray's own variable RAY_ADDRESS. The id of a job is its submission id."""

    profile = SchedulerProfile(
        title="Ray",
        submit_program=f"ray job submit --no-wait -- python -m {_DRIVER}",
        own_program="ray",
        launchers=("shoal",),
        signal_delay=5,
        file="ray.json",
        site_keys=(),
    )

    def render(self, job: Job, place: JobContext) -> str:
        """Return the file that the driver reads, as JSON."""
        return job_file.render(job, place)

    def check_available(self) -> None:
        """Raise LaunchError if the cluster does not answer."""
        _listed("nodes")

    def check_queue(self, job: Job) -> None:
        """Raise LaunchError for more nodes than there are with the resources and labels of the job."""
        wanted, labels = job_file.bundle(job), job_file.labels(job)
        wanted.pop("memory", None)
        fitting = [
            node
            for node in _listed("nodes", "state=ALIVE")
            if all(node["resources_total"].get(name, 0) >= count for name, count in wanted.items())
            and labels.items() <= node["labels"].items()
        ]
        if len(fitting) < job.nodes:
            each = ", ".join(f"{name}={count}" for name, count in {**wanted, **labels}.items())
            raise LaunchError(
                given=f"--nodes {job.nodes} with {each} each",
                found=f"Ray has {len(fitting)} such node(s) now",
                fix=f"use --nodes {len(fitting)} or fewer resources"
                if fitting
                else "use fewer resources; if the cluster grows on demand, add --force",
            )

    def submit(self, script: Path, *, after: str | None) -> str:
        """Submit a job whose entrypoint is the driver."""
        values = json.loads(script.read_text())
        name = f"{values['name']}-{secrets.token_hex(4)}"
        driver = module_command(_DRIVER, str(script), python=values["python"])
        _COMMANDS.run(["ray", "job", "submit", "--no-wait", f"--submission-id={name}", "--", *driver])
        return name

    def queued(self, jobs: Sequence[str]) -> list[QueuedJob]:
        """Return the jobs that Ray lists, which are those since its head was started."""
        return [_state(each) for job in jobs for each in _listed("jobs", f"submission_id={job}")]

    def log_command(self, jobs: Sequence[str], files: Sequence[Path], *, follow: bool) -> list[str]:
        """Return the command that prints the output of the driver, which has that of all nodes."""
        return ["ray", "job", "logs", *(["--follow"] if follow else []), jobs[-1]]

    def cancel(self, jobs: Sequence[str]) -> None:
        """Stop the drivers: Ray kills what they have started."""
        for job in jobs:
            _COMMANDS.run(["ray", "job", "stop", "--no-wait", job], known=False)

    def cancel_after_save(self, jobs: Sequence[str], *, signal: str, to_batch: bool) -> None:
        """Do nothing: the driver and the nodes look for the mark of `shoal cancel`."""

    def draft_site(self, name: str) -> str:
        """Draft a site file with the labels of the cluster's nodes."""
        nodes = _listed("nodes", "state=ALIVE")
        known = {f"{key}={value}" for node in nodes for key, value in node["labels"].items()}
        labels = "".join(f"#   {each}\n" for each in sorted(known) if "node-id" not in each)
        return f"""\
# Drafted by `shoal sites new` from {len(nodes)} node(s) of Ray. Labels for --constraint:
{labels}
about = {json.dumps(name)}
scheduler = "ray"
tried = "no job yet; drafted from ray list nodes"
"""


def _listed(what: str, *conditions: str) -> list[dict[str, Any]]:
    """Return what `ray list` prints as JSON; it prints a sentence if there is nothing."""
    filters = [f"--filter={each}" for each in conditions]
    text = _COMMANDS.run(["ray", "list", what, "--format=json", "--detail", "--limit=10000", *filters])
    found: list[dict[str, Any]] = json.loads(text) if text.lstrip().startswith("[") else []
    return found


def _state(job: dict[str, Any]) -> QueuedJob:
    saved = job["driver_exit_code"] == REQUEUE
    message = (job["message"] or "").partition(", last available logs")[0]
    return QueuedJob(
        job=job["submission_id"],
        phase=_PHASES.get(job["status"], "ended"),
        state="saved" if saved else job["status"].lower(),
        reason="submit it again to resume" if saved else message,
    )

"""The file of a job for Ray, which its driver reads: a pure function of the job and its paths."""

from __future__ import annotations

import json
from functools import partial

from shoal.tools.submit.scheduler import MARK, Job, JobContext, checked, refuse_used
from shoal.util.python import installed_shoal_command

_checked = partial(checked, "Ray")
_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
_VALUE = r"[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?"
# Ray's command joins its words into one line for a shell, and quotes them as Windows does.
_WORD = r"[\w@%+=:,./-]+"
_LABEL = rf"(?:{_VALUE}/)?{_VALUE}={_VALUE}"


def render(job: Job, place: JobContext) -> str:
    """Return the file as JSON. Raises LaunchError for values that Ray would reject or not heed."""
    _check_supported(job)
    for given, path in (("--run", place.folder), ("--python", place.python)):
        _checked(given, path, _WORD, "a path of letters, digits and none but these: @%+=:,./-_")
    variables = dict(place.variables)
    if place.python_path:
        variables["PYTHONPATH"] = ":".join(place.python_path)
    if job.ports is not None:
        variables["SHOAL_PORTS"] = job.ports
    if job.cpus is not None:
        variables["OMP_NUM_THREADS"] = str(job.cpus)
    options = ["-n", str(job.per_node), "--restarts", str(job.restarts)]
    values = {
        "about": f"{MARK} for the site {job.site}.",
        "name": _checked(
            "--name", job.name, r"\w[-\w.]*", "letters, digits, dots, dashes, underscores"
        ),
        "python": place.python,
        "nodes": job.nodes,
        "bundle": bundle(job),
        "labels": labels(job),
        "launcher": installed_shoal_command("run", *options, python=place.python),
        "script": [place.script, "--", *place.args],
        "directory": place.directory,
        "variables": {"PYTHONUNBUFFERED": "1", **variables},
        "cancelled": f"{place.folder}/cancelled",
        "seconds": max(1, job.time - job.lead),
        "replacements": job.requeues if job.requeue else 0,
    }
    return json.dumps(values, indent=2) + "\n"


def bundle(job: Job) -> dict[str, int]:
    """Return the resources of a node, as of a bundle of a placement group."""
    found = {"CPU": job.per_node * (job.cpus or 1)}
    if job.gpus:
        found["GPU"] = job.gpus
    if job.memory is not None:
        text = _checked("--mem", job.memory, r"\d+[KMGT]", "a number and a unit, as in 64G")
        found["memory"] = int(text[:-1]) * 1024 ** _UNITS[text[-1]]
    return found


def labels(job: Job) -> dict[str, str]:
    """Return the labels that nodes must have."""
    what = "labels of nodes, as in ray.io/accelerator-type=A100"
    pairs = job.constraint.split(",") if job.constraint is not None else []
    return dict(_checked("--constraint", pair, _LABEL, what).split("=") for pair in pairs)


def _check_supported(job: Job) -> None:
    """Raise LaunchError for what a job of Ray has no form of."""
    leave = "leave it out"
    others: dict[str, tuple[object, str]] = {
        "--partition": (
            job.partition,
            'choose nodes by --constraint; in the site\'s file, add option = "" to the partition',
        ),
        "--qos": (job.qos, leave),
        "--account": (job.account, leave),
        "--sweep": (job.sweep, leave),
        "--chain": (job.chain > 1, f"{leave}; submit the same run again to resume it"),
        "--stage": (job.stage, leave),
        "--container": (job.container, "start Ray in that image"),
        "--directive": (job.options, leave),
        "shoal bench scaling --submit": (job.turns, leave),
        f"-n {job.processes} on {job.nodes} nodes": (
            job.processes != job.nodes * job.per_node,
            f"give each node as many processes: -n {job.nodes * job.per_node}",
        ),
    }
    refuse_used(others, "a job of Shoal on Ray is one command, the same on each node, without this")

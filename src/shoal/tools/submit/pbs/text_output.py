"""The output of PBS's commands: jobs, limits of queues, and a site file drafted from it.

As JSON it is invalid in many versions, above all with the environment of `qsub -V` (OpenPBS, issues
1255 and 2541).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from shoal.tools.submit.scheduler import JobPhase, QueuedJob
from shoal.tools.submit.times import spell_time
from shoal.util.errors import LaunchError

_ATTRIBUTE = re.compile(r"^ +([\w.]+) = (.*)$", re.MULTILINE)
# Comments of the scheduler and of the server, by prefix, and what they mean.
_NEVER = {
    "Can Never Run": "PBS has no such resources now",
    "job held, too many failed attempts": "PBS could not start it; submit it again",
}


def parse_objects(text: str, kind: str) -> dict[str, dict[str, str]]:
    """Return the attributes of objects by name; each begins with a line of its `kind` and name."""
    _, *parts = re.split(rf"^{kind}(\S+)$", text, flags=re.MULTILINE)
    found = (_ATTRIBUTE.findall(part.replace("\n\t", "")) for part in parts[1::2])
    # A line within a value, such as a variable of the environment, may look like an attribute.
    return {name: dict(reversed(each)) for name, each in zip(parts[::2], found, strict=True)}


def parse_queue(text: str) -> Iterator[QueuedJob]:
    """Yield the jobs, and the elements of arrays, in the output of `qstat -f -t`."""
    for name, job in parse_objects(text, "Job Id: ").items():
        if "[]" in name:  # an array, which is listed with its elements
            continue
        # qstat(1B), "Job States": E is exiting, U and S are suspended; others wait, are held or moved.
        state, comment = job.get("job_state", "?"), job.get("comment", "").strip()
        phase: JobPhase = "running" if state in "ERSU" else "ended" if state in "FX" else "waiting"
        yield QueuedJob(
            job=name,
            phase=phase,
            state=state,
            ran=job.get("resources_used.walltime", ""),
            limit=job.get("Resource_List.walltime", ""),
            reason=job.get("exec_host", comment),
            never_starts=next((_NEVER[text] for text in _NEVER if comment.startswith(text)), ""),
        )


def queue_limits(queue: dict[str, str]) -> tuple[float, float]:
    """Return the seconds and nodes that a queue allows a job; infinite if it has no limit."""
    text, nodes = (queue.get(f"resources_max.{name}", "") for name in ("walltime", "nodect"))
    parts = text.split(":") if re.fullmatch(r"\d+(:\d+)*", text) else []
    time = sum(int(part) * 60**place for place, part in enumerate(reversed(parts)))
    return time or math.inf, float(nodes) if nodes.isdecimal() else math.inf


def draft_text(name: str, queues: str, nodes: str) -> str:
    """Return the TOML text of a site. Raises LaunchError if there is no queue that accepts jobs.

    `queues` is the output of `qstat -Qf`, `nodes` that of `pbsnodes -a`.
    """
    usable = {
        queue: said
        for queue, said in parse_objects(queues, "Queue: ").items()
        if said.get("enabled") == "True" and said.get("from_route_only") != "True"
    }
    if not usable:
        raise LaunchError(
            given="qstat -Qf",
            found=f"no queue that accepts jobs in its output: {queues.strip()[:200]!r}",
            fix="check `qstat -Q`, or write the file by hand",
        )
    return "\n".join(_lines(name, usable, parse_objects(nodes, ""))) + "\n"


def _lines(
    name: str, queues: dict[str, dict[str, str]], nodes: dict[str, dict[str, str]]
) -> Iterator[str]:
    yield "# Drafted by `shoal sites new` from qstat and pbsnodes. Check it: PBS does not say which"
    yield "# nodes a queue uses, so each queue has the largest nodes here. mpirun may need more words:"
    yield '# mpirun = ["mpiexec", "--ppn", "{per_node}"] on HPE Cray.'
    yield ""
    yield f"about = {json.dumps(name)}"
    yield 'scheduler = "pbs"'
    yield 'tried = "no job yet; drafted from qstat"'
    if len(queues) == 1:
        yield f"default = {json.dumps(*queues)}"
    for queue, said in queues.items():
        there = [node for node in nodes.values() if node and node.get("queue", queue) == queue]
        cores, gpus = (
            max((int(number) for number in numbers if number.isdecimal()), default=0)
            for numbers in (
                [node.get(f"resources_available.{key}", "") for node in there]
                for key in ("ncpus", "ngpus")
            )
        )
        time, most = queue_limits(said)
        yield ""
        yield f"[partitions.{json.dumps(queue)}]"
        yield f"nodes = {min(len(there), most):.0f}"
        yield f"gpus = {gpus}"
        yield f"cores = {cores}"
        if gpus:
            yield f"cpus_per_gpu = {max(1, cores // gpus)}"
        if time < math.inf:
            yield f"time = {json.dumps(spell_time(int(time)))}"

"""A site file drafted from the output of Grid Engine's commands, by pure functions of text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from shoal.tools.submit.gridengine.queue import parse_attributes
from shoal.util.errors import LaunchError


def draft_text(name: str, instances: str, queues: Mapping[str, str]) -> str:
    """Return the TOML text of a site. Raises LaunchError if there is no queue with nodes.

    `instances` is the output of `qstat -f`, `queues` the output of `qconf -sq` for each queue.
    """
    slots: dict[str, list[int]] = {}
    for queue, count in re.findall(r"^(\S+)@\S+ +\S+ +\d+/\d+/(\d+) ", instances, re.MULTILINE):
        slots.setdefault(queue, []).append(int(count))
    if not slots:
        raise LaunchError(
            given="qstat -f",
            found=f"no queue with nodes in its output: {instances.strip()[:200]!r}",
            fix="check `qstat -f`, or write the file by hand",
        )
    return "\n".join(_lines(name, slots, queues)) + "\n"


def _lines(name: str, slots: dict[str, list[int]], queues: Mapping[str, str]) -> Iterator[str]:
    yield "# Drafted by `shoal sites new` from qstat and qconf. Check it, above all the parallel"
    yield "# environments: one places a job on several nodes if its allocation rule is a number."
    yield ""
    yield f"about = {json.dumps(name)}"
    yield 'scheduler = "gridengine"'
    yield 'tried = "no job yet; drafted from qconf"'
    if len(slots) == 1:
        yield f"default = {json.dumps(*slots)}"
    for queue, counts in slots.items():
        said = parse_attributes(queues.get(queue, ""))
        environments = [
            each for each in said.get("pe_list", "").split() if each not in ("NONE", "make")
        ]
        yield ""
        yield f"[partitions.{json.dumps(queue)}]"
        yield f"nodes = {len(counts)}"
        yield f"cores = {max(counts)}"
        if re.fullmatch(r"\d+:\d+:\d+", said.get("h_rt", "")):
            yield f"time = {json.dumps(said['h_rt'])}"
        if environments:
            yield f"# Its parallel environments: {', '.join(environments)}."
            yield f"parallel_environment = {json.dumps(environments[0])}"

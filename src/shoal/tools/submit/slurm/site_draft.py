"""A site file drafted from the output of Slurm's commands, by pure functions of text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.tools.submit.times import spell_time
from shoal.util.errors import LaunchError

SINFO = ["sinfo", "--noheader", "--format=%R|%l|%c|%G|%D|%z"]
"""For each partition and kind of node: name, time limit, CPUs, GPUs, nodes, sockets:cores:threads."""
CONFIG = ["scontrol", "show", "config"]

_LONGEST_KILL = 30


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Nodes of one kind in a partition. `cores` are physical cores."""

    partition: str
    time: int | None
    cpus: int
    cores: int
    gpus: int
    nodes: int


def parse_node_kinds(text: str) -> list[NodeKind]:
    """Return the kinds of nodes that `SINFO` printed; lines in another form are skipped."""
    found = []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 6 or not parts[4].isdecimal():
            continue
        name, limit, cpus, gres, nodes, shape = parts
        gpu = re.search(r"\bgpu(?::(\w[^:,(]*))?:(\d+)(?=[(,]|$)", gres)
        form = [int(part) for part in re.findall(r"\d+", shape)]
        count = int(re.sub(r"\D", "", cpus) or 1)
        found.append(
            NodeKind(
                partition=name,
                time=parse_limit(limit),
                cpus=count,
                cores=form[0] * form[1] if len(form) == 3 else count,
                gpus=int(gpu[2]) if gpu else 0,
                nodes=int(nodes),
            )
        )
    return found


def draft_text(name: str, sinfo: str, config: str) -> str:
    """Return the TOML text of a site. Raises LaunchError if Slurm listed no partition."""
    kinds = parse_node_kinds(sinfo)
    if not kinds:
        raise LaunchError(
            given=" ".join(SINFO),
            found=f"no partition in its output: {sinfo.strip()[:200]!r}",
            fix="check `sinfo`, or write the file by hand: `shoal sites show jean-zay` is an example",
        )
    return "\n".join(_lines(name, kinds, config)) + "\n"


def _lines(name: str, kinds: list[NodeKind], config: str) -> Iterator[str]:
    said = dict(re.findall(r"^(\w+)\s*= (.*?)\s*$", config, re.MULTILINE))
    cluster = said.get("ClusterName", name)
    yield f"# Drafted by `shoal sites new {_comment(name)}` from sinfo and scontrol. Check it: your"
    yield "# centre's documentation has more, such as cores per GPU, accounts and QoS."
    yield ""
    yield f"about = {json.dumps(cluster)}"
    yield 'tried = "no job yet; drafted from sinfo"'
    yield f"# JobRequeue = {_comment(said.get('JobRequeue', 'unknown'))}"
    yield f"requeue = {'false' if said.get('JobRequeue') == '0' else 'true'}"
    wait = re.match(r"\d+", said.get("KillWait", ""))
    if wait and int(wait[0]) != _LONGEST_KILL:
        yield f"# After SIGTERM, Slurm waits {wait[0]} s before it kills."
    if any(kind.cpus > kind.cores for kind in kinds):
        yield "# Its nodes have more threads than cores."
        yield "multithread = false"
    names = list(dict.fromkeys(kind.partition for kind in kinds))
    if len(names) == 1:
        yield f"default = {json.dumps(names[0])}"
    for partition in names:
        yield ""
        yield from _partition(partition, [kind for kind in kinds if kind.partition == partition])


def _partition(name: str, kinds: list[NodeKind]) -> Iterator[str]:
    # The minimum over its nodes, so that a job fits on each.
    largest = max(kinds, key=lambda kind: (kind.gpus, kind.cores))
    alike = len({(kind.gpus, kind.cores) for kind in kinds}) == 1
    if not alike:
        yield "# Nodes differ; these are the largest."
    yield f"[partitions.{json.dumps(name)}]"
    yield f"nodes = {sum(kind.nodes for kind in kinds)}"
    yield f"gpus = {largest.gpus}"
    yield f"cores = {largest.cores}"
    if largest.gpus:
        yield f"cpus_per_gpu = {max(1, largest.cores // largest.gpus)}"
    times = [kind.time for kind in kinds if kind.time is not None]
    if times:
        yield f"time = {json.dumps(spell_time(max(times)))}"


def parse_limit(text: str) -> int | None:
    """Return the seconds of a limit as sinfo writes it, [D-]HH:MM:SS or MM:SS; None for infinite."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _comment(text: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", text)

"""The machine, the choices of `shoal.init` and their reasons: `shoal info`, alone or in a launch."""

from __future__ import annotations

import platform
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from shoal.distributed import env_vars
from shoal.distributed.init import init
from shoal.distributed.speed_hints import facts_of, speed_hints
from shoal.distributed.world import World
from shoal.tools.doctor.checks.host import describe_cores, describe_memory
from shoal.tools.doctor.findings import RankFacts, describe_difference
from shoal.util.decision import Decision
from shoal.util.differences import differences, spans
from shoal.util.document import Document, DocumentBlock, KeyNumbers, Section, Table, Text
from shoal.util.errors import ShoalError
from shoal.util.tables import print_document
from shoal.util.units import binary_size

if TYPE_CHECKING:
    from rich.console import Console

EXTRAS = ("metrics", "tensorboard", "wandb", "hf", "remote", "mpi", "gpu")
"""Extras of Shoal that add something to a script; the others are for its development."""

PROGRAMS = ("torchrun", "srun", "mpirun", "mpiexec", "jsrun", "flux")

_VERSION_SECONDS = 2.0


def machine_facts() -> list[KeyNumbers]:
    """Return the hardware and software of this machine; it takes a fraction of a second."""
    system = [("system", platform.platform()), ("host", socket.gethostname())]
    programs = [(name, whose) for name in PROGRAMS if (whose := _whose(name))]
    return [
        KeyNumbers(caption="Versions", pairs=[*versions().items(), *system]),
        KeyNumbers(caption="Hardware, as this process may use it", pairs=_hardware()),
        KeyNumbers(caption="Optional packages", pairs=list(packages())),
        KeyNumbers(
            caption="Launchers on PATH",
            pairs=programs or [("none", "shoal run -n N SCRIPT needs none")],
        ),
    ]


def versions() -> dict[str, str]:
    """Return versions of Shoal, Python and torch, which should be the same on all ranks."""
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    if torch.version.hip:
        built = f"ROCm {torch.version.hip}"
    return {
        "Shoal": _installed("shoal") or "not installed",
        "Python": platform.python_version(),
        "torch": f"{torch.__version__}, built for {built}",
    }


def _hardware() -> list[tuple[str, str]]:
    cores, memory = describe_cores(), describe_memory()
    free, total, ceiling = memory["available"], memory["total"], memory["ceiling"]
    rows = [
        ("cores", f"{len(cores['affinity'])} in the affinity of {cores['total']}"),
        ("memory", f"{binary_size(free)} free of {binary_size(total)}"),
    ]
    if cores["quota"] is not None:
        rows.append(("CPU limit", f"{cores['quota']:g} core(s), by the cgroup"))
    if ceiling is not None and ceiling < total:
        rows.append(("memory limit", f"{binary_size(ceiling)}, by the cgroup"))
    rows += [(f"GPU {index}", gpu(index)) for index in range(torch.cuda.device_count())]
    if torch.cuda.device_count():
        rows.append(
            ("step results", "one step late with a fused optimizer, which saves a wait; else now")
        )
        hints = speed_hints(facts_of(torch.device("cuda", 0)))
        rows += [("off, and faster", hint) for hint in hints]
    else:
        rows.append(("GPUs", "none visible to torch"))
    return rows + list(env_vars.visible_devices().items())


def gpu(index: int) -> str:
    """Return the name and the memory of a visible GPU."""
    found = torch.cuda.get_device_properties(index)
    return f"{found.name}, {binary_size(found.total_memory)}"


def packages(requirements: Iterable[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield each optional package with its version, or with the command that installs it.

    `requirements` are in the format of package metadata. Default: those of Shoal.
    """
    if requirements is None:
        requirements = []
        with suppress(metadata.PackageNotFoundError):
            requirements = metadata.requires("shoal") or []
    for text in requirements:
        wanted, _, marker = (part.strip() for part in text.partition(";"))
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", marker)
        if extra is None or extra[1] not in EXTRAS:
            continue
        name = re.split(r"[^\w.-]", wanted)[0]
        yield name, _installed(name) or f"not installed: pip install '{wanted}'"


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _whose(program: str) -> str:
    """Return the path of a launcher on PATH and its maker; empty if there is none."""
    path = shutil.which(program)
    if path is None:
        return ""
    if program == "torchrun":  # it would import torch to print its version
        return path
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return f"{path}, which does not print its version"
    return f"{path}, {maker(done.stdout)}"


def maker(said: str) -> str:
    """Return the maker of a launcher, from its output with `--version`."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        return "which does not print its version"
    hydra = re.search(r"^\s*Version:\s*(\S+)", said, re.MULTILINE)
    if "hydra" in lines[0].lower() and hydra:
        return f"Hydra (MPICH) {hydra[1]}"
    return lines[0]


MOST_ROWS = 32
"""Up to this number, each rank has a row; with more, each machine has one."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One rank's information about itself."""

    local_rank: int
    cores: int
    threads: int
    device: str
    versions: Mapping[str, str]


def gather(world: World) -> list[RankFacts[RankInfo]]:
    """Return all ranks, in their order, on every rank."""
    device = str(world.device)
    if world.device.type == "cuda":
        device += f" ({gpu(world.device.index)})"
    mine = RankInfo(
        local_rank=world.placement.local_rank,
        cores=world.placement.cores,
        threads=torch.get_num_threads(),
        device=device,
        versions=versions(),
    )
    own = RankFacts(rank=world.rank, host=socket.gethostname(), facts=mine)
    return list(world.gather(own))


def rows(ranks: Sequence[RankFacts[RankInfo]]) -> list[tuple[str, str, str, str, str, str]]:
    """Return rank, host, local rank, cores, threads and device, by rank or, for many, by machine."""
    if len(ranks) <= MOST_ROWS:
        groups = [[one] for one in ranks]
    else:
        by_host = sorted(ranks, key=lambda one: one.host)
        groups = [list(group) for _, group in groupby(by_host, lambda one: one.host)]
        groups.sort(key=lambda group: group[0].rank)
    return [
        (
            spans([one.rank for one in group]),
            group[0].host,
            spans([one.facts.local_rank for one in group]),
            _each([str(one.facts.cores) for one in group]),
            _each([str(one.facts.threads) for one in group]),
            _each([one.facts.device for one in group]),
        )
        for group in groups
    ]


def _each(values: Sequence[str]) -> str:
    counts = Counter(values)
    if len(counts) == 1:
        return values[0] if len(values) == 1 else f"{values[0]} each"
    return ", ".join(f"{value} x{times}" if times > 1 else value for value, times in counts.items())


def version_differences(ranks: Sequence[RankFacts[RankInfo]]) -> Iterator[str]:
    """Yield a line for each version that is not the same on all ranks, with the ranks that differ."""
    for found in differences([one.facts.versions for one in ranks]):
        yield f"{found.name} differs: {describe_difference(found, ranks)}"


JOIN_SECONDS = 60.0
"""How long the ranks of a launch wait for each other; it can be short, as no rank prepares data."""


def print_info(console: Console) -> None:
    """Join the world that a launcher started, and print on rank 0 its settings and their reasons.

    If the environment contradicts itself or the world can't be formed, print the information that is
    available and raise the ShoalError.
    """
    try:
        placement = env_vars.placement()
    except ShoalError:
        print_document(console, info_document(launchers=env_vars.launcher_variables()))
        raise
    decisions: Sequence[Decision[object]] = placement.choices
    ranks: list[RankFacts[RankInfo]] = []
    try:
        with init(prepare_timeout=JOIN_SECONDS, alone=True) as world:
            ranks, decisions = gather(world), world.decisions
    finally:
        if placement.rank == 0:
            print_document(console, info_document(decisions=decisions, ranks=ranks))


def info_document(
    *,
    launchers: Mapping[str, str] | None = None,
    decisions: Sequence[Decision[object]] = (),
    ranks: Sequence[RankFacts[RankInfo]] = (),
) -> Document:
    """Return this machine, then what is known of a launch.

    `launchers` are the launchers in the order of detection, each with its variables that are set,
    `decisions` those of rank 0.
    """
    blocks: list[DocumentBlock] = list(machine_facts())
    if launchers is not None:
        caption = "Launchers, in the order of detection, and their variables here"
        pairs = [(name, found or "none") for name, found in launchers.items()]
        blocks.append(KeyNumbers(caption=caption, pairs=pairs))
    blocks.append(decisions_table(decisions))
    if len(ranks) > 1:
        head = ("rank", "host", "local", "cores", "threads", "device")
        blocks.append(Table(caption=f"{len(ranks)} ranks", head=head, rows=rows(ranks)))
        same = "Shoal, Python and torch are the same on all ranks."
        blocks += [Text(text=line) for line in list(version_differences(ranks)) or [same]]
    return Document(title="shoal info", sections=[Section(blocks=blocks)])


def decisions_table(made: Sequence[Decision[object]]) -> Table:
    """Return each decision with its reason and the rejected alternatives."""
    lines = []
    for choice in made:
        lines.append((choice.what, _spelled(choice.value), choice.reason))
        lines += [("", "", f"not {name}: {why}") for name, why in choice.rejected.items()]
    head = ("setting", "chosen", "reason, and rejected alternatives")
    return Table(caption="Decisions and their reasons (on rank 0)", head=head, rows=lines)


def _spelled(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_spelled, value)) or "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)

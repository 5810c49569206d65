"""Checks before training that all ranks have the same code, packages and data."""

from __future__ import annotations

import hashlib
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shoal.util.differences import and_more, differences, spans
from shoal.util.errors import AgreementError
from shoal.util.packages import packages

if TYPE_CHECKING:
    from shoal.distributed.world import World


class _Comparison:
    """State of a World: whether its ranks have compared their environments."""

    def __init__(self, world: World) -> None:
        self.done = False

    def close(self) -> None:
        """Do nothing; see `Service`."""


def check_same_environment(world: World) -> None:
    """Raise AgreementError on all ranks if environments differ, with rank, host and difference.
    Collective.

    It runs once per World. It compares Python, torch, the script with the modules in and below its
    folder and, between nodes, all installed packages (which takes a tenth of a second).
    """
    comparison = world.service(_Comparison)
    if world.size == 1 or comparison.done:
        return
    comparison.done = True
    facts = {"Python": platform.python_version(), "torch": str(torch.__version__), **sources()}
    if world.placement.nodes > 1:
        facts |= {f"the package {name}": version for name, version in packages().items()}
    # One digest is enough if all are equal; names and versions are sent only if they differ.
    if len(set(world.gather(_digest(repr(sorted(facts.items())))))) > 1:
        compare(world, facts)


def check_same_data(world: World, loader: Mapping[str, object]) -> None:
    """Raise AgreementError on all ranks if the state of a loader differs between them."""
    facts = {f"the loader's {key}": str(value) for key, value in loader.items()}
    compare(
        world,
        facts,
        fix="generate data before shoal.parallelize, which seeds the global generators of Python, "
        "NumPy and torch by rank, or with torch.Generator().manual_seed(0); or read the same file on "
        "all ranks",
    )


def warn_of_other_arrays(world: World, arrays: Mapping[str, str]) -> None:
    """Print a warning if the arrays of a dataset differ between ranks. Collective.

    It is a warning and not an error, since an array may be a buffer that each rank fills on its own.
    """
    if world.size == 1:
        return
    for found in differences(world.gather(dict(arrays))):
        ranks = sorted(rank for others in found.others.values() for rank in others)
        world.print(
            f"shoal: the dataset's {found.name} differs between ranks (rank {spans(ranks)}): all ranks "
            "need the same dataset, since the Loader splits it; generate it before "
            "shoal.parallelize, or with torch.Generator().manual_seed(0)"
        )
        return


def compare(world: World, facts: Mapping[str, str], *, fix: str | None = None) -> None:
    """Raise AgreementError for the first of `facts` that is not the same on all ranks."""
    ranks = world.gather((socket.gethostname(), dict(facts)))
    for found in differences([facts for _, facts in ranks]):
        value, (odd, *_) = next(iter(found.others.items()))
        differing = sorted(rank for group in found.others.values() for rank in group)
        raise AgreementError(
            given=f"{found.name}: {found.usual} on {found.times} of {len(ranks)} ranks",
            found=f"{value} on rank {odd} ({ranks[odd][0]}){and_more(differing)}",
            fix=fix
            or "start all ranks with the same script in the same environment "
            f"(compare `pip list` and `git status` on {ranks[odd][0]} and elsewhere)",
        )


def sources() -> dict[str, str]:
    """Return the digests of the script and of the modules loaded from its folder or below."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return {}
    folder = Path(main).absolute().parent
    inside = tuple(str(path.absolute()) for path in (Path(sys.prefix), Path(__file__).parents[1]))
    paths = {Path(main).absolute()}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        # There are thousands of modules: compare strings, without a system call for each file.
        if file.startswith(f"{folder}/") and file.endswith(".py") and not file.startswith(inside):
            paths.add(Path(file))
    return {
        f"the source {path.relative_to(folder)}": _digest(path.read_bytes())
        for path in sorted(paths)
        if path.is_file()
    }


def _digest(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:12]

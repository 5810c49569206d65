"""`shoal.add_launcher`: launchers that Shoal does not know."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.distributed.cluster_env import ADDED, LAUNCHERS, ClusterEnvironment, place_rank
from shoal.distributed.placement import LAST_PORT, Placement, require
from shoal.util.errors import LaunchError

Source = str | Callable[[Mapping[str, str]], object]
"""The name of a variable, or a function that returns the value, given the environment."""


def add_launcher(
    name: str, *, rank: str, size: Source, address: Source, port: Source, local_rank: Source = ""
) -> None:
    """Let `shoal.init` detect a launcher that Shoal does not know, by its environment variables.

    Call it on every rank before `shoal.init`. It replaces an added launcher with the same name.
    torchrun and `shoal run` are detected before it, since it may start them, all others after it.
    MASTER_ADDR and MASTER_PORT take precedence if they are set.

    Args:
        name: Name of the launcher, for `World.decisions` and messages.
        rank: Variable with the rank of the process, from 0. The launcher is detected by it.
        size: Variable with the world size, or a function that returns it, given the environment.
        address: The same for the host name or IP address of rank 0.
        port: The same for a port that is free on that host.
        local_rank: The same for the rank on the node, from 0. Default: `""`: ranks are numbered by
            their hosts, which they exchange.

    Raises:
        LaunchError: If Shoal knows the launcher, or an argument is neither a name nor a function.
            `shoal.init` raises it for variables that are missing or contradict each other.

    Examples:
        >>> shoal.add_launcher(
        ...     "acme",
        ...     rank="ACME_RANK",
        ...     size="ACME_TASKS",
        ...     address=lambda env: env["ACME_HOSTS"].split(",")[0],
        ...     port=lambda env: 10001 + int(env["ACME_JOB"]) % 10000,
        ... )
    """
    known = {part for one in LAUNCHERS for part in re.split(r" \(|, |\)", one.name)} | {"none"}
    named = isinstance(name, str) and name
    if not named or name in known:
        raise LaunchError(
            given=f"shoal.add_launcher({name!r}, …)",
            found="a launcher that Shoal knows" if named else "not a name",
            fix="pass another name; shoal.init detects those of Shoal without this call",
        )
    sources = {"rank": rank, "size": size, "address": address, "port": port}
    sources |= {"local_rank": local_rank} if local_rank != "" else {}
    for what, source in sources.items():
        if not (isinstance(source, str) and source) and (what == "rank" or not callable(source)):
            raise LaunchError(
                given=f"shoal.add_launcher({name!r}, {what}={source!r})",
                found=f"{what} is not the name of a variable" + " or a function" * (what != "rank"),
                fix=f'pass {what}="{re.sub("[^A-Z0-9]", "_", name.upper())}_{what.upper()}"',
            )
    ADDED[:] = [one for one in ADDED if one.name != name]
    ADDED.append(
        ClusterEnvironment(
            name=name,
            marks=(rank,),
            why_here="after torchrun and shoal run, which it may start, and before all others",
            source="shoal.add_launcher",
            read=lambda env, cpus, _: _place(name, sources, env, cpus),
        )
    )


@dataclass(frozen=True)
class _Argument:
    """The value of an argument of `add_launcher` in one environment.

    `label` is the variable that has it, or the argument itself if a function returned it.
    """

    what: str
    label: str
    text: str

    def __str__(self) -> str:
        return f"{self.label}={self.text}"

    def integer(self, least: int, most: int = 2**31 - 1) -> int:
        """Return it as an integer within limits. Raises LaunchError."""
        if self.text.isdecimal() and least <= int(self.text) <= most:
            return int(self.text)
        raise LaunchError(
            given=str(self),
            found=f"{self.what} is not an integer from {least} to {most}",
            fix=f"correct {self.label}, or {self.what}=… of shoal.add_launcher",
        )


def _place(
    launcher: str, sources: Mapping[str, Source], env: Mapping[str, str], cpus: int
) -> Placement:
    """Return the placement of a process that an added launcher started. Raises LaunchError."""
    require(env, tuple(each for each in sources.values() if isinstance(each, str)))
    values = {what: _find(launcher, what, source, env) for what, source in sources.items()}
    rank, size = values["rank"].integer(0), values["size"].integer(1)
    return place_rank(
        env,
        cpus,
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=values["local_rank"].integer(0) if "local_rank" in values else None,
        address=values["address"].text,
        port=values["port"].integer(1, LAST_PORT),
        sources=(str(values["address"]), str(values["port"])),
        reason=", ".join(map(str, values.values())),
    )


def _find(launcher: str, what: str, source: Source, env: Mapping[str, str]) -> _Argument:
    own = {"address": "MASTER_ADDR", "port": "MASTER_PORT"}.get(what, "")
    label = own if env.get(own) else what if callable(source) else source
    if not callable(source) or label == own:
        return _Argument(what, label, env[label])
    try:
        return _Argument(what, label, str(source(env)))
    except Exception as error:
        raise LaunchError(
            given=f"shoal.add_launcher({launcher!r}, {what}=…)",
            found=f"the function raised {error!r}",
            fix="let it return a value for each process of this launcher",
        ) from error

"""A real Slurm cluster on one machine: each node is a slurmd in namespaces of its own.

Needs root, slurmctld, slurmd, munged and iproute2. `scripts/slurm-cluster` has one as commands.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from helpers.cluster import files
from helpers.cluster.nodes import NodeCluster, missing_programs, wait_for

# Slurm's plugin for PMIx opens a name that only the development package has.
_PMIX = """[ -d "$1/pmix" ] && mount --bind "$1/pmix" {pmix}"""


def missing() -> str:
    """What this machine lacks for a cluster, in words; empty if nothing."""
    return missing_programs("slurmctld", "slurmd", "munged")


class Cluster(NodeCluster):
    """A cluster of Slurm. A node that is silent for `silence` seconds counts as down; Slurm looks
    every few seconds. `settings` are more lines of slurm.conf.
    """

    mounts = _PMIX.format(pmix=files.PMIX)

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 4,
        silence: int = 10,
        settings: str = "",
        prefix: str | None = None,
    ) -> None:
        super().__init__(folder, nodes=nodes, prefix=prefix)
        self._silence, self._settings = silence, settings

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": self._conf}

    @property
    def daemon(self) -> Sequence[str]:
        return ["slurmd", "-D", "-f", self._conf]

    def queue(self) -> str:
        return self.run(["squeue", "--noheader"]).stdout

    def kill_slurmd(self, node: str) -> None:
        """Kill the daemon of a node alone; what it has started goes on."""
        self.kill_program(node, "slurmd")

    def revive_slurmd(self, node: str) -> None:
        """Start the daemon of a node again."""
        daemon = self.inside(node, ["slurmd", "-f", self._conf])
        subprocess.run(daemon, env=self.environment(), check=True, capture_output=True)

    def _begin(self) -> None:
        files.write(self.folder, self.nodes, silence=self._silence, settings=self._settings)
        self.name_hosts()
        self.network.create()
        munge = self.folder / "munge"
        named = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        named |= {"log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={munge / name}" for option, name in named.items()]
        self._spawn("munged", ["munged", "--foreground", "--force", *options])
        wait_for((munge / "socket").exists, "munged")
        self._start("ctl", ["slurmctld", "-D", "-c", "-f", self._conf])
        for node in self.nodes:
            self.revive(node)

    def _idle(self) -> set[str]:
        with suppress(IndexError, OSError):  # the login node is only just being made
            return set(self.run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%n"]).stdout.split())
        return set()

    @property
    def _conf(self) -> str:
        return str(self.folder / "slurm.conf")

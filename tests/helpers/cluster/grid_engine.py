"""A real Grid Engine cluster on one machine: each node is an sge_execd in namespaces of its own.

Needs root, gridengine-master and gridengine-exec of Debian, and iproute2.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from helpers.cluster import files
from helpers.cluster.nodes import NodeCluster, missing_programs, wait_for

SLOTS = 8
"""Of each node."""

_ROOT = Path("/var/lib/gridengine")
_PROGRAMS = Path("/usr/lib/gridengine")
_SHARE = Path("/usr/share/gridengine")

_BOOTSTRAP = """
admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {folder}/default/common;{folder}/qmaster
binary_path {folder}/bin
qmaster_spool_dir {folder}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
_HOST = "hostname {node}\nload_scaling NONE\ncomplex_values NONE\nuser_lists NONE\nxuser_lists NONE\n"
_HOST += "projects NONE\nxprojects NONE\nusage_scaling NONE\nreport_variables NONE\n"
_GROUP = "group_name @allhosts\nhostlist {nodes}\n"


def missing() -> str:
    """What this machine lacks for a cluster, in words; empty if nothing."""
    return missing_programs("sge_qmaster", "sge_execd", "qsub")


class GridEngine(NodeCluster):
    """A cluster of Grid Engine, whose queue is all.q.

    A node that is silent for `silence` seconds counts as unknown, and its jobs start again 5 s later.
    `environments` are the parallel environments and their allocation rules, `queue` has attributes of
    the queue.
    """

    daemon = ("env", "SGE_ND=1", "sge_execd")

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 3,
        silence: int = 10,
        environments: Mapping[str, str] | None = None,
        queue: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, nodes=nodes, prefix=None)
        self._silence = silence
        self._environments, self._queue = environments or {}, queue or {}

    @property
    def variables(self) -> dict[str, str]:
        ports = {"SGE_QMASTER_PORT": "6444", "SGE_EXECD_PORT": "6445"}
        return {"SGE_ROOT": str(self.folder), "SGE_CELL": "default", **ports}

    def ask(self, *command: str) -> str:
        """Run a command of Grid Engine on the login node and return its output."""
        done = self.run(command)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def queue(self) -> str:
        return self.run(["qstat", "-u", "*"]).stdout

    def add_queue(self, name: str, values: Mapping[str, str]) -> None:
        """Add a queue with all nodes and parallel environments."""
        values = {
            "qname": name,
            "hostlist": "@allhosts",
            "slots": str(SLOTS),
            "pe_list": " ".join(self._environments) or "NONE",
            # A node's /tmp is the machine's.
            "tmpdir": "/dev/shm",
            "load_thresholds": "NONE",
            **values,
        }
        self._put("-Aq", _changed(self.ask("qconf", "-sq"), values))

    def kill_execd(self, node: str) -> None:
        """Kill the daemon of a node alone; what it has started goes on."""
        self.kill_program(node, "sge_execd")

    def revive_execd(self, node: str) -> None:
        """Start the daemon of a node again."""
        daemon = self.inside(node, ["sge_execd"])
        subprocess.run(daemon, env=self.environment(), check=True, capture_output=True)

    def _begin(self) -> None:
        self._write()
        self.name_hosts()
        self.network.create()
        self._start("ctl", ["env", "SGE_ND=1", "sge_qmaster"])
        wait_for(self._answers, "sge_qmaster")
        self._configure()
        for node in self.nodes:
            self.revive(node)

    def _write(self) -> None:
        """Write a cell with an empty database, in which every user is the administrator, root."""
        common = self.folder / "default/common"
        for path in (common, self.folder / "qmaster", self.folder / "execd"):
            path.mkdir(parents=True)
        for name in ("bin", "lib", "util", "utilbin"):
            (self.folder / name).symlink_to(_ROOT / name)
        files.write_switch(self.folder)
        (common / "bootstrap").write_text(_BOOTSTRAP.format(folder=self.folder))
        (common / "act_qmaster").write_text("ctl\n")
        values = {
            "execd_spool_dir": str(self.folder / "execd"),
            "mailer": "/bin/true",
            "administrator_mail": "none",
            "min_uid": "0",
            "min_gid": "0",
            "load_report_time": "00:00:02",
            "max_unheard": f"00:00:{self._silence}",
            "reschedule_unknown": "00:00:05",
        }
        text = (_SHARE / "default-configuration").read_text()
        (self.folder / "configuration").write_text(_changed(text, values))
        spool = f"{common};{self.folder / 'qmaster'}"
        resources = _SHARE / "util/resources"
        for command in (
            ["spoolinit", "classic", "libspoolc", spool, "init"],
            ["spooldefaults", "configuration", str(self.folder / "configuration")],
            ["spooldefaults", "complexes", str(resources / "centry")],
            ["spooldefaults", "usersets", str(resources / "usersets")],
            ["spooldefaults", "managers", "root"],
        ):
            program = [str(_PROGRAMS / command[0]), *command[1:]]
            subprocess.run(program, env=self.environment(), check=True, capture_output=True)

    def _configure(self) -> None:
        """Add the nodes, the queue and the parallel environments."""
        for node in self.nodes:
            self.ask("qconf", "-ah", node)
            self.ask("qconf", "-as", node)
            self._put("-Ae", _HOST.format(node=node))
        self.ask("qconf", "-as", "ctl")
        self._put("-Ahgrp", _GROUP.format(nodes=" ".join(self.nodes)))
        seconds = {"schedule_interval": "0:0:2", "flush_submit_sec": "1", "flush_finish_sec": "1"}
        seconds |= {"job_load_adjustments": "NONE", "schedd_job_info": "true"}
        self._put("-Msconf", _changed(self.ask("qconf", "-ssconf"), seconds))
        for name, rule in self._environments.items():
            values = {"pe_name": name, "slots": "999", "allocation_rule": rule}
            values |= {"control_slaves": "TRUE", "job_is_first_task": "FALSE"}
            self._put("-Ap", _changed((_SHARE / "util/resources/pe/make").read_text(), values))
        self.add_queue("all.q", self._queue)

    def _answers(self) -> bool:
        with suppress(IndexError, OSError):  # the login node is only just being made
            return self.run(["qconf", "-sh"]).returncode == 0
        return False

    def _put(self, option: str, text: str) -> None:
        """Hand a description to qconf, which takes files."""
        path = self.folder / "described"
        path.write_text(text)
        self.ask("qconf", option, str(path))

    def _idle(self) -> set[str]:
        """The nodes whose queue has no state and no job."""
        done = self.run(["qstat", "-f"])
        idle = rf"^all\.q@(\S+) +\S+ +0/0/{SLOTS} +\S+ +\S+ *$"
        return set(re.findall(idle, done.stdout, re.MULTILINE))


def _changed(text: str, values: Mapping[str, str]) -> str:
    """Return a description of Grid Engine, a name and a value in each line, with other values."""
    for name, value in values.items():
        text, count = re.subn(rf"^{name}\b.*(\\\n.*)*", f"{name} {value}", text, flags=re.MULTILINE)
        assert count == 1, (name, text)
    return text

"""A stand-in for Kubernetes with JobSet: pods are processes in namespaces, restarted as a Job's are.

A pod has its own network, address, host name, processes and shared memory, and no environment but
its manifest's. The controller follows the documented rules of Jobs (completion index, grace period,
pod failure policy, deadline) and JobSets (restarts of all pods, suspension). Needs root and iproute2.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil

from helpers.cluster import files, kubectl
from helpers.cluster.network import Network
from helpers.commands import wait_for
from helpers.job_sets import checked_job_set

_INIT = """
hostname "$2"; mount --make-rprivate /
mount --bind "$3" /etc/hosts; mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs tmpfs /dev/shm
cd "$4" && shift 4 && exec "$@"
"""
_PATH = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
_ADDRESSES, _PAGE = 12, 4096


class Pod:
    """A pod that runs, or has ended with `code`."""

    def __init__(self, job_set: JobSet, index: int, host: str) -> None:
        self.index, self.host = index, host
        self.hostname = f"{job_set.name}-node-0-{index}"
        self.name = f"{self.hostname}-{secrets.token_hex(3)[:5]}"
        self.disrupted = self._killed = False
        self._job_set = job_set
        self._kill_at = float("inf")
        self.path = job_set.space / f"pod/{self.name}.json"
        self.hosts = job_set.space / f"hosts-{self.name}"
        self._since = datetime.now(UTC).isoformat()

    def start(self) -> None:
        [container] = self._job_set.pod["containers"]
        env = {"PATH": _PATH, "HOME": "/root", "HOSTNAME": self.hostname}
        env["JOB_COMPLETION_INDEX"] = str(self.index)
        for each in container["env"]:
            env[each["name"]] = expand(each["value"], env)
        cluster = self._job_set.cluster
        command = [expand(word, env) for word in container["command"]]
        spaces = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        place = [str(cluster.folder), self.hostname, str(self.hosts), container["workingDir"]]
        enter = ["ip", "netns", "exec", cluster.network.space(self.host), *spaces]
        for folder in ("pod", "logs"):
            (self._job_set.space / folder).mkdir(exist_ok=True)
        with (self._job_set.space / "logs" / self.name).open("wb") as out:
            self._process = psutil.Popen(
                [*enter, "sh", "-c", _INIT, "init", *place, *command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._write("Running")

    @property
    def code(self) -> int | None:
        """The exit code; that of a signal as containers have it."""
        code: int | None = self._process.poll()
        if code is None or code >= 0:
            # unshare reports a SIGKILL of its child as 1.
            return 137 if code and self._killed else code
        return 128 - code

    def terminate(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after the grace period; a second time can only shorten it."""
        if self._kill_at == float("inf"):
            self._signal(signal.SIGTERM)
        self._kill_at = min(self._kill_at, time.monotonic() + grace)

    def kill(self) -> None:
        self._killed = True
        self._signal(signal.SIGKILL)

    def look(self) -> int | None:
        """Carry out what is due; the exit code, None while the pod runs."""
        asked = self.path.with_suffix(".delete")
        if asked.exists():
            self.terminate(float(asked.read_text() or self._job_set.grace))
        if time.monotonic() > self._kill_at:
            self.kill()
        code = self.code
        if code is not None:
            self._write("Failed" if code else "Succeeded")
        return code

    def remove(self) -> None:
        """Remove the object; what the pod has written stays for tests."""
        for path in (self.path, self.path.with_suffix(".status"), self.path.with_suffix(".delete")):
            path.unlink(missing_ok=True)

    def _signal(self, signum: int) -> None:
        """Send a signal to the first process of the pod."""
        with suppress(psutil.NoSuchProcess):
            for child in self._process.children():
                child.send_signal(signum)

    def _write(self, phase: str) -> None:
        data = {"name": self.name, "labels": {kubectl.SET_LABEL: self._job_set.name}}
        self.path.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": data}))
        status = {"phase": phase, "startTime": self._since}
        self.path.with_suffix(".status").write_text(json.dumps(status))


def expand(text: str, values: dict[str, str]) -> str:
    """Replace `$(NAME)` as Kubernetes does, where `$$` is a dollar."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[1] is None else values.get(m[1], m[0]), text
    )


class JobSet:
    """A JobSet with one Job, and the state that its controllers keep."""

    def __init__(self, cluster: Kubernetes, path: Path) -> None:
        self.cluster, self._path = cluster, path
        self.space, self.name = path.parents[1], path.stem
        made = json.loads(path.read_text())
        data = made["metadata"]
        made["metadata"] = {
            key: value for key, value in data.items() if key not in ("uid", "creationTimestamp")
        }
        self.spec = checked_job_set(json.dumps(made))["spec"]
        [node] = self.spec["replicatedJobs"]
        self._job = node["template"]["spec"]
        self.pod = self._job["template"]["spec"]
        self.grace = self.pod["terminationGracePeriodSeconds"]
        self.pods: list[Pod] = []
        self.codes: list[tuple[int, int]] = []
        """The index and the exit code of each pod that has ended."""
        self.restarts = 0
        self.suspended = self.gone = False
        self.condition: tuple[str, str] | None = None
        self._begin()

    def _begin(self) -> None:
        self._succeeded: set[int] = set()
        self._failures = 0
        self._why = ""
        self._begun = self.cluster.now()

    def running(self, index: int) -> Pod:
        """The pod of an index."""
        [found] = [pod for pod in self.pods if pod.index == index]
        return found

    def look(self) -> None:
        """Do what is due."""
        self._notice_ends()
        if self._path.with_suffix(".delete").exists():
            self._end_pods()
            if not self.pods:
                self._remove()
            return
        if self.condition is not None:
            return
        if self.cluster.now() - self._begun > self._job["activeDeadlineSeconds"]:
            self._why = self._why or "DeadlineExceeded"
        if self._why or self.suspended:
            self._end_pods()
            if self._why and not self.pods:
                self._apply_failure_policy()
        elif len(self._succeeded) == self._job["completions"]:
            self.condition = ("Completed", "jobset completed successfully")
        else:
            self._start_pods()
        self._write()

    def _notice_ends(self) -> None:
        for pod in list(self.pods):
            code = pod.look()
            if code is None:
                continue
            self.pods.remove(pod)
            self.codes.append((pod.index, code))
            if code == 0:
                self._succeeded.add(pod.index)
            elif not self._is_ignored(pod, code):
                self._failures += 1
                if self._failures > self._job["backoffLimit"]:
                    self._why = self._why or "BackoffLimitExceeded"

    def _is_ignored(self, pod: Pod, code: int) -> bool:
        for rule in self._job["podFailurePolicy"]["rules"]:
            kinds = [each["type"] for each in rule.get("onPodConditions", ())]
            codes = rule.get("onExitCodes", {}).get("values", ())
            if code in codes or (pod.disrupted and "DisruptionTarget" in kinds):
                return bool(rule["action"] == "Ignore")
        return False

    def _apply_failure_policy(self) -> None:
        policy = self.spec["failurePolicy"]
        rules = [each for each in policy["rules"] if self._why in each["onJobFailureReasons"]]
        if rules or self.restarts == policy["maxRestarts"]:
            self.condition = ("Failed", f"jobset failed due to one or more job failures: {self._why}")
            return
        self.restarts += 1
        self._clear()
        self._begin()

    def _start_pods(self) -> None:
        there = {pod.index for pod in self.pods} | self._succeeded
        missing = sorted(set(range(self._job["completions"])) - there)
        new = [Pod(self, index, self.cluster.free_host()) for index in missing]
        self.pods += new
        if new:
            self._name_hosts()
        for pod in new:
            pod.start()

    def _name_hosts(self) -> None:
        """Let pods find each other by the names of the headless service, and each itself."""
        at = {pod: self.cluster.address(pod.host) for pod in self.pods}
        service = f"{self.name}.{self.space.name}.svc.cluster.local"
        names = "".join(
            f"{address} {pod.hostname}.{service} {pod.hostname}.{self.name}\n"
            for pod, address in at.items()
        )
        for pod, address in at.items():
            # In place, since the file is mounted, and in one piece, since pods read it.
            text = f"127.0.0.1 localhost\n{address} {pod.hostname}\n{names}"
            with pod.hosts.open("r+b" if pod.hosts.exists() else "wb", buffering=0) as file:
                file.write(text.encode().ljust(_PAGE))

    def _end_pods(self) -> None:
        for pod in self.pods:
            pod.terminate(self.grace)

    def _clear(self) -> None:
        """Remove the objects of pods that have ended."""
        for path in (self.space / "pod").glob(f"{self.name}-node-*"):
            path.unlink()

    def _remove(self) -> None:
        self._clear()
        for path in self._path.parent.glob(f"{self.name}.*"):
            path.unlink()
        self.gone = True

    def _write(self) -> None:
        kinds = [("Suspended", "jobset is suspended")] if self.suspended else []
        kinds += [] if self.condition is None else [self.condition]
        conditions = [{"type": kind, "status": "True", "message": why} for kind, why in kinds]
        text = json.dumps({"restarts": self.restarts, "conditions": conditions})
        self._path.with_suffix(".status").write_text(text)


class Kubernetes:
    """A cluster that runs the JobSets which its kubectl creates; gone after the `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hosts = {f"h{n}": (f"10.78.0.{n}/24",) for n in range(1, _ADDRESSES + 1)}
        self._next = self._cycle()
        self.network = Network(f"k{secrets.token_hex(3)}", self._hosts)
        self._sets: dict[Path, JobSet] = {}
        self.passed = 0.0
        """Seconds that a test lets pass at once."""

    def __enter__(self) -> Self:
        (self.folder / "bin").mkdir(parents=True)
        files.write_switch(self.folder)
        program = self.folder / "bin/kubectl"
        command = f"'{sys.executable}' '{kubectl.__file__}' '{self.folder / 'objects'}'"
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
        try:
            self.network.create()
        except BaseException:
            self.network.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sets.values():
            for pod in each.pods:
                pod.kill()
        self.network.remove()

    def now(self) -> float:
        return time.monotonic() + self.passed

    def address(self, host: str) -> str:
        return self._hosts[host][0].partition("/")[0]

    def _cycle(self) -> Iterator[str]:
        while True:
            yield from self._hosts

    def free_host(self) -> str:
        """A host that no pod uses, another one each time: a new pod has a new address."""
        used = {pod.host for each in self._sets.values() for pod in each.pods}
        return next(host for host in self._next if host not in used)

    def look(self) -> None:
        """Let the controllers do what is due."""
        for path in sorted((self.folder / "objects").glob("*/jobset/*.json")):
            if path not in self._sets or self._sets[path].gone:
                self._sets[path] = JobSet(self, path)
        for each in self._sets.values():
            if not each.gone:
                each.look()

    def job_set(self, job: str) -> JobSet:
        """The JobSet with the id NAMESPACE/NAME."""
        space, _, name = job.partition("/")
        return self._sets[self.folder / "objects" / space / f"jobset/{name}.json"]

    def output(self) -> str:
        """What all pods have written, also those that are gone."""
        paths = sorted(
            (self.folder / "objects").glob("*/logs/*"), key=lambda path: path.stat().st_mtime
        )
        return "".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in paths)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Run the cluster until a condition holds."""

        def holds() -> bool:
            self.look()
            return condition()

        wait_for(holds, every=0.05, told=self.output)

    def run(
        self, command: Sequence[str], *, folder: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine with this kubectl."""
        env: dict[str, Any] = {"PATH": f"{self.folder / 'bin'}:{_PATH}", "HOME": "/root", **variables}
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False
        )

"""The state of a JobSet, from what kubectl prints about it and its pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shoal.tools.submit.scheduler import JobPhase, QueuedJob

_NEVER = {"CreateContainerConfigError", "ErrImageNeverPull", "InvalidImageName"}


def parse_job_set(job: str, text: str, pods: str) -> QueuedJob:
    """Return the state of a JobSet, from the JSON of `kubectl get` for it and for its pods."""
    status = json.loads(text).get("status", {})
    true = {each["type"]: each for each in status.get("conditions", ()) if each["status"] == "True"}
    found = [pod["status"] for pod in json.loads(pods)["items"]]
    phase: JobPhase = "waiting"
    state, reason, never, since = "pending", "", "", ""
    if ended := next((true[name] for name in ("Completed", "Failed") if name in true), None):
        phase, state, reason = "ended", ended["type"], ended.get("message", "")
    elif "Suspended" in true:
        state, reason = "suspended", "a queue has not admitted it, or it was preempted"
    else:
        why = dict(_obstacles(found))
        reason = "; ".join(filter(None, (": ".join(filter(None, pair)) for pair in why.items())))
        never = next((f"a pod has {name}" for name in why if name in _NEVER), "")
        if any(pod.get("phase") == "Running" for pod in found):
            phase, state = "running", "running"
            since = min(pod["startTime"] for pod in found if "startTime" in pod)
    restarts = status.get("restarts", 0)
    return QueuedJob(
        job=job,
        phase=phase,
        state=state,
        ran=f"since {since}" if since else "",
        reason="; ".join(filter(None, (reason, f"{restarts} restart(s)" if restarts else ""))),
        never_starts=never,
    )


def _obstacles(pods: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield reasons and messages of pods that wait for a node or of containers that wait to start."""
    for pod in pods:
        for condition in pod.get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                yield condition.get("reason", ""), condition.get("message", "")
        for container in pod.get("containerStatuses", ()):
            if waiting := container.get("state", {}).get("waiting"):
                yield waiting.get("reason", ""), waiting.get("message", "")

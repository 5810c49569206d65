"""Manifests of Kubernetes, checked against the schemas of its API."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet


def checked_job_set(text: str) -> dict[str, Any]:
    """Return a JobSet, with the schema's fields and types only: JobSet's own, and that of its Job."""
    found: dict[str, Any] = json.loads(text)
    # The models drop fields that they do not know.
    known = JobsetV1alpha2JobSet.from_dict(found)
    assert known is not None
    assert known.to_dict() == found
    for each in found["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}}
        job["spec"] = each["template"]["spec"]
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    return found

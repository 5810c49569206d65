"""Kubernetes without a cluster: the JobSet of a job, what is refused, and the texts of kubectl."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from helpers.cli import fake_slurm, refused, shoal
from helpers.fake_slurm import Fakes, place, request, write
from helpers.job_sets import checked_job_set
from shoal.tools.submit.kubernetes.queue import parse_job_set
from shoal.tools.submit.site_catalog import Partition, Site, read_site
from shoal.util.errors import LaunchError

GPUS = Partition(name="gpu", option="team-a", constraint="gpu=a100,example.org/zone=", cpus_per_gpu=8)
SITE = Site(
    name="lab",
    scheduler="kubernetes",
    default="gpu",
    partitions={"gpu": GPUS},
    image="example.org/train:1",
    volumes=("data:/mnt/data", "scratch:/scratch"),
)
HERE = place("/mnt/data/me")


def job_set(site: Site = SITE, where: Any = HERE, save: float | None = None, **asked: Any) -> Any:
    return checked_job_set(write(request(**asked), site, where, save=save))


def parts(found: Any) -> tuple[Any, Any, Any]:
    """The Job, the pod and the container of a JobSet."""
    [node] = found["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    return node["template"]["spec"], pod, container


def test_a_job_on_nodes_with_gpus() -> None:
    found = job_set(nodes=2, gpus=4, memory="64Gi", restarts=3, account="research", save=10.0)
    name = found["metadata"]["name"]
    assert found["metadata"]["namespace"] == "research"
    assert found["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 3
    job, pod, container = parts(found)
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    # A save of 10 s: 20 s before the end, and for as long.
    assert (job["activeDeadlineSeconds"], pod["terminationGracePeriodSeconds"]) == (3580, 20)
    assert pod["nodeSelector"] == {"gpu": "a100", "example.org/zone": ""}
    assert container["image"] == "example.org/train:1"
    gpus = {"nvidia.com/gpu": "4", "memory": "64Gi"}
    assert container["resources"] == {"requests": {"cpu": "32", **gpus}, "limits": gpus}
    script = f"{HERE.folder}/source/train.py"
    run = ["python", "-m", "shoal", "run", "-n", "4", "--wait", "3600"]
    assert container["command"] == [*run, script, "--"]
    values = {each["name"]: each["value"] for each in container["env"]}
    assert values["MASTER_ADDR"] == f"{name}-node-0-0.{name}"
    assert values["WORLD_SIZE"] == "2"
    claims = {
        each["name"]: each["persistentVolumeClaim"]["claimName"]
        for each in pod["volumes"]
        if each["name"] != "shm"
    }
    mounts = {claims.get(each["name"], ""): each["mountPath"] for each in container["volumeMounts"]}
    assert mounts == {"": "/dev/shm", "data": "/mnt/data", "scratch": "/scratch"}


def test_pods_that_have_saved_or_were_evicted_come_back_without_a_count() -> None:
    job, pod, _ = parts(job_set())
    assert (pod["restartPolicy"], job["backoffLimit"]) == ("Never", 0)
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore"]
    assert job["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [75, 143]
    never = Site(**{**vars(SITE), "requeue": False})
    assert parts(job_set(never))[0]["podFailurePolicy"]["rules"] == []


def test_words_are_data() -> None:
    words = ("$(HOME)", "$$", "a: b", '"quoted"', "it's", "line\nbreak", "\x7f", "ä")
    where = place("/mnt/data/me", args=words, variables=(("A", "$(B)"),), python_path=("/x", "/y"))
    _, _, container = parts(job_set(where=where))
    given = container["command"][container["command"].index("--") + 1 :]
    assert tuple(word.replace("$$", "$") for word in given) == words
    assert {"name": "A", "value": "$$(B)"} in container["env"]
    assert {"name": "PYTHONPATH", "value": "/x:/y"} in container["env"]


def test_names_of_pods_are_dns_labels_and_differ_between_submissions() -> None:
    names = [
        job_set(where=place(f"/mnt/data/{folder}"), script="My_train.v2.py", nodes=nodes)["metadata"][
            "name"
        ]
        for folder, nodes in (("a", 1), ("a", 1), ("b", 1), ("b", 1000))
    ]
    assert names[0] == names[1] != names[2] == names[3]
    assert all(name.startswith("my-train-v2-") for name in names)
    longest = "n" * (63 - len("-abcdef-node-0-999-abcde"))
    job_set(name=longest, nodes=1000)
    with pytest.raises(LaunchError, match=f"up to {len(longest)} letters"):
        job_set(name=longest + "n", nodes=1000)


@pytest.mark.parametrize(
    ("site", "asked", "told"),
    [
        ({"image": None}, {}, "pods run the programs of an image"),
        ({}, {"container": "an image"}, "--container 'an image'"),
        ({}, {"name": "1st"}, "--name '1st'"),
        ({}, {"name": "trän"}, "--name 'trän'"),
        ({}, {"account": "My_Team"}, "of lowercase letters, digits and dashes"),
        ({}, {"partition": "a b"}, "--partition 'a b'"),
        ({}, {"memory": "64GB"}, "--mem '64GB'"),
        ({}, {"constraint": "a100"}, "--constraint 'a100'"),
        ({}, {"constraint": "a=b=c"}, "--constraint 'a=b=c'"),
        ({"volumes": ()}, {}, "it has none"),
        ({"volumes": ("data",)}, {}, "volumes 'data'"),
        ({"volumes": ("Data:/mnt/data",)}, {}, "volumes 'Data:/mnt/data'"),
        ({"volumes": ("data:mnt",)}, {}, "volumes 'data:mnt'"),
        ({"volumes": ("data:/mnt/dat",)}, {}, "/mnt/data/me/jobs/1"),
        ({}, {"qos": "high"}, "--qos"),
        ({}, {"sweep": (("a",),)}, "--sweep"),
        ({}, {"chain": 2}, "submit the same run again"),
        ({}, {"stage": ("data",)}, "--stage"),
        ({}, {"options": ("--exclusive",)}, "--directive"),
        ({}, {"nodes": 2, "processes": 3}, "as many processes: -n 4"),
        ({}, {"launcher": "mpirun"}, "--launcher"),
    ],
)
def test_what_kubernetes_would_reject_is_refused(
    site: dict[str, Any], asked: dict[str, Any], told: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        job_set(Site(**{**vars(SITE), **site}), **asked)
    assert told in str(caught.value)


def test_text_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(LaunchError, match="not UTF-8"):
        job_set(where=place("/mnt/data/me", args=(os.fsdecode(b"\xff"),)))


def test_the_schema_finds_a_wrong_field() -> None:
    found = job_set()
    found["spec"]["network"]["subdomains"] = "a"
    with pytest.raises(AssertionError):
        checked_job_set(json.dumps(found))
    del found["spec"]["network"]["subdomains"]
    parts(found)[0]["backoffLimit"] = "0"
    with pytest.raises((ValueError, kubernetes_validate.ValidationError)):
        checked_job_set(json.dumps(found))


def pods(**status: Any) -> str:
    return json.dumps({"items": [{"status": status}]})


def test_the_state_of_a_job_set() -> None:
    def state(pod: str = '{"items": []}', **status: Any) -> tuple[str, str, str]:
        queued = parse_job_set("a/b", json.dumps({"status": status}), pod)
        return queued.phase, queued.state, queued.reason

    def condition(kind: str, value: str = "True") -> dict[str, Any]:
        return {"conditions": [{"type": kind, "status": value, "message": "why"}]}

    assert state() == ("waiting", "pending", "")
    assert state(**condition("Suspended"))[:2] == ("waiting", "suspended")
    running = pods(phase="Running", startTime="2026-01-01T10:00:00Z")
    assert state(running, **condition("Suspended", "False")) == ("running", "running", "")
    assert state(running, restarts=2) == ("running", "running", "2 restart(s)")
    assert state(**condition("Completed")) == ("ended", "Completed", "why")
    assert state(**condition("Failed")) == ("ended", "Failed", "why")
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    waits = pods(phase="Pending", conditions=[{**unschedulable, "message": "0/3 nodes"}])
    assert state(waits) == ("waiting", "pending", "Unschedulable: 0/3 nodes")
    waiting = [{"state": {"waiting": {"reason": "InvalidImageName"}}}]
    queued = parse_job_set("a/b", "{}", pods(phase="Pending", containerStatuses=waiting))
    assert queued.never_starts == "a pod has InvalidImageName"


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    made = json.dumps({"metadata": {"namespace": "research", "name": "train-1"}})
    site = f'scheduler = "kubernetes"\nimage = "train"\nvolumes = ["data:{tmp_path}"]\n'
    return fake_slurm(tmp_path, monkeypatch, submitted=made, sites={"lab": site}, commands=("kubectl",))


SUBMIT = ("submit", "--site", "lab", "--time", "1:00:00")


def test_a_manifest_is_printed_kept_or_created(kubectl: Fakes) -> None:
    done = shoal(*SUBMIT, "--dry-run", "train.py")
    shown = checked_job_set(done.stdout)
    assert (kubectl.calls(), Path("runs").exists()) == ([], False)
    done = shoal(*SUBMIT, "-o", "my.json", "train.py")
    assert "written, not submitted: kubectl create -f my.json" in done.output
    assert json.loads(Path("my.json").read_text()) == shown
    assert shoal(*SUBMIT, "-o", "my.json", "--run", "other", "train.py").exit_code == 0
    assert "job research/train-1: 1 node" in shoal(*SUBMIT, "train.py").output
    file = Path("runs/train/jobs/2/jobset.json").resolve()
    assert kubectl.calls() == [["kubectl", "create", "--output=json", f"--filename={file}"]]
    assert json.loads((file.parent / "job.json").read_text())["jobs"] == ["research/train-1"]


def test_kubectl_explains_itself(kubectl: Fakes) -> None:
    refusal = 'no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"'
    kubectl.set("kubectl", code=1, err=refusal)
    error = refused(*SUBMIT, "train.py")
    assert (error.found, Path("runs").exists()) == (refusal, False)
    kubectl.set("kubectl", code=1, err="The connection to the server x was refused")
    assert "reaches no cluster" in refused(*SUBMIT, "train.py").found


def test_a_run_directory_outside_of_the_volumes_is_refused(kubectl: Fakes) -> None:
    error = refused(*SUBMIT, "--run", "/var/tmp/shoal-run", "train.py")
    assert error.given == "/var/tmp/shoal-run/jobs/1"
    assert kubectl.calls() == []


def test_a_site_is_drafted(kubectl: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(kubectl.path))
    for name in ("bash", "cat"):
        (kubectl.path / name).symlink_to(f"/bin/{name}")
    kubectl.set("kubectl", out='{"items": [{"metadata": {"name": "data"}}]}')
    assert shoal("sites", "new", "mine").exit_code == 0
    site = read_site("mine", Path("../config/shoal/sites/mine.toml").read_text(), "mine.toml")
    assert (site.scheduler, site.volumes, site.image) == ("kubernetes", ("data:/mnt/data",), "")

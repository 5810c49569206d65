"""Jobs for Ray without a cluster: the file, what is refused, and the texts of Ray's commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import fake_slurm, refused, shoal
from helpers.fake_slurm import Fakes, place, request, write
from shoal.tools.submit.site_catalog import Site, read_site
from shoal.util.errors import LaunchError

SITE = Site(name="lab", scheduler="ray")
HERE = place("/data/me", args=("a b", "$x"), variables=(("A", "1"),), python_path=("/x", "/y"))


def test_the_file_of_a_job() -> None:
    text = write(request(nodes=2, gpus=4, cpus=8, memory="64G", restarts=3), SITE, HERE, save=10.0)
    labels = write(request(constraint="ray.io/accelerator-type=A100,zone=b"), SITE, HERE)
    assert json.loads(labels)["labels"] == {"ray.io/accelerator-type": "A100", "zone": "b"}
    assert json.loads(text) == {
        "about": "Written by `shoal submit` for the site lab.",
        "name": "train",
        "python": HERE.python,
        "nodes": 2,
        "bundle": {"CPU": 32, "GPU": 4, "memory": 64 * 1024**3},
        "labels": {},
        "launcher": [HERE.python, "-m", "shoal", "run", "-n", "4", "--restarts", "3"],
        "script": [f"{HERE.folder}/source/train.py", "--", "a b", "$x"],
        "directory": HERE.directory,
        "variables": {
            "PYTHONUNBUFFERED": "1", "A": "1", "PYTHONPATH": "/x:/y", "OMP_NUM_THREADS": "8",
        },
        "cancelled": f"{HERE.folder}/cancelled",
        "seconds": 3575,
        "replacements": 100,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("site", "asked", "told"),
    [
        ({}, {"name": "a b"}, "--name 'a b'"),
        ({}, {"memory": "64"}, "--mem '64'"),
        ({}, {"constraint": "a100"}, "--constraint 'a100'"),
        ({}, {"constraint": "a=!b"}, "--constraint 'a=!b'"),
        ({}, {"partition": "gpu"}, "--partition"),
        ({}, {"qos": "high"}, "--qos"),
        ({}, {"account": "me"}, "--account"),
        ({}, {"sweep": (("a",),)}, "--sweep"),
        ({}, {"chain": 2}, "submit the same run again"),
        ({}, {"stage": ("data",)}, "--stage"),
        ({}, {"container": "image"}, "start Ray in that image"),
        ({}, {"options": ("--exclusive",)}, "--directive"),
        ({}, {"nodes": 2, "processes": 3}, "as many processes: -n 4"),
        ({}, {"launcher": "mpirun"}, "--launcher"),
    ],
)
def test_what_ray_would_reject_is_refused(
    site: dict[str, Any], asked: dict[str, Any], told: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        write(request(**asked), Site(**{**vars(SITE), **site}), HERE)
    assert told in str(caught.value)


def test_paths_for_which_ray_has_no_quotes_are_refused() -> None:
    with pytest.raises(LaunchError, match="--run '/a b"):
        write(request(), SITE, place("/a b"))


NODES = [
    {"resources_total": {"CPU": 8.0, "memory": "20 GiB"}, "labels": {"zone": "a"}},
    {"resources_total": {"CPU": 8.0, "GPU": 4.0}, "labels": {"zone": "b"}},
]
SUBMIT = ("submit", "--site", "lab", "--time", "1:00:00", "--nodes", "2")


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    found = json.dumps(NODES)
    sites = {"lab": 'scheduler = "ray"\n'}
    return fake_slurm(tmp_path, monkeypatch, submitted=found, sites=sites, commands=("ray",))


def test_a_job_is_printed_kept_or_submitted(ray: Fakes) -> None:
    shown = json.loads(shoal(*SUBMIT, "--dry-run", "train.py").stdout)
    assert (ray.calls(), Path("runs").exists()) == ([], False)
    done = shoal(*SUBMIT, "-o", "my.json", "train.py")
    assert "ray job submit --no-wait -- python -m shoal.tools.submit.ray my.json" in done.output
    assert json.loads(Path("my.json").read_text()) == shown
    done = shoal(*SUBMIT, "train.py")
    assert "2 nodes, 2 processes" in done.output, done.exception
    [job] = json.loads(Path("runs/train/jobs/2/job.json").read_text())["jobs"]
    file = str(Path("runs/train/jobs/2/ray.json").resolve())
    driver = [sys.executable, "-P", "-m", "shoal.tools.submit.ray", file]
    how = ["ray", "job", "submit", "--no-wait", f"--submission-id={job}", "--", *driver]
    assert ray.calls()[-1] == how


def test_status_and_the_end(ray: Fakes) -> None:
    shoal(*SUBMIT, "train.py")
    [job] = json.loads(Path("runs/train/jobs/1/job.json").read_text())["jobs"]
    for status, code, message, told in (
        ("RUNNING", None, "Job is currently running.", "running"),
        ("FAILED", 75, "…", "saved"),
        ("FAILED", 3, "exit code 3, last available logs: no", "exit code 3 "),
        ("SUCCEEDED", 0, None, "succeeded"),
    ):
        found = {"submission_id": job, "status": status, "driver_exit_code": code, "message": message}
        ray.set("ray", out=json.dumps([found]))
        assert told in shoal("status", "runs/train").output
    ray.set("ray", out="No resource in the cluster\n")
    assert "Ray does not list it any more" in shoal("status", "runs/train").output
    assert shoal("cancel", "--now", "runs/train").exit_code == 0
    assert ray.calls()[-1] == ["ray", "job", "stop", "--no-wait", job]


def test_ray_explains_itself_before_anything_is_submitted(
    ray: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Ray has 0 such node(s)" in refused(*SUBMIT, "--cpus-per-task", "9", "train.py").found
    error = refused(*SUBMIT, "-C", "zone=b", "train.py")
    assert error.given == "--nodes 2 with CPU=1, zone=b each"
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1\n    x()\n'
    ray.set("ray", code=1, err=f"{trace}ConnectionError: Failed to connect to Ray at address: x")
    assert "RAY_ADDRESS=http://HEAD:8265" in refused(*SUBMIT, "train.py").fix
    ray.set("ray", code=1, err=f"{trace}AuthenticationError: Invalid token\n\nSet RAY_AUTH_TOKEN.")
    error = refused(*SUBMIT, "train.py")
    assert error.found == "AuthenticationError: Invalid token\n\nSet RAY_AUTH_TOKEN."
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no ray" in refused(*SUBMIT, "train.py").found
    assert not Path("runs").exists()
    assert {call[1] for call in ray.calls()} == {"list"}


def test_a_site_is_drafted(ray: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(ray.path))
    for name in ("bash", "cat"):
        (ray.path / name).symlink_to(f"/bin/{name}")
    done = shoal("sites", "new", "mine")
    assert done.exit_code == 0, done.exception
    text = Path("../config/shoal/sites/mine.toml").read_text()
    assert "#   zone=a\n#   zone=b\n" in text
    assert read_site("mine", text, "mine.toml").scheduler == "ray"

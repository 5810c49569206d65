from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.cli import fake_slurm, plan_error, refused, shoal
from helpers.fake_slurm import Fakes

PLAN = ("plan", "--model", "llama-7b", "-n", "16", "--batch", "64")
TRAINING = "steps=1000,queue=auto"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return fake_slurm(tmp_path, monkeypatch, submitted="42\n")


def test_the_second_layout_is_submitted(fakes: Fakes) -> None:
    words = ("--time", "1:00:00", "train.py", "--layout", "{layout}", "--micro={micro_batches}")
    pipeline = ("--schedule={schedule}", "--stages={stages}")
    done = shoal(*PLAN, "--submit", "2", "--", *words, *pipeline)
    assert done.exit_code == 0, done.exception
    assert "job 42: 2 nodes with 8 GPUs, 16 processes, 01:00:00" in done.output
    rows = done.output[done.output.index("Fastest") : done.output.index("The strategy")].splitlines()
    layouts = [line.split()[0] for line in rows if line.startswith(("replicate=", "shard="))]
    script = Path("runs/train/jobs/1/job.sh").read_text()
    assert f"--layout {layouts[1]} --micro=" in script.replace("'", "")
    assert "--schedule=1f1b --stages=1" in script.replace("'", "")
    assert "{" + "layout}" not in script


def test_the_output_of_json_stays_json(fakes: Fakes) -> None:
    words = ("--time", "1:00:00", "train.py", "--layout", "{layout}")
    done = shoal(*PLAN, "--json", "--submit", "1", "--", *words)
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["best"]
    assert "job 42: 2 nodes with 8 GPUs" in done.stderr


def test_a_measured_cpu_gets_no_gpus(fakes: Fakes, tmp_path: Path) -> None:
    machine = tmp_path / "mine.toml"
    machine.write_text(
        "[mine]\nhalf = 1\nfp32 = 1\nmemory = 640\nmemory_bandwidth = 10\nlink = 1\nnetwork = 1\n"
        'devices = 8\ncores = 16\nsource = "test"\n'
    )
    words = ("--time", "1:00:00", "train.py", "--layout", "{layout}")
    done = shoal(*PLAN, "--machine", str(machine), "--submit", "1", "--", *words)
    assert done.exit_code == 0, done.exception
    assert "gpu" not in Path("runs/train/jobs/1/job.sh").read_text().lower()


def test_submissions_that_are_refused(fakes: Fakes) -> None:
    for words, found in (
        (("--submit", "1", "--", "--time", "1:00:00", "train.py"), "no {layout} in the arguments"),
        (("--submit", "6", "--", "train.py", "{layout}"), "--top 5 shows fewer"),
        (("--", "train.py", "{layout}"), "neither --submit nor"),
        (("--submit", "1", "--", "train.py", "{layout}"), "no time limit"),
        (("--submit", "1", "-n", "12", "--batch", "12", "--", "train.py", "{layout}"), "not be full"),
    ):
        error = plan_error(*PLAN, *words)
        assert found in error.found, words
        assert not fakes.calls("sbatch"), words


def test_the_queue_is_what_slurm_answers(fakes: Fakes) -> None:
    answer = "sbatch: Job 5 to start at 2999-11-26T10:44:41 using 16 processors on nodes node[01-02]"
    fakes.set("sbatch", err=answer + " in partition main\n")
    (fakes.path / "sacct").write_text(
        "#!/bin/sh\necho Slurm accounting storage is disabled >&2; exit 1\n"
    )
    (fakes.path / "sacct").chmod(0o755)
    done = shoal(*PLAN, "--training", TRAINING)
    assert "Job 5 to start at 2999-11-26T10:44:41" in done.output
    assert "queue" in done.output[done.output.index("Training with the first") :]
    asked = fakes.calls("sbatch")[0]
    assert "Slurm has no history" in " ".join(done.output.split())
    assert asked[:4] == ["sbatch", "--test-only", "--nodes=2", "--ntasks-per-node=8"]


def test_the_waits_of_earlier_jobs_are_shown(fakes: Fakes) -> None:
    fakes.set("sbatch", err="sbatch: Job 5 to start at 2020-01-01T00:00:00 using 16 processors\n")
    lines = ["2026-11-01T10:00:00|2026-11-01T10:20:00|2", "2026-11-01T10:00:00|2026-11-01T10:40:00|4"]
    lines += ["2026-11-01T10:00:00|2026-11-01T19:00:00|64", "2026-11-01T10:00:00|Unknown|2"]
    (fakes.path / "sacct").write_text("#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")
    (fakes.path / "sacct").chmod(0o755)
    done = shoal(*PLAN, "--training", TRAINING)
    assert "the median of 2 earlier waits is 30 min" in " ".join(done.output.split())


def test_a_queue_that_slurm_does_not_tell(fakes: Fakes) -> None:
    fakes.set("sbatch", code=1, err="allocation failure: Requested node configuration is not available")
    assert "not available" in refused(*PLAN, "--training", TRAINING).found
    fakes.set("sbatch", err="sbatch: later\n")
    assert "without a time" in refused(*PLAN, "--training", TRAINING).found


def test_without_slurm(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no sbatch" in refused(*PLAN, "--training", TRAINING).found

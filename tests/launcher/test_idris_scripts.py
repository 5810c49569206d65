"""The two batch scripts of IDRIS's page on PyTorch: written line for line, and run by a real Slurm."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from helpers.cli import fake_slurm, refused, shoal
from helpers.cluster.slurm import Cluster
from helpers.commands import wait_for
from shoal.tools.submit.site_catalog import find_entry

NAMED = ("--name", "torch-multi-gpu", "--account", "abc", "--directive=--output=torch-multi-gpu%j.out")
LONG = (*NAMED, "--nodes", "8", "--time", "40:00:00")
GPUS = {
    "v100": ("--gpus-per-node", "4"),
    "a100": ("--gpus-per-node", "8", "--partition", "gpu_p5"),
}


def own_site() -> str:
    """Return the file of Jean Zay with PyTorch's module, as a user adds it to a copy."""
    text = find_entry("jean-zay").text
    module, amd = '"module load pytorch-gpu/py3/1.11.0"', '"module load cpuarch/amd"'
    text = text.replace(f"setup = [{amd}]", f"setup = [{amd}, {module}]")
    return f'python = "python"\nsetup = [{module}]\n{text}'


@pytest.mark.parametrize("gpu", GPUS)
def test_their_lines_are_in_the_batch_script(
    gpu: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm(tmp_path, monkeypatch, submitted="", sites={"mine": own_site()})
    Path("myscript.py").touch()
    submit = ("submit", "--site", "mine", *LONG, *GPUS[gpu], "--no-copy", "myscript.py")
    assert "ends jobs after 20:00:00" in refused(*submit, "--dry-run").found
    done = shoal(submit[0], "--force", "--dry-run", *submit[1:])
    assert done.exit_code == 0, done.output

    text = (repository / f"tests/launcher/golden/idris-{gpu}.sh").read_text().replace("=N", "=8")
    # Their account is commented out, since it is the reader's.
    theirs = [line.partition(" # ")[0].replace("##SBATCH", "#SBATCH") for line in text.splitlines()]
    lines = done.stdout.splitlines()
    before_modules = [line for line in theirs if line.startswith("#")]
    count = len(before_modules)
    assert lines[:count] == before_modules
    assert lines[count : lines.index("")] == [
        "#SBATCH --signal=USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "# The signal asks ranks to save before the end; the next attempt appends to the log.",
    ]
    modules = theirs[count:-1]
    first = lines.index(modules[0])
    assert lines[first : first + len(modules)] == modules
    assert [line for line in lines if line.startswith("module")] == modules
    rest = lines[first + len(modules) :]
    cores = next(line.split()[1] for line in theirs if "--cpus-per-task" in line)
    assert f'srun --kill-on-bad-exit=1 {cores} "${{program[@]}}"' in rest
    assert f'program=(bash -c "$around" "$first" python {Path("myscript.py").resolve()})' in rest


SMALL = """
multithread = false
setup = ["module load pytorch-gpu/py3/1.11.0"]
default = "gpu_p13"
[partitions.gpu_p13]
option = ""
account = "@v100"
gpus = 4
cpus_per_gpu = 2
time = "20:00:00"
[partitions.gpu_p5]
option = ""
constraint = "a100"
account = "@a100"
setup = ["module load cpuarch/amd", "module load pytorch-gpu/py3/1.11.0"]
gpus = 8
cpus_per_gpu = 1
time = "20:00:00"
"""
"""Jean Zay with as few cores as the nodes of the tests' cluster have."""

RANK = """
import os, sys
rank, attempt = os.environ["SLURM_PROCID"], int(os.environ.get("SLURM_RESTART_COUNT", 0))
print(f"rank {rank} of {os.environ['SLURM_NTASKS']}, attempt {attempt}")
sys.exit(0 if attempt else 75)
"""


@pytest.mark.cluster
@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("gpu", "ranks"), [("v100", 8), ("a100", 16)])
def test_a_job_of_theirs_runs_and_its_log_is_found(
    gpu: str, ranks: int, cluster: Cluster, tmp_path: Path
) -> None:
    files = {"config/shoal/sites/mine.toml": SMALL, "myscript.py": RANK}
    files["bin/module"] = '#!/bin/sh\necho "module $*"\n'
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin/module").chmod(0o755)
    path = cluster.environment()["PATH"]
    variables = {"XDG_CONFIG_HOME": f"{tmp_path}/config", "PATH": f"{tmp_path}/bin:{path}"}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "shoal", *arguments]
        done = cluster.run(command, folder=tmp_path, variables=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    many = ("--nodes", "2", "--time", "40:00:00", "--force", *GPUS[gpu])
    said = run("submit", "--site", "mine", "--run", "run", *NAMED, *many, "myscript.py")
    [number] = re.findall(r"^job (\d+)", said)
    ends = tmp_path / "run/jobs/1/ends"
    wait_for(lambda: ends.exists() and ends.read_text().count("\n") == 2, 200, every=0.1)
    log = (tmp_path / f"torch-multi-gpu{number}.out").read_text()
    assert run("logs", "run") == log
    modules = ["module load cpuarch/amd"] * (gpu == "a100") + ["module load pytorch-gpu/py3/1.11.0"]
    lines = log.splitlines()
    assert [line for line in lines if line.startswith("module")] == modules * 2
    expected = {f"rank {rank} of {ranks}, attempt {n}" for n in range(2) for rank in range(ranks)}
    assert expected <= set(lines)
    assert "finished" in run("status", "run")

"""The examples are run, small: alone, on two processes, and again, with the same final numbers."""

from __future__ import annotations

import math
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.fake_slurm import Fakes
from helpers.guide_pages import printed

pytestmark = pytest.mark.processes

ALONE = [sys.executable]
TWO = [sys.executable, "-m", "shoal", "run", "-n", "2"]

# Each with the arguments of a whole run and, where they may change, those of a part of it.
SMALL = {
    "mnist": ("--epochs 2 --batch-size 64", "--epochs 1"),
    "gan": ("--steps 20", "--steps 8"),
    "emulator": ("--flows 8 --size 16 --width 4 --epochs 1", ""),
    "pipeline": ("--blocks 3 --epochs 2", "--epochs 1"),
    "remote": ("--strings 100 --epochs 2", "--epochs 1"),
    "placed": ("--epochs 2", "--epochs 1"),
    "bytes_lm": (
        "--bytes 40000 --context 16 --width 32 --layers 1 --steps 6 --batch-size 8 --ema 0.5",
        "",
    ),
}


def examples(*often: str) -> list[Any]:
    """All of them, of which CI tries some."""
    return [
        pytest.param(name, marks=pytest.mark.full if name in often else pytest.mark.long)
        for name in SMALL
    ]


LAYOUTS = ("tensor=2", "context=2", "pipeline=2", "shard=2,tensor=2", "tensor=2,pipeline=2")
STAND_IN = "--training 500 --test 200 --gzip"
TINY_MODEL = ["--samples", "96", "--longest", "4", "--epochs", "2"]
FINETUNE = {"given loop": [], "own loop": ["--own-loop"], "lora": ["--lora"]}


@pytest.fixture(scope="module")
def digits(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small stand-in for MNIST."""
    folder = tmp_path_factory.mktemp("mnist")
    script = repository / "examples/mnist_standin.py"
    printed([*ALONE, script, folder, *STAND_IN.split()])
    return folder


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Examples may choose another, here in the process of the tests."""
    kept = torch.get_default_dtype()
    yield
    torch.set_default_dtype(kept)


def arguments(name: str, digits: Path) -> list[str]:
    return [*SMALL[name][0].split(), *(["--data", str(digits)] if name == "mnist" else [])]


@pytest.mark.parametrize("name", examples("mnist"))
def test_an_example_ends_the_same_in_two_parts(
    name: str,
    repository: Path,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = str(repository / f"examples/{name}.py")

    def output(folder: str, *more: str) -> str:
        torch.set_default_dtype(torch.float32)
        given = [script, *arguments(name, digits), "--run", str(tmp_path / folder), *more]
        monkeypatch.setattr(sys, "argv", given)
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    whole = output("whole")
    output("parts", *SMALL[name][1].split())
    resumed = output("parts")
    assert re.search(r"resumed at sample [1-9]", resumed)
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]


def last_line(command: list[str], *given: str) -> str:
    return printed([*command, *given]).splitlines()[-1]


def final_number(line: str) -> float:
    """The loss or bits of the last line, which has four decimals."""
    found = re.search(r"\d+\.\d{4}", line)
    assert found is not None, line
    return float(found[0])


def check_alone_and_two(script: Path, given: list[str], folder: Path) -> None:
    alone = last_line(ALONE, str(script), *given, "--run", str(folder / "alone"))
    two = last_line(TWO, str(script), "--", *given, "--run", str(folder / "two"))
    # To the digits shown, of which rounding may turn the last.
    assert final_number(two) == pytest.approx(final_number(alone), abs=1.5e-4)
    assert last_line(ALONE, str(script), *given, "--run", str(folder / "alone")) == alone


@pytest.mark.long
@pytest.mark.parametrize("name", examples("mnist"))
def test_an_example_gives_the_same_on_two_processes(
    name: str, repository: Path, digits: Path, tmp_path: Path
) -> None:
    check_alone_and_two(repository / f"examples/{name}.py", arguments(name, digits), tmp_path)
    if name == "emulator":
        assert (tmp_path / "two/picture.png").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.parametrize("name", ["hogwild", pytest.param("parameter_server", marks=pytest.mark.long)])
def test_workers_that_do_not_wait_learn(name: str, repository: Path, tmp_path: Path) -> None:
    """Not alike each time, but far better than chance, which is one in eight or ten."""
    given = ["--samples", "1200", "--run", str(tmp_path)]
    said = printed([*TWO, repository / f"examples/{name}.py", "--", *given])
    found = re.search(r"^accuracy (\d+\.\d)%", said, re.MULTILINE)  # beside what each worker says
    assert found is not None, said
    assert float(found[1]) > 50


@pytest.mark.long
def test_bytes_are_learned_alike_in_every_layout(repository: Path, tmp_path: Path) -> None:
    """Derived plans, measured stages and all; checkpoints and averages with each."""
    small = "--bytes 40000 --context 16 --width 64 --layers 2 --steps 6 --batch-size 8 --ema 0.5"
    given = [*small.split(), "--micro-batches", "2"]
    script = str(repository / "examples/bytes_lm.py")
    expected = final_number(last_line(ALONE, script, *given, "--run", str(tmp_path / "alone")))
    for layout in LAYOUTS:
        size = math.prod(int(part.partition("=")[2]) for part in layout.split(","))
        command = [sys.executable, "-m", "shoal", "run", "-n", str(size), script, "--", *given]
        line = last_line(command, "--layout", layout, "--run", str(tmp_path / layout))
        assert final_number(line) == pytest.approx(expected, abs=1.5e-4), layout


@pytest.mark.long
def test_each_compression_learns(repository: Path) -> None:
    command = [*TWO, str(repository / "examples/compression.py"), "--", "--epochs", "2"]
    said = printed(command)
    found = dict(re.findall(r"^(\w+) .* MB a step, accuracy ([\d.]+)%$", said, re.MULTILINE))
    assert list(found) == ["none", "bf16", "int8", "PowerSGD", "TopK", "auto"]
    assert all(float(accuracy) > 50 for accuracy in found.values()), found  # chance is 10


@pytest.mark.long
@pytest.mark.parametrize("way", ["DiLoCo", "LocalSGD"])
def test_ranks_that_meet_seldom_learn_and_go_on(way: str, repository: Path, tmp_path: Path) -> None:
    given = [str(repository / "examples/diloco.py"), "--", "--way", way, "--run", str(tmp_path)]
    last_line([*TWO, *given], "--epochs", "2")
    line = last_line([*TWO, *given], "--epochs", "4")
    found = re.search(r"92 steps, averaged 4 times, accuracy ([\d.]+)%", line)
    assert found is not None, line
    assert float(found[1]) > 50


@pytest.mark.long
@pytest.mark.parametrize("loop", FINETUNE)
def test_a_transformers_model_gives_the_same_on_two_processes(
    loop: str, repository: Path, tmp_path: Path
) -> None:
    given = [*TINY_MODEL, *FINETUNE[loop]]
    check_alone_and_two(repository / "examples/finetune.py", given, tmp_path)
    assert (tmp_path / "two/adapter/adapter_model.safetensors").exists() == (loop == "lora")


@pytest.mark.long
def test_a_transformers_model_ends_the_same_in_both_loops(repository: Path, tmp_path: Path) -> None:
    script = str(repository / "examples/finetune.py")
    given, own = (
        last_line(ALONE, script, *TINY_MODEL, "--run", str(tmp_path / loop), *FINETUNE[loop])
        for loop in ("given loop", "own loop")
    )
    assert given == own


@pytest.mark.full
def test_the_stand_in_is_mnist_in_form(repository: Path, digits: Path) -> None:
    mnist = runpy.run_path(str(repository / "examples/mnist.py"))
    for part, count in (("train", 500), ("t10k", 200)):
        images, labels = mnist["read"](digits, part)
        assert images.shape == (count, 28, 28)
        assert images.dtype == torch.uint8
        assert sorted(set(labels.tolist())) == list(range(10))
        # A digit is bright on dark, and stays inside the image.
        assert np.percentile(images.amax((1, 2)), 5) > 200
        assert images[:, [0, -1]].float().mean() < 2


def run_notebook(repository: Path, folder: Path, *, cells: int | None = None) -> list[str]:
    """Run the first code cells of the notebook next to copies of its scripts; what each prints."""
    import nbformat
    from nbclient import NotebookClient

    for name in ("mnist.py", "mnist_standin.py"):
        shutil.copy(repository / "examples" / name, folder)
    notebook = nbformat.read(repository / "examples/notebook.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"][:cells]
    small = "%run mnist_standin.py {data}"
    assert small in notebook.cells[0].source
    notebook.cells[0].source = notebook.cells[0].source.replace(small, f"{small} {STAND_IN}")
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()
    outputs = [[part for part in cell.outputs if "text" in part] for cell in notebook.cells]
    return ["".join(part.text for part in parts).replace("\r\n", "\n") for parts in outputs]


@pytest.fixture
def own_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with those programs that a notebook finds besides Python's: no scheduler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "head", "tail"):
        (folder / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{folder}")
    monkeypatch.delenv("DSDIR", raising=False)
    return folder


@pytest.mark.long
def test_the_notebook_trains_here_without_a_scheduler(
    repository: Path, tmp_path: Path, own_programs: Path
) -> None:
    said = run_notebook(repository, tmp_path)
    standin, written, one, script, two, log, compared, again = said
    assert "500 and 200 images" in standin
    assert "Writing train.py" in written
    assert "#SBATCH --job-name=train\n" in script
    assert "note: this site (plain) is unknown" in script
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash\n")
    assert not (tmp_path / "runs/job/jobs").exists()
    last = one.splitlines()[-1]
    assert re.fullmatch(r"test loss \d\.\d{4}, accuracy \d\d\.\d\d%", last)
    for each in (two, log, again):
        assert each.splitlines()[-1] == last
    found = re.fullmatch(r"10 and 10 steps, largest difference of the losses (\S+)\n", compared)
    assert found is not None, compared
    assert float(found[1]) < 1e-10
    assert "resumed at sample 1,000" in again


@pytest.mark.long
def test_the_notebook_submits_its_script_to_slurm(
    repository: Path, tmp_path: Path, own_programs: Path
) -> None:
    fakes = Fakes(tmp_path / "slurm", ["sbatch"])
    fakes.set("sbatch", out="42\n")
    (own_programs / "sbatch").symlink_to(fakes.path / "sbatch")
    *_, said = run_notebook(repository, tmp_path, cells=5)
    assert "job 42: 1 node, 2 processes, 00:10:00" in said
    copied = tmp_path / "runs/job/jobs/1/source"
    assert (copied / "mnist.py").exists()
    assert (copied / "train.py").read_text() == (tmp_path / "train.py").read_text()


@pytest.mark.full
def test_the_demo_kills_a_process_in_a_save(tmp_path: Path) -> None:
    """Whenever it runs: the checkpoint of step 80 is under way, and never comes to be."""
    demo = runpy.run_path("examples/demo.py")
    text = demo["kill_in_a_save"](tmp_path)
    assert "killed by SIGKILL" in text
    assert "while rank 1 wrote its part of step-80" in text
    assert text.endswith("latest complete checkpoint: step-60")
    assert demo["newest"](tmp_path).name == "step-60"

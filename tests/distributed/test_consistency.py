"""Ranks that run other code or other packages are named before the first step."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.ranks import free_port

pytestmark = pytest.mark.processes

SCRIPT = """
import torch, shoal
import helper

with shoal.init() as world:
    model = shoal.parallelize(torch.nn.Linear(2, 1), world)
    task = shoal.Task(lambda output, batch: (output.sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    (batch,) = shoal.Loader((torch.ones(4, 2),), world, batch_size=4).epochs(1)
    print(step(batch).counted)
"""


HERE = socket.gethostname()


def run(folders: list[Path], *, nodes: int = 1, library: Path | None = None) -> list[tuple[int, str]]:
    """The script in these folders, a rank in each: exit codes and all that they print.

    The last rank alone has `library` on its path.
    """
    port, size = free_port(), len(folders)
    started = []
    for rank, folder in enumerate(folders):
        local = 0 if nodes > 1 else rank
        variables = {
            "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": size // nodes,
            "GROUP_RANK": rank if nodes > 1 else 0, "GROUP_WORLD_SIZE": nodes,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
        }  # fmt: skip
        if library is not None and rank == size - 1:
            variables["PYTHONPATH"] = f"{library}:{variables['PYTHONPATH']}"
        started.append(
            subprocess.Popen(
                [sys.executable, "train.py"],
                cwd=folder,
                env=os.environ | {name: str(value) for name, value in variables.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    ends = [process.communicate(timeout=100)[0] for process in started]
    return [(process.returncode, end) for process, end in zip(started, ends, strict=True)]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "a", tmp_path / "b"]
    for folder in made:
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        (folder / "helper.py").write_text("")
    return made


@pytest.mark.long
def test_the_same_code_in_other_places_is_the_same(folders: list[Path]) -> None:
    assert [code for code, _ in run(folders)] == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("train.py", marks=pytest.mark.long), "helper.py"])
def test_other_code_on_one_rank_is_named(name: str, folders: list[Path]) -> None:
    """FAILURES 25: another source."""
    with (folders[1] / name).open("a") as file:
        file.write("# edited")
    for code, text in run(folders):
        assert code != 0
        assert f"given: the source {name}: " in text
        assert f"on rank 1 ({HERE})" in text


OTHER_TORCH = "import torch\ntorch.__version__ = '2.11.0'\n"


@pytest.mark.full
def test_another_torch_on_one_rank_is_named(folders: list[Path], tmp_path: Path) -> None:
    """FAILURES 25: another torch."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text(OTHER_TORCH)
    for code, text in run(folders, library=library):
        assert code != 0
        assert "given: torch: " in text
        assert "on 1 of 2 ranks" in text
        assert f"found: 2.11.0 on rank 1 ({HERE})" in text


@pytest.mark.long
def test_another_package_on_one_machine_is_named(folders: list[Path]) -> None:
    """FAILURES 25: another package."""
    described = folders[1] / "something-1.5.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: something\nVersion: 1.5\n")
    for code, text in run(folders, nodes=2):
        assert code != 0
        assert "given: the package something: none on 1 of 2 ranks" in text
        assert f"found: 1.5 on rank 1 ({HERE})" in text

"""Ranks that run other code or other packages are named before the first step."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.scripts import Script

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
OTHER_TORCH = "import torch\ntorch.__version__ = '2.11.0'\n"
METADATA = "Metadata-Version: 2.1\nName: something\nVersion: 1.5\n"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        pytest.param(
            "helper.py", "# edited", ["given: the source helper.py: "], marks=pytest.mark.full
        ),
        pytest.param(
            "../library1/sitecustomize.py",
            OTHER_TORCH,
            ["given: torch: ", "on 1 of 2 ranks", "found: 2.11.0"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "something-1.5.dist-info/METADATA",
            METADATA,
            ["given: the package something: none on 1 of 2 ranks", "found: 1.5"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "script.py", SCRIPT + "# edited", ["given: the source script.py: "], marks=pytest.mark.long
        ),
        pytest.param("helper.py", "", [], marks=pytest.mark.long),
    ],
)
def test_what_is_other_on_one_rank_is_named(
    file: str, content: str, said: list[str], start: Callable[..., Script], tmp_path: Path
) -> None:
    """FAILURES 25: another source, torch or package; and nothing where all is equal."""
    for folder in (tmp_path / "0", tmp_path / "1"):
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        (folder / "helper.py").touch()
    (tmp_path / "1" / file).parent.mkdir(exist_ok=True)
    (tmp_path / "1" / file).write_text(content)
    own = "LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2"
    if file.endswith("METADATA"):  # compared between machines
        own = "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=$rank GROUP_WORLD_SIZE=2"
    path = "$PWD:${PWD%/*}/library$rank"
    ended = start("", "hand", place="$rank", own=f"{own} PYTHONPATH={path}").end()
    assert ended.out.count(f"ended with {1 if said else 0}\n") == 2, ended.err
    for text in [*said, f"on rank 1 ({socket.gethostname()})"] if said else []:
        assert ended.err.count(text) >= 2, (text, ended.err)

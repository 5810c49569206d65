"""`shoal checkpoint verify` next to a run that saves: no false alarm, and damage is found."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.commands import Command, wait_for
from shoal.cli.main import app

pytestmark = pytest.mark.processes

SAVE = """
from pathlib import Path
import shoal
import torch
from shoal.checkpoint import Checkpoints

with shoal.init(seed=0) as world:
    checkpoints = Checkpoints(Path("run/checkpoints"), world, keep=2, keep_every=3)
    for step in range(1, 1_000_000):
        checkpoints.save(step, {"weight": torch.full((100_000,), float(step))}, {}, {})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in which a run saves again and again, and keeps every third checkpoint."""
    home = tmp_path_factory.mktemp("home")
    (home / "save.py").write_text(SAVE)
    run = Command([sys.executable, "save.py"], home)
    wait_for(lambda: (home / "run/checkpoints/step-6").exists())
    yield home / "run"
    run.clean_up()


def verify(run: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(run)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def latest(run: Path) -> int:
    names = [path.name.partition("-")[2] for path in (run / "checkpoints").glob("step-*")]
    return max(int(name) for name in names if name.isdecimal())


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_damage_is_found_while_a_run_saves(folder: Path, seed: int) -> None:
    before = latest(folder)

    def has_saved() -> bool:
        code, said = verify(folder)
        assert code == 0, said
        return latest(folder) > before + 2

    wait_for(has_saved)
    draw = random.Random(seed)
    step = folder / f"checkpoints/step-{draw.choice((3, 6))}"
    file = draw.choice(sorted(path for path in step.iterdir() if path.stat().st_size))
    whole = file.read_bytes()
    content = bytearray(whole)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    code, said = verify(folder)
    file.write_bytes(whole)
    assert code == 1
    assert f"{step.name}: damaged: {file.name}" in said
    assert said.count(": damaged: ") == 1

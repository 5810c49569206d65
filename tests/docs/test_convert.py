"""The scripts of the guide's page on converting: how many lines change, and that the result doesn't."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.processes

SCRIPTS = Path(__file__).resolve().parents[2] / "docs" / "migration" / "scripts"
ALONE = [sys.executable]
TWO = [sys.executable, "-m", "shoal", "run", "-n", "2"]

# The plain script with the samples in Shoal's order: batch k of two ranks is then batch k of both.
OWN_SAMPLER = "sampler = DistributedSampler(data)\n"
SAME_SAMPLER = "sampler = Ordered(data)\n"
ORDERED = """
import shoal


class Ordered(DistributedSampler):
    def __iter__(self):
        order = shoal.Permutation(len(self.dataset), seed=0, epoch=self.epoch)
        return iter(list(order)[self.rank :: self.num_replicas])
"""


def written(before: str, after: str) -> list[str]:
    """The lines of `after` that a diff with `before` adds or replaces; empty ones are not counted."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line[2:] for line in lines if line.startswith("+ ") and line[2:].strip()]


def outcome(folder: Path, text: str, command: list[str], *arguments: str) -> tuple[float, float]:
    """The losses over all data of the model before training, and of the one that the script saved."""
    folder.mkdir()
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [*command, "script.py", *arguments],
        cwd=folder,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = torch.randn(1000, 20)
        labels = (inputs @ torch.randn(20, 5)).argmax(1)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    with torch.no_grad():
        first = F.cross_entropy(model(inputs), labels).item()
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        return first, F.cross_entropy(model(inputs), labels).item()


@pytest.fixture(scope="module")
def plain() -> str:
    return (SCRIPTS / "plain_ddp.py").read_text()


@pytest.mark.parametrize(("converted", "limit"), [("with_shoal.py", 6), ("with_own_loop.py", 11)])
def test_lines_are_as_few_as_the_page_says(plain: str, converted: str, limit: int) -> None:
    assert len(written(plain, (SCRIPTS / converted).read_text())) == limit


def test_lines_are_counted() -> None:
    assert written("a = 1\nb = 2\nc = 3\n", "a = 1\nb = 20\n\nd = 4\n") == ["b = 20", "d = 4"]


@pytest.fixture(scope="module")
def same_order(plain: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """The outcome of the plain script on two processes, the samples in Shoal's order."""
    assert plain.count(OWN_SAMPLER) == 1
    head, body = plain.replace(OWN_SAMPLER, SAME_SAMPLER).split("\n\n\n", 1)
    return outcome(tmp_path_factory.mktemp("plain") / "two", f"{head}\n{ORDERED}\n\n{body}", TWO)


@pytest.mark.parametrize(
    ("converted", "command"),
    [
        pytest.param("with_shoal.py", TWO, marks=pytest.mark.full),
        pytest.param("with_own_loop.py", TWO, marks=pytest.mark.long),
        pytest.param("with_shoal.py", ALONE, marks=pytest.mark.long),
        pytest.param("with_own_loop.py", ALONE, marks=pytest.mark.full),
    ],
)
def test_the_converted_script_ends_with_the_same_loss(
    converted: str, command: list[str], same_order: tuple[float, float], tmp_path: Path
) -> None:
    first, last = same_order
    assert last < first / 4  # it has learned, so that the same is not nothing
    text = (SCRIPTS / converted).read_text()
    assert outcome(tmp_path / "run", text, command)[1] == pytest.approx(last, rel=1e-5)


@pytest.mark.parametrize(
    ("script", "command", "arguments"),
    [
        pytest.param("plain_ddp.py", TWO, (), marks=pytest.mark.full),
        pytest.param("with_accelerate.py", TWO, (), marks=pytest.mark.long),
        pytest.param("with_lightning.py", ALONE, ("2",), marks=pytest.mark.long),
    ],
)
def test_the_scripts_as_they_are_end_much_alike(
    script: str,
    command: list[str],
    arguments: tuple[str, ...],
    same_order: tuple[float, float],
    tmp_path: Path,
) -> None:
    """They shuffle in another order."""
    ended = outcome(tmp_path / "run", (SCRIPTS / script).read_text(), command, *arguments)
    assert ended[1] == pytest.approx(same_order[1], rel=0.02)

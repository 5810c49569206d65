"""What the README shows is run: plain DDP beside Shoal, and its whole script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.processes

ALONE = [sys.executable]
TWO = [sys.executable, "-m", "shoal", "run", "-n", "2"]


@pytest.fixture
def scripts(repository: Path) -> list[str]:
    """The README's blocks of Python: plain DDP, the same with Shoal, a whole script."""
    text = (repository / "README.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def run(text: str, command: list[str], folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    done = subprocess.run(
        [*command, "train.py"], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def outcome(text: str, command: list[str], folder: Path) -> float:
    """The loss over all data of the model that a script saves."""
    run(text, command, folder)
    state = torch.load(folder / "model.pt", weights_only=True)
    inputs = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
    output = F.linear(inputs, state["weight"], state["bias"])
    return F.cross_entropy(output, (inputs[:, 0] > 0).long()).item()


@pytest.mark.long
def test_plain_ddp_and_shoal_learn_the_same(scripts: list[str], tmp_path: Path) -> None:
    """In another order of the samples; Shoal also without a launcher, and then exactly."""
    plain, ours, _ = scripts
    before = outcome(plain, TWO, tmp_path / "plain")
    after = outcome(ours, TWO, tmp_path / "two")
    assert after < 0.5  # log 2 is what a coin reaches
    assert after == pytest.approx(before, rel=0.05)
    assert after == pytest.approx(outcome(ours, ALONE, tmp_path / "alone"), rel=1e-6)


def test_the_shoal_form_is_the_shorter(scripts: list[str]) -> None:
    plain, ours, _ = ([line for line in text.splitlines() if line] for text in scripts)
    assert len(ours) < len(plain)


@pytest.mark.full
def test_the_script_gives_the_same_alone_on_two_processes_and_again(
    scripts: list[str], tmp_path: Path
) -> None:
    *_, whole = scripts
    ends = [
        run(whole, command, tmp_path / name).splitlines()[-1]
        for name, command in (("alone", ALONE), ("two", TWO))
        for _ in range(2)
    ]
    assert re.fullmatch(r"loss 0\.\d+, accuracy \d\d\.\d%", ends[0])
    assert len(set(ends)) == 1

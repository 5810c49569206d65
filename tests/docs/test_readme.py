"""Both sides of the diff in the README are run; its quickstart is in test_getting_started.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers.guide_pages import printed

pytestmark = [pytest.mark.processes, pytest.mark.full]

ALONE = [sys.executable]
TWO = [sys.executable, "-m", "shoal", "run", "-n", "2"]


def loss_of_model(text: str, command: list[str], folder: Path) -> float:
    """Return the loss over all data of the model that a script saves."""
    folder.mkdir()
    (folder / "train.py").write_text(text)
    printed([*command, "train.py"], folder)
    state = torch.load(folder / "model.pt", weights_only=True)
    inputs = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
    output = F.linear(inputs, state["weight"], state["bias"])
    return F.cross_entropy(output, (inputs[:, 0] > 0).long()).item()


def test_both_sides_of_the_diff_train_the_same_model(repository: Path, tmp_path: Path) -> None:
    """The order of samples differs between them; Shoal gives one model on 1 and 2 processes."""
    readme = (repository / "README.md").read_text()
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)
    before = "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("+"))
    after = "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("-"))
    plain = loss_of_model(before, TWO, tmp_path / "plain")
    converted = loss_of_model(after, TWO, tmp_path / "two")
    assert converted < 0.5  # log 2 is the loss of random guesses
    assert converted == pytest.approx(plain, rel=0.05)
    assert converted == pytest.approx(loss_of_model(after, ALONE, tmp_path / "alone"), rel=1e-6)

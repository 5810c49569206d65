"""The page "From plain PyTorch": its script, its edits and its commands, in the order of the page."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers.guide_pages import FENCE, agrees, commands, printed

PAGE = Path(__file__).resolve().parents[2] / "docs/migration/plain-pytorch.md"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
NAMED = re.compile(r"--- (\S+)\n")
LOSS = re.compile(r"loss (\d\.\d{9})")
OLD_LOSSES = (
    lambda output, y: F.cross_entropy(output, y),
    lambda output, y: F.mse_loss(output, y),
    lambda output, y: F.cross_entropy(output, y, ignore_index=-100),
    lambda output, y: F.cross_entropy(output, y, WEIGHT),
)
WEIGHT = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)


def edited(script: str, diff: str) -> str:
    """Make the changes of a diff, whose parts `@@` separates."""
    for part in diff.split("@@\n"):
        lines = part.splitlines()
        before, after = (
            "".join(f"{line[1:]}\n" for line in lines if not line.startswith(sign)) for sign in "+-"
        )
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


def follow(folder: Path) -> None:
    """Save the script, edit it and run the commands, from the top of the page to its end."""
    for language, body in FENCE.findall(PAGE.read_text()):
        if language == "py":
            (folder / "old.py").write_text(body)
        elif language == "diff":
            named = NAMED.match(body)
            path = folder / (named[1] if named else "train.py")
            path.write_text(edited(path.read_text(), NAMED.sub("", body)))
        elif language == "console":
            for command, shown in commands(f"```console\n{body}```\n"):
                said = printed(["bash", "-c", command], folder, PATH=PATH)
                assert agrees(shown, said), f"{command}\n{said}"


@pytest.mark.processes
@pytest.mark.full
def test_the_page_converts_its_script_and_both_have_the_same_losses(tmp_path: Path) -> None:
    follow(tmp_path)
    losses = LOSS.findall(PAGE.read_text())
    assert len(losses) == 10
    assert losses[:5] == losses[5:]

    # With Shoal's order in the old script, the losses are the same in another order of the samples.
    old, new = ((tmp_path / name).read_text() for name in ("old.py", "train.py"))
    (call,) = re.findall(r"`(DataLoader\(training, 64, sampler.*?)`", PAGE.read_text())
    ordered = call.replace("epoch=epoch", "epoch=epoch - 1")
    (tmp_path / "old.py").write_text("import shoal\n" + old.replace("y in loader", f"y in {ordered}"))
    (tmp_path / "train.py").write_text(new.replace(", shuffle=False", ""))
    before = printed(["bash", "-c", "rm checkpoint.pt; python old.py"], tmp_path, PATH=PATH)
    after = printed(["bash", "-c", "rm -r runs; shoal run -n 2 train.py"], tmp_path, PATH=PATH)
    assert LOSS.findall(before) == LOSS.findall(after) != losses[:5]


@pytest.mark.parametrize("row", range(len(OLD_LOSSES)))
def test_the_sum_over_the_count_is_the_old_loss(row: int) -> None:
    table = PAGE.read_text().split("| the old loss is |")[1].splitlines()[2:]
    code = re.sub("…", "output, y", re.findall("`(.*?)`", table[row])[-1])
    y = torch.tensor([0, 2, 1, 2, -100 if row == 2 else 0])
    output = torch.randn(5, 3, dtype=torch.float64)
    target: Any = torch.randn(5, 3, dtype=torch.float64) if row == 1 else y
    total, count = eval(code, {"F": F, "output": output, "y": target, "weight": WEIGHT})
    assert float(total / count) == pytest.approx(float(OLD_LOSSES[row](output, target)), rel=1e-12)


def test_an_edit_that_does_not_fit_is_found() -> None:
    assert edited("a\nb\nc\n", " a\n-b\n+x\n@@\n+y\n c\n") == "a\nx\ny\nc\n"
    with pytest.raises(AssertionError):
        edited("a\n", "-b\n")

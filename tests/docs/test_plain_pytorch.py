"""The page "From plain PyTorch": its script, its edits and its commands, in the order of the page."""

from __future__ import annotations

import difflib
import itertools
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
WEIGHT = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
OLD_LOSSES = (
    lambda output, y: F.cross_entropy(output, y),
    lambda output, y: F.mse_loss(output, y),
    lambda output, y: F.cross_entropy(output, y, ignore_index=-100),
    lambda output, y: F.cross_entropy(output, y, WEIGHT),
)


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


def test_five_pages_lead_from_the_readme_to_a_slurm_job(repository: Path) -> None:
    """The index names them in order, and each links to the next one."""
    assert "(docs/index.md#read-these-five-pages)" in (repository / "README.md").read_text()
    folder = repository / "docs"
    part = (folder / "index.md").read_text().split("## Read these five pages")[1].split("##")[0]
    pages = [folder / link for link in re.findall(r"^\d\. \[.*?\]\((.*?)\)", part, re.MULTILINE)]
    assert len(pages) == 5
    assert PAGE in pages
    assert pages[-1] == folder / "clusters/slurm.md"
    for page, after in itertools.pairwise(pages):
        links = re.findall(r"\]\(([^)#]*\.md)", page.read_text())
        assert after.resolve() in [(page.parent / link).resolve() for link in links], page


def test_plain_pytorch_comes_first(repository: Path) -> None:
    for name, others in (
        ("README.md", r"migration/([\w-]+)\.md"),
        ("docs/index.md", r"migration/([\w-]+)\.md"),
        ("docs/migration/index.md", r"\]\(([\w-]+)\.md"),
        ("mkdocs.yml", r"From .*: migration/([\w-]+)\.md"),
    ):
        found = [
            page for page in re.findall(others, (repository / name).read_text()) if page != "index"
        ]
        assert found[0] == PAGE.stem, name


def test_the_lines_that_change_are_as_few_as_the_index_says(repository: Path) -> None:
    fences = FENCE.findall(PAGE.read_text())
    (old,) = (body for language, body in fences if language == "py")
    new = old
    for language, body in fences:
        if language == "diff" and not NAMED.match(body):
            new = edited(new, body)
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=2, lineterm=""))[2:]
    changed = [sum(line[0] == sign and line[1:].strip() != "" for line in lines) for sign in "+-"]
    index = (repository / "docs/migration/index.md").read_text()
    (row,) = re.findall(r"^\| a script for one process.*$", index, re.MULTILINE)
    assert [int(number) for number in re.findall(r"\| (\d+) ", row)] == changed
    assert len(old.splitlines()) == 40


def test_an_edit_that_does_not_fit_is_found() -> None:
    assert edited("a\nb\nc\n", " a\n-b\n+x\n@@\n+y\n c\n") == "a\nx\ny\nc\n"
    with pytest.raises(AssertionError):
        edited("a\n", "-b\n")

"""Plans that scripts read, and files that are not plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shoal
from helpers.cli import shoal as command


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "No such file"),
        ("{", "not the output of shoal plan --json"),
        ('{"best": [{"layout": "replicate=2"}]}', "not the output of shoal plan --json"),
        ('{"best": []}', "no configuration of this plan fits"),
    ],
)
def test_files_that_are_not_plans(tmp_path: Path, text: str | None, found: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(shoal.StepError) as problem:
        shoal.load_plan(path)
    assert found in problem.value.found


def test_a_plan_with_a_pipeline(tmp_path: Path) -> None:
    done = command("plan", "--model", "llama-7b", "-n", "8", "--batch", "64", "--json", "--top", "100")
    plans = json.loads(done.stdout)
    pipelines = [each for each in plans["best"] if each["schedule"]]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plans | {"best": pipelines[:1]}))
    plan = shoal.load_plan(path)
    assert plan.layout == pipelines[0]["layout"]
    assert plan.schedule == pipelines[0]["schedule"]
    assert plan.micro_batches == pipelines[0]["micro_batches"]


def test_auto_says_how_to_plan() -> None:
    with pytest.raises(shoal.LayoutError, match=r"shoal\.load_plan\('plan\.json'\)\.layout"):
        shoal.init(layout="auto")

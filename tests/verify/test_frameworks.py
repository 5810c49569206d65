"""Scripts in the documented style of each framework: the properties that hold, and known defects."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.audits import audit
from shoal.tools.verify.properties import (
    EVALUATION,
    FILES,
    MICRO_BATCHES,
    ORDER,
    REPEATABLE,
    REPLICAS,
    RESUME,
    SAMPLES,
    SCHEDULE,
    WORLD,
)

pytestmark = pytest.mark.processes
HELD, REFUTED, UNKNOWN = "held", "refuted", "not decidable"
CASES = [
    ("accelerate_script.py", (), "accelerate", {RESUME: REFUTED, SAMPLES: HELD, REPLICAS: HELD}),
    ("lightning_script.py", (), "lightning", {EVALUATION: REFUTED, SAMPLES: HELD, REPLICAS: HELD}),
    (
        "fsdp2_script.py",
        (),
        "torch.distributed.checkpoint",
        {RESUME: HELD, SAMPLES: HELD, REPLICAS: UNKNOWN, WORLD: HELD},
    ),
]
MORE = [
    ("accelerate_script.py", ("seedable",), "accelerate", {RESUME: HELD, ORDER: HELD}),
    ("accelerate_script.py", ("seedable", "no set_epoch"), "accelerate", {RESUME: REFUTED}),
    # Fabric sets the epoch of the sampler, and counts from 0 in each process.
    ("fabric_script.py", (), "lightning.fabric", {RESUME: REFUTED, SAMPLES: HELD, REPLICAS: HELD}),
    ("fsdp2_script.py", ("sum",), "torch.distributed.checkpoint", {RESUME: HELD, WORLD: REFUTED}),
    ("trainer_script.py", (), "transformers", {WORLD: REFUTED, REPLICAS: HELD}),
]


@pytest.mark.parametrize(
    ("script", "args", "module", "expected"),
    [
        *(pytest.param(*case, marks=pytest.mark.full) for case in CASES),
        *(
            pytest.param(*case, marks=pytest.mark.long if "fsdp2" in case[0] else pytest.mark.peers)
            for case in MORE
        ),
    ],
)
def test_a_script_of_each_framework(
    home: Path, script: str, args: tuple[str, ...], module: str, expected: dict[str, str]
) -> None:
    importlib.import_module(module)  # once, for all ranks
    report = audit(home, script, *args, kills=1)
    found = {finding.name: finding.verdict for finding in report.findings}
    assert {name: found[name] for name in expected} == expected
    assert found[REPEATABLE] == HELD
    if script == "trainer_script.py":  # the loss is a mean over tokens
        (cause,) = (finding.cause for finding in report.findings if finding.name == WORLD)
        assert cause is not None
        assert cause.name == "mean of means"


@pytest.mark.long
@pytest.mark.parametrize("args", [(), pytest.param(("layernorm",), marks=pytest.mark.long)])
def test_everything_holds_for_shoal(home: Path, args: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "shoal", "verify", "--json", "--steps", "12", "shoal_script.py"]
    result = subprocess.run([*command, *args], cwd=home, capture_output=True, text=True, check=False)
    findings = json.loads(result.stdout)["findings"]
    unheld = {f["name"]: f["evidence"] for f in findings if f["verdict"] != HELD}
    alone = (
        {} if args else {MICRO_BATCHES: "the script ends with an error with twice the micro-batches"}
    )
    assert unheld == {SCHEDULE: "the script's code stepped no scheduler of torch", **alone}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        "shard",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("tensor", "pipeline", "expert")),
    ],
)
def test_shards_and_stages_are_compared_with_a_full_model(home: Path, layout: str) -> None:
    report = audit(home, "layout_script.py", layout, kills=1)
    found = {finding.name: finding for finding in report.findings}
    assert [finding.name for finding in report.findings if finding.verdict == REFUTED] == []
    for name in (RESUME, SAMPLES, WORLD, MICRO_BATCHES, FILES):
        assert found[name].verdict == HELD, found[name]

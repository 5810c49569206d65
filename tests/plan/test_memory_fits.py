"""The measured memory of random networks is never above the traced one and the margin of shoal plan."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

import shoal
from helpers.measured_memory import measured_peak
from helpers.random_models import random_case
from helpers.ranks import Ranks
from shoal.bench.scaling.models import Workload
from shoal.plan.fit import SMALL_MARGIN, margin_of
from shoal.plan.trace import trace_step

LAYOUTS = {"replicate=1": 60, "replicate=2": 20, "shard=2": 20}


def measured_case(world: shoal.World, layout: str, number: int, folder: str) -> int:
    _, built, plan = random_case(random.Random(number), layout)
    path = Path(folder) / f"{world.rank}.json"
    return measured_peak(world, partial(tuple, built), plan, path)


def allowed(layout: str, number: int) -> float:
    _, built, plan = random_case(random.Random(number), layout)
    traced = trace_step(lambda: Workload(*built), plan).memory.total
    return (1 + margin_of(plan.layout)) * traced + SMALL_MARGIN


@pytest.mark.full
def test_one_process(world: shoal.World, tmp_path: Path) -> None:
    measured = measured_case(world, "replicate=1", 34, str(tmp_path))
    assert measured <= allowed("replicate=1", 34)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hundred_cases(layout: str, tmp_path: Path) -> None:
    above = []
    with Ranks(2 if layout.endswith("2") else 1, layout=layout) as ranks:
        for number in range(LAYOUTS[layout]):
            measured = max(ranks.call(measured_case, layout, number, str(tmp_path)))
            if measured > allowed(layout, number):
                above.append((number, random_case(random.Random(number), layout)[0], measured))
    assert not above

"""The search screens configurations by bounds, and loses none of the best ones."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from shoal.plan.bounds import memory_bytes, step_bounds
from shoal.plan.candidates import find_candidates
from shoal.plan.configuration import FORMATS
from shoal.plan.machines import Machine, find_machine
from shoal.plan.model import Transformer
from shoal.plan.search import Prediction, predict, search_plans


def random_case(seed: int) -> tuple[Transformer, Machine, int, int]:
    """Return a small model, a machine on which some configurations fit, devices and a global batch."""
    draws = random.Random(seed)
    heads = draws.choice([2, 4, 6, 8])
    model = Transformer(
        hidden=heads * draws.choice([32, 64, 128]),
        layers=draws.choice([2, 4, 6, 8, 12]),
        heads=heads,
        kv_heads=draws.choice([0, 2]),
        vocab=draws.choice([500, 5000, 50257]),
        seq=draws.choice([128, 512, 2048]),
        gated=draws.randrange(2),
        flash=draws.randrange(2),
        tied=draws.randrange(2),
        dropout=draws.randrange(2),
    )
    machine = find_machine(draws.choice(["a100-80", "h100-pcie", "rtx-4090", "cpu"]))
    memory = 1.5e9 + model.parameters * draws.choice([2, 8, 20, 100])
    machine = replace(
        machine,
        memory=memory,
        devices=draws.choice([2, 4, 8]),
        network=machine.network * draws.choice([0.01, 1, 10]),
    )
    return model, machine, draws.choice([4, 6, 8, 12, 16]), draws.choice([12, 24, 48])


@pytest.mark.parametrize("seed", range(8))
def test_bounds_are_below_predictions_and_memory_is_exact(seed: int) -> None:
    model, machine, devices, batch = random_case(seed)
    candidates = find_candidates(model, machine, devices, batch, tuple(FORMATS))
    memory, bounds = memory_bytes(model, candidates), step_bounds(model, machine, candidates)
    draws = random.Random(seed)
    for number in draws.sample(range(len(bounds)), min(300, len(bounds))):
        found = predict(model, candidates.plan(number), machine)
        assert memory[number] == pytest.approx(found.memory.total, rel=1e-9), found.plan
        assert bounds[number] <= found.step.total, found.plan
        # A bound that is too low would be true too, but would rule out nothing. Gloo has two rounds.
        if found.plan.layout.pipeline == 1 and machine.cores is None:
            assert bounds[number] > 0.8 * found.step.total, found.plan


@pytest.mark.parametrize("seed", range(100, 104))
def test_the_best_are_those_of_an_exhaustive_search(seed: int) -> None:
    model, machine, devices, batch = random_case(seed)
    candidates = find_candidates(model, machine, devices, batch, ("mixed",))
    every = [predict(model, candidates.plan(n), machine) for n in range(len(candidates.rows))]
    fitting = sorted((e for e in every if e.memory.total <= machine.available), key=order)
    found = search_plans(model, machine, devices, batch)
    assert found.tried == len(every)
    assert found.fitting == len(fitting)
    assert [order(each) for each in found.best] == [order(each) for each in fitting[:5]]
    families = {each.family for each in found.best}
    for each, reason in found.rejected:
        own = [e for e in fitting if e.family == each.family]
        families.add(each.family)
        assert ("does not fit" in reason) == (not own)
        if own:
            assert order(each) == order(own[0])
    assert families == {each.family for each in every}


def order(found: Prediction) -> tuple[float, float]:
    return found.step.total, found.memory.total


def test_rows_are_distinct() -> None:
    model, machine, devices, batch = random_case(3)
    rows = find_candidates(model, machine, devices, batch, tuple(FORMATS)).rows
    assert len(np.unique(rows, axis=0)) == len(rows)

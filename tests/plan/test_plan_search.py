from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

import shoal
from shoal.distributed.layout import AXES, Layout
from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.strategies.pipeline.schedules import timetable
from shoal.tools.plan.machine.machines import Machine, find_machine
from shoal.tools.plan.memory.estimate import estimate_memory
from shoal.tools.plan.search.candidates import find_candidates
from shoal.tools.plan.search.search import Prediction, SearchResult, predict, search_plans
from shoal.tools.plan.time.step_time import estimate_step
from shoal.tools.plan.work.planned_step import FORMATS, PlannedStep, Recompute
from shoal.tools.plan.work.transformer import Transformer, parse_model
from shoal.util.errors import ShoalError, StepError

MODEL = Transformer(hidden=1024, layers=4, heads=8, vocab=5000, seq=512)
NODE = replace(find_machine("a100-80"), devices=4)


def runnable(model: Transformer, devices: int, batch: int) -> Iterator[PlannedStep]:
    """Yield the configurations of a model that Shoal runs, as the strategies decide."""
    layouts = itertools.product((1, 2, 4, 8), repeat=5)
    recomputes: tuple[Recompute, ...] = ("none", "full")
    sums: tuple[Literal["sharded", "whole"], ...] = ("sharded", "whole")
    for tensor, pipeline, shard, context, replicate in layouts:
        layout = Layout(
            tensor=tensor, pipeline=pipeline, shard=shard, context=context, replicate=replicate
        )
        if layout.size != devices or tensor * context > 4 or (pipeline > 1 and context > 1):
            continue
        local = batch // layout.data_size
        choices = itertools.product(
            (micro for micro in range(1, local + 1) if local % micro == 0),
            recomputes,
            SCHEDULES if pipeline > 1 else ("1f1b",),
            (1, 2, 4),
            (True, False) if shard > 1 and pipeline == 1 else (True,),
            sums if shard > 1 and pipeline == 1 else ("sharded",),
        )
        for micro, recompute, schedule, stages, reshard, accumulate in choices:
            plan = PlannedStep(
                layout=layout,
                global_batch=batch,
                micro_batch=micro,
                recompute=recompute,
                sequence_parallel=tensor > 1 and pipeline == 1,
                schedule=schedule,
                stages=stages,
                reshard_after_forward=reshard,
                accumulate=accumulate,
            )
            if supported(model, plan):
                yield plan


def supported(model: Transformer, plan: PlannedStep) -> bool:
    kind, ranks = SCHEDULES[plan.schedule], plan.layout.pipeline
    if ranks == 1:
        return plan.stages == 1
    if model.layers % (ranks * plan.stages) or (kind.splits and plan.recompute != "none"):
        return False
    if (model.tied and not kind.folded) or (plan.schedule == "1f1b" and plan.micro_batches < ranks):
        return False
    if not kind.fixed and plan.stages == 1:
        return False  # a plain schedule in other words
    try:
        timetable(plan.schedule, ranks, plan.micro_batches, plan.stages)
    except StepError:
        return False
    return plan.layout.shard == 1 or plan.stages < 4


@pytest.mark.parametrize("tied", [0, 1])
@pytest.mark.parametrize("memory", [80e9, 3e9])
def test_no_configuration_that_shoal_runs_is_faster(memory: float, tied: int) -> None:
    machine, model = replace(NODE, memory=memory), replace(MODEL, tied=tied)
    every = [predict(model, plan, machine) for plan in runnable(model, 8, 16)]
    fits = [each for each in every if each.fits]
    found = search_plans(model, machine, 8, 16)
    assert found.best[0].time.total == min(each.time.total for each in fits)
    assert all(each.fits for each in found.best)
    plans = {each.plan for each in every}
    assert {each.plan for each in (*found.best, *others(found))} <= plans


def others(found: SearchResult) -> list[Prediction]:
    return [each.best for each in found.rejected if each.best]


def test_strategies_are_those_of_shoal() -> None:
    found = search_plans(parse_model("llama-7b"), replace(NODE, memory=20e9), 16, 64, top=20)
    for each in (*found.best, *others(found)):
        text = each.plan.strategy.replace("plan=…", "plan={}").replace(
            "example_args=…", "example_args=()"
        )
        strategies = eval(text, {"shoal": shoal})
        served = strategies if isinstance(strategies, list) else [strategies]
        axes = {axis for strategy in served for axis in strategy.axes}
        assert {axis for axis in AXES if each.plan.layout.degree(axis) > 1} <= axes


def test_faster_hardware_is_never_slower() -> None:
    machine = find_machine("a100-80")
    model = parse_model("llama-7b")
    slow = search_plans(model, machine, 16, 64, top=100).best
    for rate in ("half", "memory_bandwidth", "link", "network"):
        faster = replace(machine, **{rate: 2 * getattr(machine, rate)})
        for each in slow:
            assert predict(model, each.plan, faster).time.total <= each.time.total, rate


def test_parts_of_a_step_and_of_memory_add_up() -> None:
    found = search_plans(MODEL, NODE, 8, 16).best[0]
    assert min(found.time.parts.values()) >= 0
    assert found.time.total == pytest.approx(sum(found.time.parts.values()))
    assert found.memory.total == pytest.approx(sum(found.memory.kinds.values()))
    assert {sum((each.parameter, each.gradient, each.state)) for each in FORMATS.values()} == {
        18,
        8,
        16,
    }


def test_larger_micro_batches_need_more_memory_and_shards_need_less() -> None:
    plan = PlannedStep(layout=Layout(shard=2), global_batch=64, micro_batch=1)
    totals = [estimate_memory(MODEL, replace(plan, micro_batch=micro)).total for micro in (1, 2, 4, 8)]
    assert totals == sorted(totals)
    shards = [
        estimate_memory(MODEL, replace(plan, layout=Layout(shard=shard))).total for shard in (2, 4, 8)
    ]
    assert shards == sorted(shards, reverse=True)


def test_no_memory_gives_reasons_and_no_best() -> None:
    found = search_plans(parse_model("llama-70b"), find_machine("rtx-4090"), 4, 16)
    assert not found.best
    assert all("does not fit" in each.reason for each in found.rejected)


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(ShoalError, match="--batch 8"):
        search_plans(replace(MODEL, layers=1, heads=1), NODE, 8, 7)


def test_of_the_configurations_of_a_large_model_few_are_predicted() -> None:
    found = search_plans(parse_model("llama-70b"), find_machine("h100-sxm"), 1024, 2048)
    assert found.best
    assert found.evaluated < found.tried / 100


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
    memory = estimate_memory(model, candidates).total
    bounds = estimate_step(model, candidates, machine).total * (1 - 1e-9)
    draws = random.Random(seed)
    for number in draws.sample(range(len(bounds)), min(300, len(bounds))):
        found = predict(model, candidates.plan(number), machine)
        assert memory[number] == pytest.approx(found.memory.total, rel=1e-9), found.plan
        assert bounds[number] <= found.time.total, found.plan
        if found.plan.layout.pipeline == 1:
            assert bounds[number] == pytest.approx(found.time.total, rel=1e-8), found.plan


@pytest.mark.parametrize("seed", range(100, 104))
def test_the_best_are_those_of_an_exhaustive_search(seed: int) -> None:
    model, machine, devices, batch = random_case(seed)
    candidates = find_candidates(model, machine, devices, batch, ("mixed",))
    every = [predict(model, candidates.plan(n), machine) for n in range(len(candidates.rows))]
    fitting = sorted((e for e in every if e.fits), key=order)
    found = search_plans(model, machine, devices, batch)
    assert found.tried == len(every)
    assert found.fitting == len(fitting)
    assert [order(each) for each in found.best] == [order(each) for each in fitting[:5]]
    families = {each.family for each in found.best}
    for each in found.rejected:
        assert each.best
        own = [e for e in fitting if e.family == each.best.family]
        families.add(each.best.family)
        assert ("does not fit" in each.reason) == (not own)
        if own:
            assert order(each.best) == order(own[0])
    assert families == {each.family for each in every}


def order(found: Prediction) -> tuple[float, float]:
    return found.time.total, found.memory.total


def test_rows_are_distinct() -> None:
    model, machine, devices, batch = random_case(3)
    rows = find_candidates(model, machine, devices, batch, tuple(FORMATS)).rows
    assert len(np.unique(rows, axis=0)) == len(rows)

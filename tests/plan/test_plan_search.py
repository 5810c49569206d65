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
from shoal.tools.plan.search.candidates import FixedOptions, find_candidates
from shoal.tools.plan.search.search import Prediction, SearchResult, predict, search_plans
from shoal.tools.plan.time.step_error import step_band
from shoal.tools.plan.time.step_time import bound_step
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
    if seed % 2:
        model = replace(model, experts=4, choices=2)
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
    candidates = find_candidates(model, machine, devices, batch, FixedOptions(precision="any"))
    memory = estimate_memory(model, candidates).total
    bounds = bound_step(model, candidates, machine).total * (1 - 1e-9)
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
    candidates = find_candidates(model, machine, devices, batch)
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


def test_fixed_options_choose_among_all_configurations() -> None:
    model = replace(MODEL, flash=0)
    size = model, NODE, 8, 16
    every = find_candidates(*size)
    plans = [every.plan(number) for number in range(len(every.rows))]
    for asked in (
        {"layout": "shard=4,tensor=2"},
        {"layout": "pipeline=2,shard=4", "schedule": "zbv", "stages": 2},
        {"micro_batch": 2, "recompute": "selective"},
    ):
        fixed = FixedOptions(**asked)
        found = find_candidates(*size, fixed)
        own = [each for each in plans if all(str(getattr(each, a)) == str(v) for a, v in asked.items())]
        assert own
        assert [found.plan(number) for number in range(len(found.rows))] == own, asked


def test_a_layout_or_options_that_are_not_valid() -> None:
    model = replace(MODEL, tied=0)
    for layout, batch, found, fix in (
        ("shard=4", 16, "4 processes", "--layout"),
        ("tensor=2", 16, "2 processes", "--layout tensor=2,replicate=-1"),
        ("shard=-1,tensor=3", 16, "multiple of 3", "--layout"),
        ("tensor=8", 16, "tensor=8 does not divide 4 key and value heads", "use tensor=4"),
        ("pipeline=8", 16, "pipeline=8 has 8 stages for 4 layers", "use pipeline=4"),
        ("context=2,pipeline=4", 16, "does not combine", "one of the two"),
        ("expert=8", 16, "no experts", "experts=8,choices=2"),
        ("shard=8", 12, "do not divide 12 samples", "--batch 16"),
    ):
        with pytest.raises(ShoalError, match=found) as caught:
            search_plans(replace(model, kv_heads=4), NODE, 8, batch, FixedOptions(layout=layout))
        assert fix in caught.value.fix, layout
    with pytest.raises(ShoalError, match="two stages"):
        search_plans(MODEL, NODE, 8, 16, FixedOptions(layout="pipeline=4,shard=2"))
    for fixed, fix in (
        (FixedOptions(layout="shard=8", micro_batch=4), "--micro-batch 1 or 2"),
        (FixedOptions(layout="shard=4,pipeline=2", schedule="zbv", recompute="full"), "compute none"),
        (
            FixedOptions(layout="shard=4,pipeline=2", schedule="1f1b", stages=2),
            "or zbv",
        ),
    ):
        with pytest.raises(ShoalError, match="no configuration") as caught:
            search_plans(model, NODE, 8, 16, fixed)
        assert fix in caught.value.fix
    for fixed, devices, found, fix in (
        (FixedOptions(schedule="interleaved", stages=99), 8, "no configuration", "--stages 2"),
        (FixedOptions(schedule="interleaved"), 1, "no layout with a pipeline", "leave --schedule"),
    ):
        with pytest.raises(ShoalError, match=found) as caught:
            search_plans(model, NODE, devices, 16, fixed)
        assert fix in caught.value.fix


def test_only_products_of_layers_are_in_fp8() -> None:
    model, plan = (
        parse_model("llama-8b"),
        PlannedStep(layout=Layout(shard=8), global_batch=64, micro_batch=2),
    )
    machine = find_machine("h100-sxm")
    mixed, fp8 = (predict(model, replace(plan, precision=each), machine) for each in ("mixed", "fp8"))
    assert fp8.memory == mixed.memory
    before, after = mixed.time.parts, fp8.time.parts
    assert machine.fp8 is not None
    ratio = machine.half / machine.fp8
    assert after["fp8"] == pytest.approx((before["products"] - after["products"]) * ratio)
    assert 0 < after["products"] < 0.2 * before["products"]
    assert after["memory"] > before["memory"]
    assert after["attention"] == before["attention"]
    assert 0.6 < fp8.step_seconds / mixed.step_seconds < 0.9
    for name in ("fp8", "any"):
        fixed = FixedOptions(precision=name, layout="shard=8")
        found = search_plans(model, machine, 8, 64, fixed).best[0].plan.precision
        assert found == "fp8"
    with pytest.raises(ShoalError, match="no rate of FP8"):
        find_candidates(model, NODE, 8, 64, FixedOptions(precision="fp8"))


def test_experts_are_on_the_expert_axis_and_tokens_move_to_them() -> None:
    model = parse_model("mixtral-8x7b,seq=4096")
    machine = find_machine("h100-sxm")
    # 12.9 G parameters are active (Jiang et al. 2024), without the embedding.
    active = model.flops(1) / 6 / model.seq - 2 * model.layers * model.seq * model.hidden
    assert active == pytest.approx(12.75e9, rel=0.005)
    layouts = (Layout(expert=8), Layout(shard=2, expert=4), Layout(shard=8))
    plans = [PlannedStep(layout=each, global_batch=64, micro_batch=1) for each in layouts]
    apart, both, sharded = (predict(model, plan, machine) for plan in plans)
    experts = model.layers * model.expert_weights
    kept = (model.parameters - experts) + experts / 8, model.parameters / 8, model.parameters / 8
    for found, parameters in zip((apart, both, sharded), kept, strict=True):
        assert found.memory.kinds["optimizer"] == pytest.approx(8 * parameters)
    tokens = replace(parse_model("llama-8b,seq=4096,vocab=32000"), ffn=2 * model.width)
    dense = predict(tokens, plans[2], machine).time.parts
    # The products are those of an MLP that is twice as wide.
    assert apart.time.parts["products"] == pytest.approx(dense["products"], rel=0.01)
    assert sharded.time.parts["experts"] == sharded.time.parts["imbalance"] == 0
    assert 0 < both.time.parts["experts"] < apart.time.parts["experts"]
    assert apart.time.parts["imbalance"] > 0
    assert sharded.time.parts["data"] > both.time.parts["data"]
    assert "no step with experts" in step_band(apart.time, machine).reasons[0]
    for layout, fix in (("expert=-1,tensor=2", "the expert axis"), ("expert=16", "use expert=8")):
        with pytest.raises(ShoalError) as caught:
            search_plans(model, machine, 16, 64, FixedOptions(layout=layout))
        assert fix in caught.value.fix


def test_rows_are_distinct() -> None:
    model, machine, devices, batch = random_case(3)
    rows = find_candidates(model, machine, devices, batch, FixedOptions(precision="any")).rows
    assert len(np.unique(rows, axis=0)) == len(rows)

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from shoal.distributed.layout import Layout
from shoal.plan.configuration import FORMATS, PlannedStep, Recompute
from shoal.plan.machines import find_machine
from shoal.plan.memory import estimate_memory
from shoal.plan.model import Transformer, parse_model
from shoal.plan.search import search_plans
from shoal.plan.step_time import estimate_step
from shoal.util.errors import ShoalError

MODEL = Transformer(hidden=1024, layers=4, heads=8, vocab=5000, seq=512)
NODE = replace(find_machine("a100-80"), devices=4)


@pytest.mark.parametrize("memory", [80e9, 4e9, 3e9])
def test_the_best_is_that_of_all_combinations(memory: float) -> None:
    machine = replace(NODE, memory=memory)
    times = []
    degrees = itertools.product((1, 2, 4, 8), repeat=5)
    recomputes: tuple[Recompute, ...] = ("none", "full")
    for tensor, pipeline, shard, context, replicate in degrees:
        layout = Layout(
            tensor=tensor, pipeline=pipeline, shard=shard, context=context, replicate=replicate
        )
        if layout.size != 8 or tensor * context > 4 or pipeline > 4 or (pipeline > 1 and context > 1):
            continue
        local = 16 // layout.data_size
        for micro, recompute in itertools.product((1, 2, 4, 8, 16), recomputes):
            if micro > local or (pipeline > 1 and local // micro < pipeline):
                continue
            plan = PlannedStep(
                layout=layout,
                global_batch=16,
                micro_batch=micro,
                recompute=recompute,
                sequence_parallel=tensor > 1,
            )
            if estimate_memory(MODEL, plan).total <= machine.available:
                times.append(estimate_step(MODEL, plan, machine).total)
    found = search_plans(MODEL, machine, 8, 16)
    assert found.fitting == len(times)
    assert [each.step.total for each in found.best] == sorted(times)[:5]
    assert all(each.memory.total <= machine.available for each in found.best)


@pytest.mark.parametrize("rate", ["half", "memory_bandwidth", "link", "network"])
def test_faster_hardware_is_never_slower(rate: str) -> None:
    machine = find_machine("a100-80")
    model = parse_model("llama-7b")
    slow = search_plans(model, machine, 16, 64, top=100).best
    faster = replace(machine, **{rate: 2 * getattr(machine, rate)})
    for each in slow:
        assert estimate_step(model, each.plan, faster).total <= each.step.total


def test_parts_of_a_step_and_of_memory_add_up() -> None:
    found = search_plans(MODEL, NODE, 8, 16).best[0]
    assert min(vars(found.step).values()) >= 0
    assert found.step.total == pytest.approx(sum(vars(found.step).values()))
    assert found.memory.total == pytest.approx(sum(vars(found.memory).values()))
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
    assert all("does not fit" in reason for _, reason in found.rejected)


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(ShoalError, match="--batch 8"):
        search_plans(replace(MODEL, layers=1, heads=1), NODE, 8, 7)


def test_a_large_model_on_many_devices_takes_less_than_three_seconds() -> None:
    begun = time.process_time()
    assert search_plans(parse_model("llama-70b"), find_machine("h100-sxm"), 1024, 2048).best
    assert time.process_time() - begun < 3

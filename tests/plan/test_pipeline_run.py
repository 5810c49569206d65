"""Simulated pipelines agree with timetables, with closed forms, and with complete simulations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from shoal.distributed.layout import Layout
from shoal.distributed.pipeline_schedules import SCHEDULES, PipelineAction, action_lists
from shoal.strategies.partition.stages import balanced
from shoal.strategies.pipeline.schedules import timetable
from shoal.tools.plan.machine.machines import find_machine
from shoal.tools.plan.memory.estimate import held_micro_batches
from shoal.tools.plan.time import step_time
from shoal.tools.plan.time.step_time import (
    bound_step,
    estimate_step,
    pass_seconds,
    pipeline_bubble,
    simulate_actions,
)
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.stage_layers import balanced_layers, stage_layers
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.errors import StepError


class Stage:
    """The attributes of a stage that torch's schedules read to plan."""

    submod = None
    group_rank = 0
    has_backward = True
    device = "cpu"

    def __init__(self, ranks: int, stages: int) -> None:
        self.group_size = ranks
        self.num_stages = stages
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.stage_index = 0
        self.is_first = self.is_last = True


def torch_action_lists(
    schedule: str, ranks: int, per_rank: int, micro_batches: int
) -> tuple[tuple[PipelineAction, ...], ...]:
    """Return the actions of each rank in torch's schedule. Raise torch's ValueError."""
    kind: Any = get_schedule_class(SCHEDULES[schedule].torchs)
    # The messages between ranks take most of the time.
    bare = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda *_: None})
    stages = [Stage(ranks, ranks * per_rank) for _ in range(per_rank)]
    order = bare(stages, micro_batches).pipeline_order
    return tuple(tuple(works(order[rank])) for rank in range(ranks))


def works(actions: Sequence[Any]) -> Iterator[PipelineAction]:
    """Return those that compute; others move parameters and sum gradients."""
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            kind = part.computation_type.value
            if kind in "FBIW":
                yield PipelineAction(kind, part.stage_index, part.microbatch_index)


A100 = find_machine("a100-80")
MODEL = Transformer(hidden=512, layers=96, heads=8, vocab=64, seq=512, tied=0)
LLAMA_405B = Transformer(
    hidden=16384, layers=126, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq=8192, gated=1, tied=0
)
UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
PIPELINES = [(2, 4), (2, 7), (3, 6), (4, 3), (4, 8), (4, 10), (4, 12), (6, 24), (8, 16)]


def all_plans() -> Iterator[PlannedStep]:
    for schedule, kind in SCHEDULES.items():
        for ranks, count in PIPELINES:
            for stages in (kind.stages,) if kind.fixed else (2, 4):
                plan = PlannedStep(
                    layout=Layout(pipeline=ranks),
                    global_batch=count,
                    micro_batch=1,
                    schedule=schedule,
                    stages=stages,
                )
                try:
                    action_lists(schedule, ranks, stages, count)
                except StepError:
                    continue
                if count >= ranks or schedule != "1f1b":
                    yield plan


PLANS = list(all_plans())


def test_a_simulation_takes_the_time_of_the_timetable() -> None:
    for plan in PLANS:
        shape = plan.layout.pipeline, plan.micro_batches
        table = timetable(plan.schedule, *shape, plan.stages)
        orders = action_lists(plan.schedule, shape[0], plan.stages, shape[1])
        seconds = simulate_actions(orders, [UNITS] * (shape[0] * plan.stages))
        assert seconds == len(table.rows[0]), plan


def test_actions_are_those_of_torch() -> None:
    for schedule, kind in SCHEDULES.items():
        if kind.stages != 2:
            continue
        compared = 0
        for ranks, count in [*PIPELINES, (2, 1), (3, 2), (4, 9), (5, 40)]:
            for stages in (kind.stages,) if kind.fixed else (1, 2, 3):
                shape = schedule, ranks, stages, count
                try:
                    expected = torch_action_lists(*shape)
                except ValueError:
                    with pytest.raises(StepError, match="micro-batches"):
                        action_lists(*shape)
                    continue
                assert action_lists(*shape) == expected, shape
                compared += 1
        assert compared >= 8, schedule


def simulated(plan: PlannedStep) -> float:
    return pipeline_bubble(MODEL, plan, pass_seconds(MODEL, plan, A100))


def most_held(plan: PlannedStep) -> float:
    """Return the micro-batches that a rank holds until the gradients of weights, by the actions."""
    shape = plan.layout.pipeline, plan.stages, plan.micro_batches
    most = 0
    for order in action_lists(plan.schedule, *shape):
        changes = ({"F": 1, "I": 0}.get(each.kind, -1) for each in order)
        most = max(most, *accumulate(changes))
    return most / plan.stages


def test_closed_forms() -> None:
    for plan in PLANS:
        found = simulated(plan)
        assert most_held(plan) == held_micro_batches(plan), plan
        bubble = bound_step(MODEL, plan, A100).parts["bubble"]
        assert found >= bubble * (1 - 1e-9), plan
        even = plan.micro_batches % plan.layout.pipeline == 0
        if plan.schedule in ("1f1b", "gpipe") or (plan.schedule == "interleaved" and even):
            # A pass through the output layer, here a few launches, may delay other stages.
            assert found == pytest.approx(bubble, rel=0.1), plan


def test_stages_have_the_layers_that_a_pipeline_gives_them() -> None:
    for layers, head, stages in product((3, 12, 31, 48), (0.3, 1.0, 2.5, 4.46), range(1, 12)):
        if stages > layers + 1:
            continue
        costs = [*((str(number), 1.0) for number in range(layers)), (str(layers), head)]
        bounds = [0, *map(int, balanced(costs, stages)), layers]
        assert balanced_layers(layers, head, stages) == tuple(b - a for a, b in pairwise(bounds))


def test_fewer_layers_at_the_ends() -> None:
    """Llama 3 405B was trained on 16 ranks with one layer less on the first and on the last."""
    plan = PlannedStep(layout=Layout(pipeline=16), global_batch=64, micro_batch=1)
    assert stage_layers(LLAMA_405B, plan) == (7, *[8] * 14, 7)
    even = replace(plan, split_sends=True)  # as Megatron-LM splits
    assert stage_layers(replace(LLAMA_405B, layers=128), even) == (8,) * 16
    each = pass_seconds(LLAMA_405B, plan, A100)
    others = (126 - 8) * each.total + each.head.total
    assert pipeline_bubble(LLAMA_405B, plan, each) == pytest.approx(others, rel=0.01)


def test_steps_take_at_least_their_bound() -> None:
    """Screening by the bound must not lose the fastest plan, also if stages are unequal."""
    for plan, layers, vocab in product(PLANS, (29, 50), (64, 32_000)):
        if plan.layout.pipeline * plan.stages <= layers + 1:
            model = replace(MODEL, layers=layers, vocab=vocab)
            bound = bound_step(model, plan, A100).total
            assert estimate_step(model, plan, A100).total >= bound * (1 - 1e-9), plan


def repeats(plan: PlannedStep) -> bool:
    """Return whether the schedule supports 7 times as many micro-batches."""
    try:
        action_lists(plan.schedule, plan.layout.pipeline, plan.stages, 7 * plan.micro_batches)
    except StepError:
        return False
    return True


def test_further_rounds_take_the_time_of_the_busiest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for plan in PLANS:
        if plan.micro_batches > 12 or not repeats(plan):
            continue
        long = replace(plan, global_batch=7 * plan.micro_batches)
        found = simulated(long)
        with monkeypatch.context() as patch:
            patch.setattr(step_time, "_ROUNDS", 1000)
            complete = simulated(long)
        if SCHEDULES[plan.schedule].folded:
            # Other ranks than that of the output layer are the busiest at first.
            step = estimate_step(MODEL, long, A100).total
            assert -1e-9 * step <= found - complete <= 0.005 * step, plan
        else:
            assert found == pytest.approx(complete, rel=1e-6, abs=1e-9), plan

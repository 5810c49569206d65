"""The time of a traced step, from segments written by hand and from traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from helpers.cli import shoal as command
from helpers.planned_models import MODELS
from shoal.distributed.layout import Layout
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.machines import Efficiency, Machine
from shoal.tools.plan.search.fit import fit_plan, trace_pipeline
from shoal.tools.plan.search.search import Prediction
from shoal.tools.plan.time.rates import collective_seconds, compute_seconds
from shoal.tools.plan.time.simulation import collective_totals, run_ranks
from shoal.tools.plan.time.step_time import StepParts
from shoal.tools.plan.trace import TracedStep, trace_step
from shoal.tools.plan.work.planned_step import (
    PlannedStep,
    RankGroup,
    Recompute,
    StepCollective,
    Work,
    WorkSegment,
)
from shoal.tools.plan.work.traced_work import TracedWork
from shoal.util.errors import ShoalError

CPU = Machine(
    name="here",
    half=1e12,
    fp32=1e12,
    memory=8e9,
    memory_bandwidth=1e15,
    link=1e9,
    network=1e8,
    devices=1,
    cores=1,
    source="",
    efficiency=Efficiency(
        product=0.5,
        link=1.0,
        network=1.0,
        launch=0.0,
        host=0.0,
        spread=0.0,
        link_latency=0.0,
        network_latency=0.0,
    ),
)
GPU = replace(CPU, cores=None)
SECOND = Work(products=0.5e12)
BYTES = 100_000_000
"""Two nodes sum them in one second: each sends both halves once, with 1e8 bytes/s."""
NEAR = 1e-3
"""The fixed latency of some collectives, in seconds."""


def planned(layout: str, batch: int = 8) -> PlannedStep:
    degrees = Layout.parse(layout)
    return PlannedStep(
        layout=degrees, global_batch=batch, micro_batch=batch // degrees.data_size, precision="fp32"
    )


def segment(moment: str, operation: str = "", wait: str = "update", work: Work = SECOND) -> WorkSegment:
    called = StepCollective(operation=operation, count=BYTES, group=RankGroup(2, 1), wait=wait)
    return WorkSegment(moment=moment, work=work, collective=called if operation else None)


def test_a_cpu_computes_after_it_has_started_an_operation() -> None:
    slow = Work(products=0.5e12, operations=1000)
    rates = {"host": 1e-3, "launch": 1e-3}
    times = {
        machine: compute_seconds(
            slow, planned("replicate=1"), replace(each, efficiency=replace(each.efficiency, **rates))
        ).total
        for machine, each in (("cpu", CPU), ("gpu", GPU))
    }
    assert times["cpu"] == pytest.approx(2.0)  # its host is the device, and launches nothing
    assert times["gpu"] == pytest.approx((2**4 + 1) ** 0.25)


def alone(segments: Sequence[WorkSegment], plan: PlannedStep, machine: Machine) -> StepParts:
    return run_ranks([segments], plan, machine)[0].time


def communication(*segments: WorkSegment, layout: str = "replicate=2", machine: Machine = CPU) -> float:
    return float(alone(segments, planned(layout), machine).parts["communication"])


def test_a_bucket_that_backward_hides_takes_no_time() -> None:
    bucket = segment("backward", "all_reduce")
    rest = segment("backward"), segment("update")
    assert communication(bucket, *rest) == pytest.approx(0.0, abs=NEAR)
    assert communication(bucket, rest[1]) == pytest.approx(1.0, abs=NEAR)
    # The network has one collective after the other.
    assert communication(bucket, bucket, bucket, rest[1]) == pytest.approx(1.0, abs=NEAR)
    short = segment("backward", "all_reduce", work=Work())
    assert communication(bucket, short, *rest) == pytest.approx(1.0, abs=NEAR)


def test_cores_copy_the_bytes_within_a_node() -> None:
    node = replace(CPU, devices=2, cores=2)
    segments = segment("backward", "all_reduce"), segment("backward"), segment("update")
    assert communication(*segments, machine=node) == pytest.approx(0.1, abs=NEAR)


def test_fsdp_blocks_a_cpu_and_prefetches_on_a_gpu() -> None:
    gather = segment("forward", "all_gather", "stream")
    segments = (gather, gather, segment("backward", "reduce_scatter", "stream"), segment("backward"))
    # Gloo reduces and scatters with an all-reduce.
    assert communication(*segments) == pytest.approx(0.5 + 0.5 + 1.0, abs=NEAR)
    # The first is not hidden: no parameters were there. The others take a fifth of the device.
    late = replace(gather, work=Work())
    hidden = 0.2 * (0.5 + 0.5)
    found = communication(late, gather, *segments[2:], machine=GPU)
    assert found == pytest.approx(0.5 + hidden, abs=NEAR)


def test_replicas_of_shards_sum_on_the_stream_that_reduces() -> None:
    scatter = segment("backward", "reduce_scatter", "stream")
    total = segment("backward", "all_reduce", "stream", work=Work())
    hidden = communication(scatter, total, segment("backward"), segment("backward"), machine=GPU)
    assert hidden == pytest.approx(0.2 * 1.5, abs=NEAR)
    blocking = replace(total, work=Work(operations=1))
    assert communication(scatter, blocking, machine=GPU) == pytest.approx(1.5, abs=NEAR)


def test_a_module_waits_for_its_collectives() -> None:
    summed = segment("forward", "all_reduce", "module")
    for machine in (CPU, GPU):
        assert communication(summed, segment("forward"), machine=machine) == pytest.approx(1, abs=NEAR)


def test_devices_that_share_cores_take_turns() -> None:
    node = replace(CPU, devices=4, cores=2)
    times = [
        alone([segment("forward")], planned(f"replicate={ranks}"), node).parts["products"]
        for ranks in (1, 2, 4, 8)
    ]
    assert times == pytest.approx([1.0, 1.0, 2.0, 2.0])


def test_gloo_broadcasts_along_a_tree() -> None:
    group = RankGroup(8, 1)
    # The first rank sends to three others, the first of these to two, and the first of these to one.
    assert collective_seconds("broadcast", BYTES, group, CPU) == pytest.approx(6.0, abs=NEAR)
    assert collective_seconds("broadcast", BYTES, group, GPU) == pytest.approx(1.0, abs=NEAR)


def traced(name: str, layout: str) -> tuple[TracedStep, int]:
    """Return a traced step, and the number of parameters."""
    build, task, data = MODELS[name]()
    model: nn.Module = build()
    count = sum(each.numel() for each in model.parameters())
    return trace_step(lambda: Workload(lambda: model, task, data), planned(layout)), count


@pytest.mark.full
def test_a_trace_has_the_bytes_of_the_parameters_and_copies_gradients_once() -> None:
    step, numbers = traced("MLP", "replicate=4")
    found = collective_totals(step.segments, planned("replicate=4"), CPU)
    tally = 2 * 8  # of loss and count, in the first bucket
    assert found.keys() == {"all_reduce"}
    assert found["all_reduce"].count == pytest.approx(4 * numbers, abs=tally)
    assert {each.collective.wait for each in step.segments if each.collective} == {"update"}

    # On four ranks, a rank has a fourth of the samples. DDP only copies gradients into buckets.
    alone = trace_step(lambda: Workload(*MODELS["MLP"]()), planned("replicate=1", batch=2))
    before, after = (
        sum((each.work for each in one.segments if each.moment == "backward"), Work())
        for one in (alone, step)
    )
    assert 0 < after.traffic - before.traffic <= 12 * numbers + 1000
    assert after.operations < 2 * before.operations

    step, numbers = traced("MLP", "replicate=2,shard=2")
    found = collective_totals(step.segments, planned("replicate=2,shard=2"), CPU)
    sharded = found["reduce_scatter"].count
    assert sharded == pytest.approx(4 * numbers, rel=0.01)  # with the padding of shards
    assert found["all_reduce"].count == pytest.approx(sharded / 2, abs=64)
    groups = {each.collective.group for each in step.segments if each.collective}
    assert groups == {RankGroup(2, 1), RankGroup(2, 2), RankGroup(4, 1)}


def test_operations_in_place_read_and_write() -> None:
    one, other = torch.ones(1000), torch.ones(1000)
    with TracedWork(lambda: "") as found:
        torch._foreach_add_([one], [other])
        one.add_(other)
    assert [each.work.traffic for each in found.segments] == [2 * 3 * 4000]


def message(operation: str, number: int, work: Work = SECOND) -> WorkSegment:
    """Return work before a message, which takes a second, between the two ranks of a pipeline."""
    place = 1 if operation == "send" else 0
    called = StepCollective(
        operation=operation,
        count=BYTES,
        group=RankGroup(2, 1),
        wait="update",
        peer=place,
        message=number,
    )
    return WorkSegment(moment="forward", work=work, collective=called)


def test_a_stage_waits_for_messages_where_it_reads_them() -> None:
    machine = replace(CPU, network=1e8)
    first = [message("send", 0), message("send", 1), segment("forward")]
    last = [message("recv", 0, Work()), message("recv", 1), segment("forward")]
    runs = run_ranks([first, last], planned("pipeline=2"), machine)
    sender, receiver = (each.time for each in runs)
    # Gloo transfers a message after the receiver has asked for it: the first from 1 to 2, the second
    # after the computation from 2 to 3, which needs the first.
    assert (sender.parts["products"], sender.parts["bubble"]) == pytest.approx((3.0, 2.0), abs=NEAR)
    assert (receiver.parts["products"], receiver.parts["bubble"]) == pytest.approx((2.0, 3.0), abs=NEAR)
    assert runs[1].spans[0].start == pytest.approx(2.0, abs=NEAR)
    assert runs[1].spans[-1].end == pytest.approx(5.0, abs=NEAR)
    # On a GPU, the messages arrive at 2 and 3, while the receiver computes.
    sender, receiver = (
        each.time
        for each in run_ranks([first, last], planned("pipeline=2"), replace(machine, cores=None))
    )
    assert (sender.parts["products"], sender.parts["bubble"]) == pytest.approx((3.0, 1.0), abs=NEAR)
    assert (receiver.parts["products"], receiver.parts["bubble"]) == pytest.approx((2.0, 2.0), abs=NEAR)
    # Without the sender, nothing arrives.
    with pytest.raises(RuntimeError, match="wait for messages"):
        run_ranks([[], last], planned("pipeline=2"), machine)


def test_a_stage_that_waits_leaves_its_core() -> None:
    for (
        layout,
        machine,
        ends,
    ) in (  # The first stage has the core for 1 s, and for the 0.2 s of a message whose two ranks share
        # the core; then both compute.
        ("pipeline=2", replace(CPU, devices=2, cores=1), (2.8, 3.0)),
        ("pipeline=2,replicate=2", replace(CPU, devices=4, cores=2), (2.8, 3.0)),
        ("pipeline=2", replace(CPU, devices=2, cores=2), (2.0, 2.1)),
        # Two nodes share no core, and the message takes a second.
        ("pipeline=2", CPU, (2.0, 3.0)),
        ("pipeline=2,replicate=2", replace(CPU, devices=2, cores=1), (4.0, 5.0)),
    ):
        first = [message("send", 0), segment("forward")]
        last = [message("recv", 0, Work()), segment("forward")]
        if "replicate" in layout:
            first, last = (
                [replace(each, collective=apart(each)) for each in one] for one in (first, last)
            )
        runs = run_ranks([first, last], planned(layout), machine)
        assert [each.spans[-1].end for each in runs] == pytest.approx(ends, abs=NEAR), layout
        # Stages that share the core are slower, and the step ends at the same time for all.
        assert runs[0].time.parts["products"] + runs[0].time.parts["bubble"] == pytest.approx(
            ends[1], abs=NEAR
        )
        assert runs[1].time.total == pytest.approx(ends[1], abs=NEAR), layout


def apart(segment: WorkSegment) -> StepCollective | None:
    """Return a message to a stage that is two ranks away."""
    found = segment.collective
    return None if found is None else replace(found, group=RankGroup(2, 2))


def test_stages_meet_in_collectives() -> None:
    short = [segment("backward", "all_reduce", "stream")]
    long = [segment("backward"), *short]
    found = [each.time for each in run_ranks([short, long], planned("pipeline=2"), CPU)]
    assert [each.parts["bubble"] for each in found] == pytest.approx([1.0, 0.0], abs=NEAR)
    assert [each.parts["communication"] for each in found] == pytest.approx([1.0, 1.0], abs=NEAR)


def layers() -> nn.Module:
    parts = [each for _ in range(3) for each in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*parts, nn.Linear(256, 10))


@pytest.mark.parametrize(
    "schedule",
    ["zbv", *(pytest.param(each, marks=pytest.mark.long) for each in ("1f1b", "interleaved"))],
)
def test_stages_of_a_trace_end_together(schedule: str) -> None:
    build, (_, task, data) = layers, MODELS["MLP"]()
    plan = replace(planned("pipeline=2", 4), micro_batch=1, schedule=schedule)
    steps = trace_pipeline(lambda: Workload(build, task, data), plan, CPU)
    slow = replace(CPU, fp32=1e8)
    runs = run_ranks([each.segments for each in steps], steps[0].plan, slow)
    found = [each.time for each in runs]
    alone = [each.total - each.parts["bubble"] for each in found]
    assert found[0].total == pytest.approx(found[1].total)
    assert max(alone) < found[0].total < sum(alone)
    for name in ("send", "recv"):
        totals = [collective_totals(each.segments, plan, CPU)[name].calls for each in steps]
        assert totals[0] >= 4


def test_fused_attention_has_its_products() -> None:
    batch, heads, seq, width = 2, 3, 16, 8
    one = torch.randn(batch, heads, seq, width, requires_grad=True)
    product = 2 * batch * heads * seq * seq * width
    for causal in (False, True):
        with TracedWork(lambda: "") as found:
            result = nn.functional.scaled_dot_product_attention(one, one, one, is_causal=causal)
            result.sum().backward()
        # Two products forward, and five backward, because the scores are computed again.
        total = sum(each.work.attention for each in found.segments)
        assert total == 7 * product / (2 if causal else 1)


def test_the_command_predicts_the_time() -> None:
    asked = ("--layout", "replicate=4", "-n", "4", "--batch", "8", "--precision", "fp32")
    model = "dense:layers=1,width=32,inputs=32"
    done = command("plan", "--model", model, *asked, "--machine", "cpu")
    assert done.exit_code == 0, done.output
    assert "replicate=4 on cpu fits" in done.stdout
    assert "Step of a rank" in done.stdout
    assert "Collectives" in done.stdout
    done = command("plan", "--model", model, *asked, "--machine", "cpu", "--json")
    found = json.loads(done.stdout)["tried"][0]
    assert sum(found["step"].values()) == pytest.approx(found["step_seconds"])
    assert found["collectives"]["all_reduce"]["calls"] == 1


def strategy_step(strategy: object) -> Prediction:
    build, (_, task, data) = layers, MODELS["MLP"]()
    machine = replace(CPU, fp32=1e9, network=1e7)
    return fit_plan(lambda: Workload(build, task, data, strategy), planned("replicate=2"), machine)


@pytest.mark.long
def test_one_of_several_steps_averages_parameters() -> None:
    one, some, many = (strategy_step(shoal.LocalSGD(sync_every=every)) for every in (1, 4, 10**6))
    averaging = one.step_seconds - many.step_seconds
    sent = 4 * sum(parameter.numel() for parameter in layers().parameters())
    assert averaging == pytest.approx(sent / 1e7, rel=1e-3)  # two ranks: all bytes once
    assert some.step_seconds == pytest.approx(many.step_seconds + averaging / 4, rel=1e-3)
    assert many.time.parts["communication"] == pytest.approx(0.0, abs=0.01)
    assert strategy_step(shoal.DiLoCo(sync_every=4)).step_seconds > some.step_seconds


@pytest.mark.parametrize(
    "method",
    [
        "bf16",
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("int8", shoal.PowerSGD(warmup_steps=0), shoal.TopK())
        ),
    ],
)
def test_a_compressed_gradient_has_fewer_bytes(method: Any) -> None:
    usual = strategy_step(None).collectives["all_reduce"].count
    fewer = strategy_step(shoal.DDP(compression=method)).collectives
    assert sum(each.count for each in fewer.values()) < 0.6 * usual


@pytest.mark.parametrize(
    ("layout", "recompute", "found"),
    [("pipeline=2", "none", "pipelines"), ("replicate=2", "full", "--recompute")],
)
def test_options_that_a_given_strategy_does_not_use(
    layout: str, recompute: Recompute, found: str
) -> None:
    build, task, data = MODELS["MLP"]()
    plan = replace(planned(layout), recompute=recompute)
    with pytest.raises(ShoalError, match=f"{found} can't be added"):
        trace_step(lambda: Workload(build, task, data, shoal.DDP()), plan)

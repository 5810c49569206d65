"""Predictions compared with published figures."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import cast

import pytest

from plan_calibration import Case, fit_efficiency
from shoal.distributed.layout import Layout
from shoal.tools.plan.machine.machines import find_machine
from shoal.tools.plan.memory.estimate import (
    PUBLISHED_MARGIN,
    estimate_memory,
    held_micro_batches,
    layer_activations,
)
from shoal.tools.plan.search.search import predict
from shoal.tools.plan.time.known_step import machine_of_step, parse_known_step
from shoal.tools.plan.time.step_error import published_errors, step_band
from shoal.tools.plan.time.step_time import bound_step, estimate_step, pass_seconds, pipeline_bubble
from shoal.tools.plan.work.planned_step import PlannedStep, Recompute
from shoal.tools.plan.work.transformer import Transformer, parse_model
from shoal.util.errors import ShoalError

A100 = find_machine("a100-80")
LLAMA_405B = "llama-70b,hidden=16384,layers=126,heads=128,kv_heads=8,ffn=53248,vocab=128256,seq=8192"

# Narayanan et al. 2021 (arXiv:2104.04473), Table 1; settings of their recipes; seconds from the TFLOP/s
# by their equation 3: heads, hidden, layers, tensor, pipeline, replicas, stages per rank, batch,
# micro-batch, overlapped gradients, seconds.
MEGATRON = [
    (24, 2304, 24, 1, 1, 32, 1, 512, 16, True, 3.528),
    (32, 3072, 30, 2, 1, 32, 1, 512, 16, True, 3.697),
    (32, 4096, 36, 4, 1, 32, 1, 512, 16, True, 3.696),
    (48, 6144, 40, 8, 1, 32, 1, 1024, 8, True, 9.399),
    (64, 8192, 48, 8, 2, 32, 1, 1536, 4, False, 14.453),
    (80, 10240, 60, 8, 4, 32, 3, 1792, 2, False, 16.058),
    (96, 12288, 80, 8, 8, 24, 2, 2304, 2, False, 24.817),
    (128, 16384, 96, 8, 16, 15, 2, 2160, 1, False, 37.614),
    (128, 20480, 105, 8, 35, 9, 3, 2520, 1, False, 54.085),
    (160, 25600, 128, 8, 64, 6, 1, 3072, 1, False, 102.63),
]

# Korthikanti et al. 2022 (arXiv:2205.05198), Table 5: heads, hidden, layers, pipeline, stages per rank,
# batch, micro-batch, seconds with full and with selective recomputation.
KORTHIKANTI = [
    (64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10),
    (96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    (128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83),
    (160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49),
]

# The same, Figure 1: heads, hidden, layers, pipeline, stages per rank, micro-batch, GiB of activations
# without recomputation, and with selective recomputation and sequence parallelism.
ACTIVATIONS = [
    (64, 6144, 48, 1, 1, 4, 59.25, 9.5625),
    (96, 12288, 96, 8, 3, 1, 66.84375, 12.3515625),
    (128, 20480, 105, 35, 3, 1, 114.0234375, 23.076171875),
    (160, 25600, 128, 64, 1, 1, 131.25, 26.5625),
]


def gpt(heads: int, hidden: int, layers: int) -> Transformer:
    return Transformer(hidden=hidden, layers=layers, heads=heads, vocab=51200, seq=2048, flash=0)


def megatron() -> tuple[list[Case], list[float]]:
    cases: list[Case] = []
    for heads, hidden, layers, tensor, pipeline, replicas, stages, batch, micro, overlap, _ in MEGATRON:
        plan = PlannedStep(
            layout=Layout(tensor=tensor, pipeline=pipeline, replicate=replicas),
            global_batch=batch,
            micro_batch=micro,
            recompute="full",
            stages=stages,
            overlap=overlap,
            split_sends=True,
            precision="fp16",
        )
        cases.append((gpt(heads, hidden, layers), plan, A100))
    return cases, [row[-1] for row in MEGATRON]


def korthikanti() -> tuple[list[Case], list[float]]:
    cases: list[Case] = []
    measured = []
    for heads, hidden, layers, pipeline, stages, batch, micro, *seconds in KORTHIKANTI:
        for recompute, time in zip(("full", "selective"), seconds, strict=True):
            plan = PlannedStep(
                layout=Layout(tensor=8, pipeline=int(pipeline)),
                global_batch=int(batch),
                micro_batch=int(micro),
                recompute=cast("Recompute", recompute),
                sequence_parallel=recompute == "selective",
                stages=int(stages),
                precision="fp16",
                tensor_overlap=True,
                split_sends=True,
            )
            cases.append((gpt(int(heads), int(hidden), int(layers)), plan, A100))
            measured.append(time)
    return cases, measured


def errors(cases: list[Case], seconds: list[float]) -> list[float]:
    pairs = zip(cases, seconds, strict=True)
    return [abs(estimate_step(*case).total / measured - 1) for case, measured in pairs]


def test_steps_from_data_sheets() -> None:
    for cases, seconds in (megatron(), korthikanti()):
        assert statistics.mean(errors(cases, seconds)) < 0.03


def test_simulated_schedules_agree_with_the_closed_form() -> None:
    for model, plan, machine in (*megatron()[0], *korthikanti()[0]):
        if 1 < plan.layout.pipeline <= 16:
            schedule = "1f1b" if plan.stages == 1 else "interleaved"
            simulated = replace(plan, schedule=schedule)
            passes = pass_seconds(model, simulated, machine)
            found = pipeline_bubble(model, simulated, passes)
            bubble = bound_step(model, plan, machine).parts["bubble"]
            assert found == pytest.approx(bubble, rel=0.01)


def test_steps_of_megatron_with_one_parameter_fitted_on_the_other_rows() -> None:
    cases, seconds = megatron()
    held = []
    for out in range(len(cases)):
        rest = [number for number in range(len(cases)) if number != out]
        fitted = fit_efficiency(
            [cases[number] for number in rest], [seconds[number] for number in rest], ["product"]
        )
        model, plan, machine = cases[out]
        held += errors([(model, plan, replace(machine, efficiency=fitted))], [seconds[out]])
    assert statistics.mean(held) < 0.03


def test_the_band_holds() -> None:
    for cases, seconds in (megatron(), korthikanti()):
        bands = [step_band(estimate_step(*case), case[2]) for case in cases]
        inside = [each.low <= time <= each.high for each, time in zip(bands, seconds, strict=True)]
        assert statistics.mean(inside) >= 0.75


LLAMA = parse_model("llama-7b")
STEP = "layout=shard=8 batch=64 micro_batch=2"


def test_bands_are_wide_where_little_is_known() -> None:
    plan, _ = parse_known_step(f"1 {STEP}", LLAMA, A100)
    ratios = []
    for machine in (A100, replace(A100, name="mine"), find_machine("mi300x")):
        step = estimate_step(LLAMA, plan, machine)
        band = step_band(step, machine)
        assert band.low * band.high == pytest.approx(step.total**2)
        ratios.append(band.high / step.total)
    assert ratios[0] == ratios[1] < 1.15 < ratios[2] < 1.4
    assert band.reasons == ("no step on mi300x is published",)
    small = parse_model("gpt2,layers=2,hidden=256,heads=4")
    step = estimate_step(small, replace(plan, micro_batch=1), A100)
    assert any("wait for the host" in reason for reason in step_band(step, A100).reasons)
    many = replace(plan, layout=Layout(replicate=512, shard=8), global_batch=64 * 512)
    step = estimate_step(LLAMA, many, A100)
    band = step_band(step, A100)
    assert band.high / step.total > 1.18
    assert band.reasons == ("clusters with this many devices differ",)


def test_a_known_step_moves_other_predictions() -> None:
    plan, _ = parse_known_step(f"1 {STEP}", LLAMA, A100)
    before = estimate_step(LLAMA, plan, A100).total
    machine = machine_of_step(LLAMA, plan, A100, 1.2 * before)
    # A step has an error of its own too.
    assert 1.08 < estimate_step(LLAMA, plan, machine).total / before < 1.2
    # If it is far off, its source is, as with a slower network.
    far = machine_of_step(LLAMA, plan, A100, 1.4 * before)
    assert estimate_step(LLAMA, plan, far).total == pytest.approx(1.4 * before, rel=0.02)
    other = replace(plan, layout=Layout(replicate=2, shard=8), global_batch=128)
    moved, usual = (estimate_step(LLAMA, other, each) for each in (machine, A100))
    assert moved.total > 1.07 * usual.total
    bands = step_band(moved, machine), step_band(usual, A100)
    known, published = (band.high / band.low for band in bands)
    assert known < published
    # The known step takes the same time by its MFU.
    flops = LLAMA.flops(64) / (before * 8 * A100.half)
    _, seconds = parse_known_step(f"{100 * flops:.4f}% {STEP}", LLAMA, A100)
    assert seconds == pytest.approx(before, rel=1e-3)
    with pytest.raises(ShoalError, match="no plausible efficiency"):
        machine_of_step(LLAMA, plan, A100, 20 * before)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast layout=shard=8 batch=64",
        "7.4 batch=64",
        "0 layout=shard=8 batch=64",
        "7.4 layout=shard=8 batch=63",
        "7.4 layout=shard=8 batch=64 micro_batch=0",
        "7.4 layout=shard=8 batch=64 recompute=some",
        "7.4 layout=shard=8 batch=64 gpus=8",
        "7.4 layout=shard=8 batch=64 batch=32",
        "7.4 layout=shard=-1 batch=64",
        "7.4 layout=tensor=7 batch=64",
        "7.4 layout=expert=8 batch=64",
        "7.4 layout=shard=8 batch=64 stages=4",
        "7.4 layout=pipeline=64 batch=64 micro_batch=1",
        "7.4 layout=pipeline=8 batch=64 micro_batch=1 schedule=zbv stages=4",
    ],
)
def test_wrong_known_steps(text: str) -> None:
    with pytest.raises(ShoalError, match="known-step-time"):
        parse_known_step(text, LLAMA, A100)


def test_machines_with_published_steps_are_in_the_catalogue() -> None:
    assert all(published_errors().knows(find_machine(name)) for name in published_errors().machines)


def test_activations_of_korthikanti() -> None:
    for heads, hidden, layers, pipeline, stages, micro, *published in ACTIVATIONS:
        plain = PlannedStep(
            layout=Layout(tensor=8, pipeline=pipeline),
            global_batch=64 * pipeline,
            micro_batch=micro,
            stages=stages,
            split_sends=True,
        )
        selective = replace(plain, recompute="selective", sequence_parallel=True)
        model = gpt(heads, hidden, layers)
        found = [
            held_micro_batches(plan) * (layers // pipeline) * layer_activations(model, plan)[0] / 2**30
            for plan in (plain, selective)
        ]
        assert found == pytest.approx(published, rel=1e-4), (heads, hidden)


# torchtitan on H100, benchmarks/llama3_h100_202412_torchtitan.md and Liang et al. 2024
# (arXiv:2410.06511): dimensions of Llama 3, layout, samples in the local batch, bytes of the loss per
# score (the last rank of a pipeline kept the outputs of all micro-batches), GiB reserved.
RESERVED = [
    ("llama-8b,seq=32768", "shard=8", 1, 12, 83.9),
    ("llama-70b,vocab=128256,seq=8192", "shard=32,tensor=8", 16, 12, 71.9),
    (LLAMA_405B, "pipeline=8,shard=8,tensor=8", 32, 12 + 8 * 4, 82.5),
    (LLAMA_405B, "pipeline=16,shard=4,tensor=8", 32, 12 + 16 * 8, 78.0),
]


@pytest.mark.parametrize("row", RESERVED)
def test_memory_with_recomputation(row: tuple[str, str, int, int, float]) -> None:
    text, layout, local, scores, gib = row
    mesh = Layout.parse(layout)
    plan = PlannedStep(
        layout=mesh,
        global_batch=local * mesh.shard,
        micro_batch=local // mesh.pipeline,
        recompute="full",
        sequence_parallel=mesh.tensor > 1,
        split_sends=mesh.pipeline > 1,
        score_bytes=scores,
        fused=True,
    )
    ratio = estimate_memory(parse_model(text), plan).total / (gib * 2**30)
    assert 1 / (1 + PUBLISHED_MARGIN) < ratio < 1.1


def test_all_forward_passes_keep_the_logits_of_all_micro_batches() -> None:
    # A trace of shoal.Pipeline has 114.6 bytes per score of a micro-batch, and 8 with a backward pass.
    model = Transformer(hidden=256, layers=2, heads=4, vocab=8192, seq=128, tied=0, dropout=0)
    plan = PlannedStep(layout=Layout(pipeline=2), global_batch=64, micro_batch=4, schedule="gpipe")
    kinds = estimate_memory(model, plan).kinds
    scores = 4 * 128 * 8192
    assert (kinds["activations"] + kinds["logits"]) / scores == pytest.approx(114.6, rel=0.1)
    one = estimate_memory(model, replace(plan, schedule="1f1b")).kinds["logits"]
    assert one == 14 * scores


def test_a_plan_without_its_margin_is_tight() -> None:
    """DeepSpeed trained GPT-2 with 13B on 32 V100 with 24 samples per GPU, and had no memory for 32."""
    model = parse_model("gpt3-175b,hidden=5120,layers=40,heads=128,seq=512,flash=0")
    found = [
        predict(
            model,
            PlannedStep(
                layout=Layout(shard=32),
                global_batch=32 * local,
                micro_batch=local,
                recompute="full",
                precision="fp16",
                split_sends=True,
            ),
            find_machine("v100-32"),
        )
        for local in (16, 24, 32)
    ]
    assert [(each.fits, each.tight) for each in found] == [(True, False), (False, True), (False, False)]
    assert found[1].verdict.startswith("is tight: 28")


@pytest.mark.parametrize(
    ("name", "gpus", "gigabits", "tokens"), [("a100-80", 128, 400, 4550), ("h100-sxm", 96, 800, 9600)]
)
def test_compiled_steps(name: str, gpus: int, gigabits: int, tokens: int) -> None:
    """Llama 2 with 7B by fms-fsdp: tokens per second and GPU, with torch.compile."""
    machine = replace(find_machine(name), network=gigabits * 1e9 / 8 / 8)
    plan = PlannedStep(
        layout=Layout(shard=8, replicate=gpus // 8),
        global_batch=2 * gpus,
        micro_batch=2,
        precision="fp16",
        fused=True,
    )
    step = estimate_step(LLAMA, plan, machine)
    assert step.parts["overhead"] == 0
    assert 2 * LLAMA.seq / step.total == pytest.approx(tokens, rel=0.08)

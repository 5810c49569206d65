"""Published step times as rows that `plan_accuracy.py` predicts.

Tables are CSV files that Shoal does not ship. A table is one source, machine and framework.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.distributed.layout import Layout
from shoal.tools.plan.machine.machines import Efficiency, Machine, find_machine
from shoal.tools.plan.memory.estimate import estimate_memory
from shoal.tools.plan.time.step_time import estimate_step
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.transformer import Transformer, parse_model

Cells = dict[str, str]


@dataclass(frozen=True)
class Row:
    """A measured step. `workload` is the same for configurations that compete.

    `recomputed` is the part of the layers that is recomputed in full, in a plan without recomputation.
    `memory` are the measured bytes that a rank's allocator reserves, infinite if they did not suffice,
    0 if the table does not say.
    """

    table: str
    model: Transformer
    plan: PlannedStep
    machine: Machine
    seconds: float
    workload: tuple[Any, ...] = ()
    recomputed: float = 0.0
    memory: float = 0.0


def predicted_memory(row: Row) -> float:
    """Return the predicted bytes of a rank."""
    model, plan = row.model, row.plan
    plain = float(estimate_memory(model, plan).total)
    if not row.recomputed:
        return plain
    full = float(estimate_memory(model, replace(plan, recompute="full")).total)
    if not row.table.startswith("torchtitan"):
        return plain + row.recomputed * (full - plain)
    # torchtitan keeps the results of attention and of every second product: of queries and values, of
    # one of the two into the MLP, and of the one out of it.
    columns = 2.5 * model.hidden + model.qkv / 2 + model.width
    return full + float(plan.tokens(model.seq) * model.layers * columns * plan.numbers.activation)


def predicted(row: Row, efficiency: Efficiency | None = None) -> float:
    """Return the predicted seconds of a step, with the machine's efficiencies or others."""
    machine = row.machine if efficiency is None else replace(row.machine, efficiency=efficiency)
    plain = float(estimate_step(row.model, row.plan, machine).total)
    if not row.recomputed:
        return plain
    full = estimate_step(row.model, replace(row.plan, recompute="full"), machine).total
    return plain + row.recomputed * (float(full) - plain)


def _cells(file: Path) -> list[Cells]:
    with file.open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _megatron(
    table: str, seconds: str, workload: Sequence[str], options: Callable[[Cells], Any], file: Path
) -> Iterable[Row]:
    """Read Megatron's GPTs on A100; `options` are those of the planned step in a row."""
    for each in _cells(file):
        number = {key: int(value) for key, value in each.items() if value.isdigit()}
        model = Transformer(
            hidden=number["hidden"],
            layers=number["layers"],
            heads=number["heads"],
            seq=number["seq"],
            vocab=number.get("vocab", 50257),
            flash=0,
        )
        plan = PlannedStep(
            layout=Layout(tensor=number["tp"], pipeline=number["pp"], replicate=number["dp"]),
            global_batch=number["global_batch"],
            micro_batch=number["microbatch"],
            stages=number.get("virtual_stages", 1),
            split_sends=True,
            precision="fp16",
            **options(each),
        )
        measured = float(each[seconds]) / (1e3 if seconds.endswith("_ms") else 1)
        competing = tuple(each[name] for name in workload)
        yield Row(table, model, plan, find_machine("a100-80"), measured, competing)


def _llm_foundry(file: Path) -> Iterable[Row]:
    for each in _cells(file):
        if each["gpu"] not in ("a100_80gb", "a100_40gb"):
            continue
        model = Transformer(
            hidden=int(each["d_model"]),
            layers=int(each["n_layers"]),
            heads=int(each["n_heads"]),
            ffn=int(each["ffn"]),
            vocab=int(each["vocab"]),
            seq=int(each["seq_len"]),
            dropout=0,
        )
        gpus = int(each["gpus"])
        plan = PlannedStep(
            layout=Layout(shard=gpus) if each["sharding"] == "FULL_SHARD" else Layout(replicate=gpus),
            global_batch=int(each["global_batch_seqs"]),
            micro_batch=int(each["microbatch_per_gpu"]),
            recompute="full" if each["act_ckpt"] == "True" else "none",
            precision="half" if each["mp_mode"] == "PURE" else "mixed",
            score_bytes=2,  # a fused loss writes gradients over the scores
        )
        workload = (each["model"], model.seq, gpus, each["gpu"], each["global_batch_tokens"])
        machine = find_machine(each["gpu"].replace("_", "-").removesuffix("gb"))
        seconds = float(each["step_time_s_derived"])
        yield Row(f"llm-foundry, {machine.name}", model, plan, machine, seconds, workload)


_H100 = 95 * 2**30
"""Bytes of memory of torchtitan's H100."""
_TORCHTITAN = {"A100": "a100-80", "H100": "h100-sxm", "H200": "h200"}


def _torchtitan(file: Path, *, memory: bool = False) -> Iterable[Row]:
    """Read Llama 3 with FSDP2; its H100 have slower memory, and a limit of 500 W of 700 W.

    Pipelines split the local batch into as many micro-batches as ranks. FSDP shards over the context
    axis too. Of rows in FP8, steps with a scale per row and with ring attention, which no plan has, are
    left out, and memory without its recomputation.
    """
    for each in _cells(file):
        fp8 = "float8" in each["technique"]
        special = each["cp"] != "1" or "rowwise" in each["technique"] or not each["local_batch"]
        if fp8 and (not each["act_ckpt"] if memory else special):
            continue
        number = {key: int(value) for key, value in each.items() if value.isdigit()}
        model = Transformer(
            **{key: number[key] for key in ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab")},
            seq=number["seq"],
            gated=1,
            tied=0,
            dropout=0,
        )
        gpu = each["gpu"].split("-")[0]
        machine = find_machine(_TORCHTITAN[gpu])
        if gpu == "H100":
            # At the limit of power, the clock falls with its third root.
            rates = machine.efficiency
            rates = replace(rates, product=rates.product * (500 / 700) ** (1 / 3))
            machine = replace(machine, memory=_H100, memory_bandwidth=2.4e12, efficiency=rates)
        local, shard, tensor, pipeline = (number[key] for key in ("local_batch", "fsdp", "tp", "pp"))
        context, tokens = number["cp"], local * shard * number["seq"] / number["gpus"]
        if shard == 1 < context:
            shard, context = context, 1
            model = replace(model, seq=model.seq // shard)
        full = each["act_ckpt"] == "full"
        plan = PlannedStep(
            layout=Layout(shard=shard, tensor=tensor, context=context, pipeline=pipeline),
            global_batch=local * shard,
            micro_batch=local // pipeline,
            stages=2 if each["schedule"].startswith("Interleaved") else 1,
            recompute="full" if full else "none",
            precision="fp8" if fp8 else "mixed",
            sequence_parallel=tensor > 1,
            split_sends=memory and pipeline > 1,
            # Pipelines keep the outputs of all micro-batches, and a joined copy, at first in float32.
            score_bytes=12
            + (pipeline > 1) * pipeline * 2 * (4 if each["source"].startswith("arXiv") else 2),
            fused="compile" in each["technique"],
        )
        yield Row(
            f"torchtitan{' in FP8' * fp8}, {machine.name}",
            model,
            plan,
            machine,
            tokens / float(each["tokens_per_s_per_gpu"]),
            # "selective op" recomputes every second product, "selective layer" every second layer.
            recomputed=0.5 if "selective" in each["act_ckpt"] else 0.0,
            memory=float(each["memory_gib"] or 0) * 2**30,
        )


_LLAMA_34B = "llama-70b,hidden=8192,layers=48,heads=64,kv_heads=8,ffn=22016"


def _fms(file: Path) -> Iterable[Row]:
    """Read Llama 2 with FSDP, whose gradients are summed in 16 bits."""
    for each in _cells(file):
        name = _LLAMA_34B if each["model"] == "34b" else f"llama-{each['model']}"
        gpus, local, seq = int(each["gpus"]), int(each["batch_per_gpu"]), int(each["seq"])
        layout = Layout(shard=gpus)
        if each["sharding"] == "HSDP":
            layout = Layout(shard=8, replicate=gpus // 8)
        plan = PlannedStep(
            layout=layout, global_batch=local * gpus, micro_batch=local, precision="fp16", fused=True
        )
        machine = find_machine("h100-sxm" if each["gpu"].startswith("H100") else "a100-80")
        bits = float(each["interconnect"].removesuffix("Gb/s"))
        yield Row(
            f"fms-fsdp, {machine.name}",
            parse_model(name),
            plan,
            replace(machine, network=bits * 1e9 / 8 / machine.devices),
            local * seq / float(each["tokens_per_s_per_gpu"]),
            # Hardware FLOP/s have the recomputed third of a step's.
            recomputed=min(1.0, 3 * (float(each["hfu"]) / float(each["mfu"]) - 1)),
        )


def _colossalai(file: Path) -> Iterable[Row]:
    """Read Llama with ZeRO-2; the rows with a pipeline do not say its micro-batch."""
    for each in _cells(file):
        if not each["parallelism"].startswith("zero2"):
            continue
        gpus, local = int(each["gpus"]), int(each["batch_per_dp"])
        model = parse_model(f"llama-{each['model'].lower()},seq={each['seq']}")
        plan = PlannedStep(
            layout=Layout(shard=gpus),
            global_batch=local * gpus,
            micro_batch=local,
            recompute="full",
            precision="fp16",
            reshard_after_forward=False,
        )
        machine = find_machine(each["gpu"].lower())
        seconds = local * gpus / float(each["samples_per_s"])
        memory = float(each["peak_mem_mib"]) * 2**20
        # One row has more than the device that it names.
        memory = memory if memory < machine.memory else 0.0
        yield Row(f"Colossal-AI, {machine.name}", model, plan, machine, seconds, memory=memory)


def _fsdp_paper(file: Path) -> Iterable[Row]:
    """Read minGPT with 175B on 128 A100 with batches of 1 and 2, given as TFLOP/s."""
    model = parse_model("gpt3-175b,vocab=50000,flash=0")
    found = [each for each in _cells(file) if each["metric"] == "TFLOPS/GPU"]
    for local, each in enumerate(found, 1):
        plan = PlannedStep(
            layout=Layout(shard=128), global_batch=local * 128, micro_batch=local, recompute="full"
        )
        machine = replace(find_machine("a100-80"), network=2e12 / 8 / 8)
        seconds = model.flops(local) * 4 / 3 / (float(each["value"]) * 1e12)
        yield Row("FSDP paper, a100-80", model, plan, machine, seconds)


def _bmtrain(file: Path) -> Iterable[Row]:
    """Read GPT-2 with 13B of Megatron-LM and DeepSpeed on 32 V100, whose batches are per GPU.

    Assumed are 32 GB and recomputation, without which no row would fit.
    """
    model = parse_model("gpt3-175b,hidden=5120,layers=40,heads=128,seq=512,flash=0")
    machine = find_machine("v100-32")
    for each in _cells(file):
        zero, _, rest = each["system"].partition("(mp=")
        if not rest:
            continue
        tensor = int(rest.rstrip(")"))
        micro = int(each["batch_size"]) * tensor
        plan = PlannedStep(
            layout=Layout(shard=32 // tensor, tensor=tensor),
            global_batch=micro * 32 // tensor,
            micro_batch=micro,
            recompute="full",
            precision="fp16",
            reshard_after_forward=zero == "ZeRO3",
            split_sends=True,
        )
        memory = math.inf if each["samples_per_gpu_s"] == "OOM" else 0.0
        yield Row("BMTrain, v100-32", model, plan, machine, math.nan, memory=memory)


ONE_NODE = "vTrain, a100-80"
_READERS: dict[str, Callable[[Path], Iterable[Row]]] = {
    "megatron2021_table1.csv": partial(
        _megatron,
        "Megatron-LM 2021, a100-80",
        "iter_time_s_derived",
        ("model",),
        lambda each: {"recompute": "full", "overlap": each["ddp_impl"] == "torch"},
    ),
    "korthikanti2022_table5.csv": partial(
        _megatron,
        "Megatron-LM 2022, a100-80",
        "iter_time_s",
        ("model", "dp"),
        lambda each: {
            "recompute": each["recompute"],
            "sequence_parallel": each["sequence_parallel"] == "yes",
            "tensor_overlap": True,
            "overlap": False,
        },
    ),
    "vtrain_single_node_a100.csv": partial(
        _megatron,
        ONE_NODE,
        "iter_time_ms",
        ("hidden", "layers", "seq", "gpus", "global_batch"),
        lambda each: {"recompute": "none", "overlap": False},
    ),
    "mosaicml_a100.csv": _llm_foundry,
    "torchtitan.csv": _torchtitan,
    "ibm_fms_fsdp.csv": _fms,
    "colossalai_readme.csv": _colossalai,
    "ddp_fsdp_text_figures.csv": _fsdp_paper,
}


def read_memory(directory: Path) -> list[Row]:
    """Return the rows of torchtitan, also in 8 bits, and those of a table that ran out of memory."""
    readers: dict[str, Callable[[Path], Iterable[Row]]] = {
        "torchtitan.csv": partial(_torchtitan, memory=True),
        "bmtrain_v100_13b.csv": _bmtrain,
    }
    files = {directory / name: read for name, read in readers.items()}
    return [row for file, read in files.items() if file.exists() for row in read(file)]


def read_tables(directory: Path) -> dict[str, list[Row]]:
    """Return the rows of all tables of a directory by table."""
    found: dict[str, list[Row]] = {}
    for name, read in _READERS.items():
        if (file := directory / name).exists():
            for row in read(file):
                found.setdefault(row.table, []).append(row)
    return found

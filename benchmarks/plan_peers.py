"""Step times that other planners predict, for benchmarks/plan_accuracy.py --peers DIR.

DIR has clones of calculon-ai/calculon, cli99/llm-analysis and meta-pytorch/autoparallel, in directories
of the names `calculon`, `llm-analysis` and `autoparallel`; those that are missing are left out.
llm-analysis needs the package `fire`. Each is used as its documentation says, with the files and the
defaults that it ships:

- Calculon: its system file a100_80g, with the bandwidth of the A100 40GB for those rows and without its
  check of memory. It knows neither output layers nor fused attention, and shards the optimizer only.
- llm-analysis: its GPU files. Its efficiency of FLOPs is an input, by default 1.
- AutoParallel: its cost of each operation and collective. It has no time of a step: operations and
  collectives are added up here, with the bubble of the pipeline, and without overlap.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.memory.estimate import stage_parameters
from shoal.tools.plan.work.layers import layer_products
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.transformer import Transformer

Predict = Callable[[Transformer, PlannedStep, Machine], float]
EFFICIENCIES = tuple(number / 100 for number in range(30, 101, 2))
"""Efficiencies of FLOPs that are tried for llm-analysis."""


def commit(folder: Path) -> str:
    """Return the commit of a clone, shortened."""
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=10", "HEAD"],
        check=False,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "no commit"


def find_peers(folder: Path) -> dict[str, tuple[str, list[Predict]]]:
    """Return for each planner its commit, and its predictions: one for each value of its input."""
    makers = {"calculon": calculon, "llm-analysis": llm_analysis, "autoparallel": autoparallel}
    found = {}
    for name, make in makers.items():
        clone = folder / name
        if not clone.is_dir():
            print(f"{name}: no clone at {clone}")
            continue
        try:
            found[name] = commit(clone), make(clone)
        except ImportError as error:
            print(f"{name} does not run: {error}")
    return found


def calculon(clone: Path) -> list[Predict]:
    sys.path.insert(0, str(clone))
    llm = importlib.import_module("calculon.llm.llm").Llm
    system_of = importlib.import_module("calculon.system").System
    log = logging.getLogger("calculon")
    shipped = json.loads((clone / "systems" / "a100_80g.json").read_text())

    def predict(model: Transformer, plan: PlannedStep, machine: Machine) -> float:
        layout = plan.layout
        data = layout.replicate * layout.shard
        inside = 0 if layout.size <= 8 else 1
        full = plan.recompute == "full"
        cfg = shipped | {"mem1": shipped["mem1"] | {"GiB": 10**6}}
        if machine.name == "a100-40":
            cfg["mem1"]["GBps"] = 1555
        app = llm.Application(
            {
                "hidden": model.hidden,
                "feedforward": model.width,
                "seq_size": model.seq,
                "attn_heads": model.heads,
                "attn_size": model.hidden // model.heads,
                "num_blocks": model.layers,
            }
        )
        execution = {
            "num_procs": layout.size,
            "tensor_par": layout.tensor,
            "pipeline_par": layout.pipeline,
            "data_par": data,
            "tensor_par_net": 0,
            "pipeline_par_net": inside,
            "data_par_net": inside,
            "batch_size": plan.global_batch,
            "microbatch_size": plan.micro_batch,
            "datatype": "float16",
            "fused_activation": False,
            "attention_type": "multihead",
            "activation_recompute": "attn_only" if plan.recompute == "selective" else plan.recompute,
            "pipeline_interleaving": plan.stages,
            "optimizer_sharding": layout.shard > 1,
            "tensor_par_comm_type": "rs_ag" if plan.sequence_parallel else "ar",
            "tensor_par_overlap": "none",
            "seq_par_ag_redo": plan.sequence_parallel and not full,
            "data_par_overlap": plan.overlap and data > 1,
            "weight_offload": False,
            "activations_offload": False,
            "optimizer_offload": False,
            "training": True,
        }
        run = llm(app, log)
        system = system_of(cfg)
        try:
            run.compile(system, llm.Execution.from_json(execution))
            run.run(system)
        except (llm.Error, AssertionError):
            return math.nan
        return float(run.get_total_time())

    return [predict]


def llm_analysis(clone: Path) -> list[Predict]:
    sys.path.insert(0, str(clone))
    analysis = importlib.import_module("llm_analysis.analysis")
    config = importlib.import_module("llm_analysis.config")
    logging.getLogger("__name__").setLevel(logging.ERROR)
    recompute = analysis.ActivationRecomputation
    kinds = {"none": recompute.NONE, "selective": recompute.ATTN_COMPUTE, "full": recompute.FULL}

    def with_efficiency(efficiency: float) -> Predict:
        def predict(model: Transformer, plan: PlannedStep, machine: Machine) -> float:
            layout = plan.layout
            parallelism = config.ParallelismConfig(
                tp_size=layout.tensor,
                pp_size=layout.pipeline,
                dp_size=layout.shard * layout.replicate,
                sp_size=layout.tensor if plan.sequence_parallel else 1,
            )
            dimensions = config.ModelConfig(
                name="model",
                num_layers=model.layers,
                n_head=model.heads,
                hidden_dim=model.hidden,
                vocab_size=model.vocab,
                max_seq_len=model.seq,
                ffn_embed_dim=model.width,
            )
            gpu = config.get_gpu_config_by_name(machine.name.replace("a100-", "a100-sxm-") + "gb")
            run = analysis.LLMAnalysis(
                dimensions,
                gpu,
                config.get_dtype_config_by_name("w16a16e16"),
                parallelism,
                flops_efficiency=efficiency,
            )
            try:
                found = run.training(
                    batch_size_per_gpu=plan.micro_batch,
                    gradient_accumulation_steps=plan.micro_batches,
                    seq_len=model.seq,
                    activation_recomputation=kinds[plan.recompute],
                    ds_zero=analysis.DSZeRO.STAGE_3 if layout.shard > 1 else analysis.DSZeRO.NONE,
                    flash_attn=bool(model.flash),
                )
            except AssertionError:
                return math.nan
            return float(found["latency_per_iter"])

        return predict

    return [with_efficiency(1.0), *(with_efficiency(each) for each in EFFICIENCIES)]


def autoparallel(clone: Path) -> list[Predict]:
    costs = clone / "autoparallel" / "cost_models"
    compute = module_of(costs / "compute_estimation.py")
    nccl = module_of(costs / "nccl_cost_model.py")
    limit = next(each for each in compute.DEVICE_LIMITS if each.name == "A100")
    vars(compute)["_get_device_limit"] = lambda: limit
    peak = (
        next(rate for kind, rate in limit.gemm_tflops.items() if str(kind) == "torch.bfloat16") * 1e12
    )

    def operation(flops: float, moved: float) -> float:
        """Return seconds: as estimate_strategy_runtime_cost, whose nodes of a graph are not at hand."""
        return max(float(flops / peak / 0.7), float(compute.compute_read_write_time(moved)) / 1e6)

    def predict(model: Transformer, plan: PlannedStep, machine: Machine) -> float:
        layout, size = plan.layout, plan.numbers.activation
        config = nccl.a100_topo_config(num_nodes=max(1, layout.size // 8))
        rows = plan.micro_batch * model.seq
        shapes = layer_products(model, plan)
        products = sum(3 * product(*shape) for shape in shapes)
        again = sum(product(*shape) for shape in shapes) if plan.recompute == "full" else 0.0
        core = 2 * rows * model.seq * model.hidden / layout.tensor
        scores = 0 if model.flash else rows * model.seq * model.heads / layout.tensor * size
        attention = 2 * operation(core, scores) + (0 if model.flash else 2 * operation(0, 2 * scores))
        cores, passes = 3 + (plan.recompute != "none"), 3 + (plan.recompute == "full")
        full = rows * model.hidden * size
        elementwise = 4 * operation(0, 2 * full) + operation(
            0, 2 * rows * model.width / layout.tensor * size
        )
        layer = products + again + cores * attention + passes * elementwise
        if layout.tensor > 1:
            topology = nccl.derive_mesh_dim_topo(
                config, (layout.size // layout.tensor, layout.tensor), 1
            )
            sums = 6 if plan.recompute == "full" else 4
            layer += sums * nccl.nccl_allreduce_cost(int(full), topology, config) / 1e6
        layers = model.layers / layout.pipeline
        slots = plan.micro_batches + (layout.pipeline - 1) / plan.stages
        head = 3 * product(rows, model.vocab / layout.tensor, model.hidden)
        total = slots * layers * layer + plan.micro_batches * head
        data = layout.shard * layout.replicate
        if data == 1:
            return float(total)
        topology = nccl.derive_mesh_dim_topo(config, (layout.pipeline, data, layout.tensor), 1)
        numbers = stage_parameters(model, plan)
        reduced = int(numbers * plan.numbers.reduced)
        if layout.shard > 1:
            moved = 2 * nccl.nccl_allgather_cost(int(numbers * 2), topology, config)
            moved += nccl.nccl_reduce_scatter_cost(reduced, topology, config)
            return float(total + plan.micro_batches * moved / 1e6)
        return float(total + nccl.nccl_allreduce_cost(reduced, topology, config) / 1e6)

    def product(rows: float, columns: float, inner: float) -> float:
        moved = 2 * (rows * inner + inner * columns + rows * columns)
        return operation(2 * rows * columns * inner, moved)

    return [predict]


def module_of(path: Path) -> ModuleType:
    """Import one file of a package without the package."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is missing")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except OSError as error:
        raise ImportError(str(error)) from None
    return module  # type: ignore[no-any-return]

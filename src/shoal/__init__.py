"""Shoal: a PyTorch model from one process to a cluster, with the same numbers everywhere.

Nothing is imported until it is used (PEP 562), so that `shoal --help` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data import Loader, Permutation, ShardedDataset, TokenBudget, WeightedSampling
    from shoal.data.batch import Batch, StepResult
    from shoal.data.gather import GatheredRows, gather
    from shoal.data.noise import Noise
    from shoal.distributed.cluster_env import Placement
    from shoal.distributed.init import init
    from shoal.distributed.layout import Layout
    from shoal.distributed.world import World
    from shoal.launcher import launch
    from shoal.report.coverage import coverage
    from shoal.strategies import parallelize
    from shoal.strategies.activation_checkpoint import ActivationCheckpointing
    from shoal.strategies.asynchronous.hogwild import Hogwild
    from shoal.strategies.context_parallel.options import ContextParallel
    from shoal.strategies.data_parallel.compression import PowerSGD, TopK
    from shoal.strategies.data_parallel.ddp import DDP, DataParallel, SingleProcess
    from shoal.strategies.data_parallel.local_sgd import DiLoCo, LocalSGD
    from shoal.strategies.device_placement.options import DevicePlacement
    from shoal.strategies.fsdp.options import FSDP
    from shoal.strategies.pipeline.options import Pipeline
    from shoal.strategies.rpc_pipeline.options import RPCPipeline
    from shoal.strategies.task import Task
    from shoal.strategies.tensor_parallel.options import TensorParallel
    from shoal.telemetry.trackers import TensorBoard, WandB
    from shoal.training.early_stopping import Validation
    from shoal.training.ema import EMA
    from shoal.training.evaluation import Accuracy, evaluate
    from shoal.training.loop import TrainingStatus, TrainResult, train
    from shoal.training.model_export import export, load
    from shoal.training.run import Run
    from shoal.training.save_policy import YoungDaly
    from shoal.training.schedule import LRSchedule
    from shoal.training.step import Step
    from shoal.util.decision import Decision
    from shoal.util.errors import (
        AgreementError,
        CheckpointError,
        DataError,
        LaunchError,
        LayoutError,
        ShoalError,
        StepError,
    )

__version__ = "0.1.0"

_HOMES = {
    "data.batch": ("Batch", "StepResult"),
    "util.decision": ("Decision",),
    "data": ("TokenBudget", "Loader", "Permutation", "ShardedDataset", "WeightedSampling"),
    "report.coverage": ("coverage",),
    "training.ema": ("EMA",),
    "training.early_stopping": ("Validation",),
    "util.errors": (
        "AgreementError",
        "CheckpointError",
        "DataError",
        "LaunchError",
        "LayoutError",
        "ShoalError",
        "StepError",
    ),
    "training.evaluation": ("Accuracy", "evaluate"),
    "training.model_export": ("export", "load"),
    "distributed.cluster_env": ("Placement",),
    "launcher": ("launch",),
    "distributed.layout": ("Layout",),
    "training.loop": ("TrainingStatus", "TrainResult", "train"),
    "strategies": ("parallelize",),
    "strategies.data_parallel.local_sgd": ("DiLoCo", "LocalSGD"),
    "strategies.data_parallel.compression": ("PowerSGD", "TopK"),
    "strategies.context_parallel.options": ("ContextParallel",),
    "strategies.asynchronous.hogwild": ("Hogwild",),
    "strategies.pipeline.options": ("Pipeline",),
    "strategies.device_placement.options": ("DevicePlacement",),
    "strategies.activation_checkpoint": ("ActivationCheckpointing",),
    "strategies.rpc_pipeline.options": ("RPCPipeline",),
    "strategies.data_parallel.ddp": ("DDP", "DataParallel", "SingleProcess"),
    "strategies.fsdp.options": ("FSDP",),
    "strategies.tensor_parallel.options": ("TensorParallel",),
    "data.gather": ("GatheredRows", "gather"),
    "training.run": ("Run",),
    "training.save_policy": ("YoungDaly",),
    "training.schedule": ("LRSchedule",),
    "training.step": ("Step",),
    "data.noise": ("Noise",),
    "strategies.task": ("Task",),
    "telemetry.trackers": ("TensorBoard", "WandB"),
    "distributed.init": ("init",),
    "distributed.world": ("World",),
}

__all__ = [
    "Accuracy",
    "AgreementError",
    "Batch",
    "TokenBudget",
    "CheckpointError",
    "Decision",
    "ContextParallel",
    "DDP",
    "DataError",
    "DataParallel",
    "DiLoCo",
    "EMA",
    "Validation",
    "FSDP",
    "Hogwild",
    "LaunchError",
    "Layout",
    "LayoutError",
    "Loader",
    "LocalSGD",
    "TrainingStatus",
    "Noise",
    "Permutation",
    "DevicePlacement",
    "Placement",
    "Pipeline",
    "PowerSGD",
    "ActivationCheckpointing",
    "RPCPipeline",
    "StepResult",
    "GatheredRows",
    "Run",
    "LRSchedule",
    "ShoalError",
    "SingleProcess",
    "Step",
    "StepError",
    "ShardedDataset",
    "Task",
    "TensorParallel",
    "TensorBoard",
    "TopK",
    "TrainResult",
    "WandB",
    "WeightedSampling",
    "World",
    "YoungDaly",
    "coverage",
    "evaluate",
    "export",
    "gather",
    "init",
    "launch",
    "load",
    "parallelize",
    "train",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            module = import_module(f"shoal.{home}")
            # All at once: the import has just bound the module `shoal.evaluate` to the function's name.
            globals().update({each: getattr(module, each) for each in names})
            return getattr(module, name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

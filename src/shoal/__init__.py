"""Shoal: a PyTorch model from one process to a cluster, with the same numbers everywhere.

Nothing is imported until it is used (PEP 562), so that `shoal --help` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data import Budget, Loader, Order, Stream, Weighted
    from shoal.data.batch import Batch, Result
    from shoal.data.gather import Rows, gather
    from shoal.data.noise import Noise
    from shoal.distributed.cluster_env import Placement
    from shoal.distributed.layout import Layout
    from shoal.distributed.world import World, init
    from shoal.launcher import launch
    from shoal.report.coverage import coverage
    from shoal.strategies import parallelize
    from shoal.strategies.activation_checkpoint import Recompute
    from shoal.strategies.asynchronous.hogwild import Hogwild
    from shoal.strategies.context_parallel.options import Context
    from shoal.strategies.data_parallel.compression import PowerSGD, TopK
    from shoal.strategies.data_parallel.ddp import DDP, DataParallel, Single
    from shoal.strategies.data_parallel.local_sgd import DiLoCo, LocalSGD
    from shoal.strategies.device_placement.options import Placed
    from shoal.strategies.fsdp.options import FSDP
    from shoal.strategies.pipeline.options import Pipeline
    from shoal.strategies.rpc_pipeline.options import Remote
    from shoal.strategies.task import Task
    from shoal.strategies.tensor_parallel.options import Tensor
    from shoal.telemetry.trackers import TensorBoard, WandB
    from shoal.training.early_stopping import Evaluation
    from shoal.training.ema import EMA
    from shoal.training.evaluation import Accuracy, evaluate
    from shoal.training.loop import Moment, Trained, train
    from shoal.training.model_export import export, load
    from shoal.training.run import Run
    from shoal.training.save_policy import YoungDaly
    from shoal.training.schedule import Schedule
    from shoal.training.step import Step
    from shoal.util.decision import Choice
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
    "data.batch": ("Batch", "Result"),
    "util.decision": ("Choice",),
    "data": ("Budget", "Loader", "Order", "Stream", "Weighted"),
    "report.coverage": ("coverage",),
    "training.ema": ("EMA",),
    "training.early_stopping": ("Evaluation",),
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
    "training.loop": ("Moment", "Trained", "train"),
    "strategies": ("parallelize",),
    "strategies.data_parallel.local_sgd": ("DiLoCo", "LocalSGD"),
    "strategies.data_parallel.compression": ("PowerSGD", "TopK"),
    "strategies.context_parallel.options": ("Context",),
    "strategies.asynchronous.hogwild": ("Hogwild",),
    "strategies.pipeline.options": ("Pipeline",),
    "strategies.device_placement.options": ("Placed",),
    "strategies.activation_checkpoint": ("Recompute",),
    "strategies.rpc_pipeline.options": ("Remote",),
    "strategies.data_parallel.ddp": ("DDP", "DataParallel", "Single"),
    "strategies.fsdp.options": ("FSDP",),
    "strategies.tensor_parallel.options": ("Tensor",),
    "data.gather": ("Rows", "gather"),
    "training.run": ("Run",),
    "training.save_policy": ("YoungDaly",),
    "training.schedule": ("Schedule",),
    "training.step": ("Step",),
    "data.noise": ("Noise",),
    "strategies.task": ("Task",),
    "telemetry.trackers": ("TensorBoard", "WandB"),
    "distributed.world": ("World", "init"),
}

__all__ = [
    "Accuracy",
    "AgreementError",
    "Batch",
    "Budget",
    "CheckpointError",
    "Choice",
    "Context",
    "DDP",
    "DataError",
    "DataParallel",
    "DiLoCo",
    "EMA",
    "Evaluation",
    "FSDP",
    "Hogwild",
    "LaunchError",
    "Layout",
    "LayoutError",
    "Loader",
    "LocalSGD",
    "Moment",
    "Noise",
    "Order",
    "Placed",
    "Placement",
    "Pipeline",
    "PowerSGD",
    "Recompute",
    "Remote",
    "Result",
    "Rows",
    "Run",
    "Schedule",
    "ShoalError",
    "Single",
    "Step",
    "StepError",
    "Stream",
    "Task",
    "Tensor",
    "TensorBoard",
    "TopK",
    "Trained",
    "WandB",
    "Weighted",
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

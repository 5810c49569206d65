"""Shoal: a PyTorch model from one process to a cluster, with the same numbers everywhere.

Nothing is imported until it is used (PEP 562), so that `shoal --help` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.batch import Batch
    from shoal.choice import Choice
    from shoal.data import Budget, Loader, Order, Stream, Weighted, coverage
    from shoal.ema import EMA
    from shoal.ending import Evaluation
    from shoal.engine import Result
    from shoal.errors import (
        AgreementError,
        CheckpointError,
        DataError,
        LaunchError,
        LayoutError,
        ShoalError,
        StepError,
    )
    from shoal.evaluation import Accuracy, evaluate
    from shoal.exchange import export, load
    from shoal.launchers import Placement
    from shoal.launching import launch
    from shoal.layout import Layout
    from shoal.loop import Moment, Trained, train
    from shoal.parallel import parallelize
    from shoal.parallel.averaging import DiLoCo, LocalSGD
    from shoal.parallel.compression import PowerSGD, TopK
    from shoal.parallel.context import Context
    from shoal.parallel.hogwild import Hogwild
    from shoal.parallel.pipeline import Pipeline
    from shoal.parallel.placed import Placed
    from shoal.parallel.recompute import Recompute
    from shoal.parallel.remote import Remote
    from shoal.parallel.replicate import DDP, DataParallel, Single
    from shoal.parallel.shard import FSDP
    from shoal.parallel.tensor import Tensor
    from shoal.rows import Rows, gather
    from shoal.run import Run
    from shoal.saving import YoungDaly
    from shoal.schedule import Schedule
    from shoal.step import Step
    from shoal.task import Noise, Task
    from shoal.trackers import TensorBoard, WandB
    from shoal.world import World, init

__version__ = "0.1.0"

_HOMES = {
    "batch": ("Batch",),
    "choice": ("Choice",),
    "data": ("Budget", "Loader", "Order", "Stream", "Weighted", "coverage"),
    "ema": ("EMA",),
    "ending": ("Evaluation",),
    "engine": ("Result",),
    "errors": (
        "AgreementError",
        "CheckpointError",
        "DataError",
        "LaunchError",
        "LayoutError",
        "ShoalError",
        "StepError",
    ),
    "evaluation": ("Accuracy", "evaluate"),
    "exchange": ("export", "load"),
    "launchers": ("Placement",),
    "launching": ("launch",),
    "layout": ("Layout",),
    "loop": ("Moment", "Trained", "train"),
    "parallel": ("parallelize",),
    "parallel.averaging": ("DiLoCo", "LocalSGD"),
    "parallel.compression": ("PowerSGD", "TopK"),
    "parallel.context": ("Context",),
    "parallel.hogwild": ("Hogwild",),
    "parallel.pipeline": ("Pipeline",),
    "parallel.placed": ("Placed",),
    "parallel.recompute": ("Recompute",),
    "parallel.remote": ("Remote",),
    "parallel.replicate": ("DDP", "DataParallel", "Single"),
    "parallel.shard": ("FSDP",),
    "parallel.tensor": ("Tensor",),
    "rows": ("Rows", "gather"),
    "run": ("Run",),
    "saving": ("YoungDaly",),
    "schedule": ("Schedule",),
    "step": ("Step",),
    "task": ("Noise", "Task"),
    "trackers": ("TensorBoard", "WandB"),
    "world": ("World", "init"),
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

"""Shoal: a PyTorch model from one process to a cluster, with the same numbers everywhere.

Nothing is imported until it is used (PEP 562), so that `shoal --help` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.batch import Batch
    from shoal.data import Loader, Order
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
    from shoal.launchers import Placement
    from shoal.layout import Layout
    from shoal.parallel import DDP, DataParallel, Single, parallelize
    from shoal.run import Run
    from shoal.step import Step
    from shoal.task import Noise, Task
    from shoal.world import World, init

__version__ = "0.1.0"

_HOMES = {
    "batch": ("Batch",),
    "data": ("Loader", "Order"),
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
    "launchers": ("Placement",),
    "layout": ("Layout",),
    "parallel": ("DDP", "DataParallel", "Single", "parallelize"),
    "run": ("Run",),
    "step": ("Step",),
    "task": ("Noise", "Task"),
    "world": ("World", "init"),
}

__all__ = [
    "DDP",
    "Accuracy",
    "AgreementError",
    "Batch",
    "CheckpointError",
    "DataError",
    "DataParallel",
    "LaunchError",
    "Layout",
    "LayoutError",
    "Loader",
    "Noise",
    "Order",
    "Placement",
    "Run",
    "ShoalError",
    "Single",
    "Step",
    "StepError",
    "Task",
    "World",
    "evaluate",
    "init",
    "parallelize",
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

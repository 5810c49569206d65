"""Ways of spreading one model over processes and devices."""

from shoal.parallel.attach import engine_of, known_engine, parallelize
from shoal.parallel.context import Context
from shoal.parallel.pipeline import Pipeline
from shoal.parallel.recompute import Recompute
from shoal.parallel.replicate import DDP, DataParallel, Single
from shoal.parallel.shard import FSDP
from shoal.parallel.tensor import Tensor

__all__ = [
    "DDP",
    "FSDP",
    "Context",
    "DataParallel",
    "Pipeline",
    "Recompute",
    "Single",
    "Tensor",
    "engine_of",
    "known_engine",
    "parallelize",
]

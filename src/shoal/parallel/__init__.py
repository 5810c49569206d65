"""Ways of spreading one model over processes and devices."""

from shoal.parallel.attach import engine_of, parallelize
from shoal.parallel.replicate import DDP, DataParallel, Single

__all__ = ["DDP", "DataParallel", "Single", "engine_of", "parallelize"]

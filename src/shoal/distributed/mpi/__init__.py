"""How ranks talk through MPI: a process group of torch's that stands on mpi4py.

torch's wheels are built without MPI. Those that are built with it have no reduce-scatter and no gather
into one tensor, which FSDP needs, no 16-bit sums, and nothing that the watch over hangs could go by. So
this one is used wherever `backend="mpi"` is asked for.
"""

from shoal.distributed.mpi.backend import serve
from shoal.distributed.mpi.library import leaving, require

__all__ = ["leaving", "require", "serve"]

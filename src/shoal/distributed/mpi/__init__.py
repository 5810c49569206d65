"""Collectives through MPI: a process group for torch that uses mpi4py.

torch's wheels are built without MPI. A torch built with MPI has no reduce-scatter and no gather into
one tensor, which FSDP needs, no 16-bit sums, and no record of collectives for the detection of hangs.
So this process group is used for every `backend="mpi"`.
"""

from shoal.distributed.mpi.library import leaving, provide, require, serve

__all__ = ["leaving", "provide", "require", "serve"]

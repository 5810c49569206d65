"""`import shoal.mpi` lets `torch.distributed.init_process_group("mpi")` work with PyTorch's wheels.

    import torch.distributed as dist
    import shoal.mpi

    dist.init_process_group("mpi")  # rank and world size are those of mpirun

Collectives end with an error after torch's default time limit, 30 minutes.
"""

from shoal.distributed import mpi

mpi.provide()

"""`shoal.init`, the first call of every script: join the process group."""

from __future__ import annotations

import contextlib
import sys

import torch

from shoal.distributed import env_vars
from shoal.distributed.initialize import LAYOUT, PREPARE_TIMEOUT, TIMEOUT, join
from shoal.distributed.layout import Layout
from shoal.distributed.seeds import DeterministicMode
from shoal.distributed.virtual_ranks import BITS, EXACT, VIRTUAL_RANKS
from shoal.distributed.watchdog.diagnosis import WaitLimits
from shoal.distributed.world import ENTERED, World
from shoal.util.arguments import check_choice, check_integer
from shoal.util.errors import LaunchError


def init(
    *,
    layout: str | Layout | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    devices_per_rank: int = 1,
    seed: int | None = None,
    timeout: float = TIMEOUT,
    prepare_timeout: float = PREPARE_TIMEOUT,
    deterministic: bool = False,
    exact: str = "rounding",
    virtual_ranks: int = VIRTUAL_RANKS,
    alone: bool = False,
) -> World:
    """Join the ranks that a launcher started, or those of a process group, or create a world of size 1.

    Use the result as a context manager: at the end of its block, this process leaves the process group
    and Shoal restores the settings that `init` changed. With several ranks, `init` sets the number of
    torch's threads to the number of cores of this rank, unless OMP_NUM_THREADS is set by the user
    (torchrun's OMP_NUM_THREADS=1 does not count). Rank 0 prints the number on stderr;
    `torch.set_num_threads` changes it afterwards. While a world of several ranks exists, MASTER_ADDR,
    MASTER_PORT and, under srun, SLURM_CPUS_PER_TASK are in the environment.

    A default process group of several ranks that exists, as in Ray Train, is adopted: the world has its
    ranks and its backend, and closing the world leaves it usable.

    `World.decisions` lists every decision with its reason, and `shoal info` prints them.

    Args:
        layout: Degrees of the axes of the device mesh, as a Layout or a string. Default: None, which
            means `"replicate=-1"`, data parallelism over all ranks.
        backend: `"nccl"`, `"gloo"`, `"mpi"` (under an MPI launcher) or another backend of torch.
            Default: None, which means NCCL if each rank has its own GPU, and Gloo otherwise.
        device: Device of this rank. Default: None, which means the one that the script has set by
            `torch.set_default_device` or `torch.cuda.set_device`, else the GPU with the number of the
            local rank, or the CPU if no GPU is visible.
        devices_per_rank: Number of consecutive devices of this rank, for a model that is placed on
            several (`World.devices`). `device` is the first of them. Default: 1.
        seed: Root of every random stream. Until the first step, the global generators of all ranks draw
            what they draw after `random.seed(seed)`, `np.random.seed(seed)` and
            `torch.manual_seed(seed)`. Default: None: if the script has called `torch.manual_seed`, its
            seed is the root, and the generators keep their states, on all ranks those of rank 0;
            otherwise the root is 0.
        timeout: Longest wait for other ranks, in seconds, from the first optimizer step on. Then Shoal
            reports the rank that did not arrive, and all ranks end. Default: 600.
        prepare_timeout: The same limit before the first optimizer step and within `World.preparing`,
            in seconds. Default: 3600.
        deterministic: Whether to use deterministic algorithms of torch. Default: False.
        exact: "rounding": results on different numbers of ranks differ by rounding only. "bits":
            results have the same bits, with data parallelism (EasyScale, Li et al. 2023). It also sets
            `deterministic` and one thread per rank. Default: "rounding".
        virtual_ranks: Number of parts of each global batch with `exact="bits"`, and the largest number
            of ranks. Each part is one micro-batch, the same on any number of ranks. Results depend on
            it. Default: 8.
        alone: Whether this process is to be a world of one where its environment says that it is on one
            of several hosts, and no launcher has started ranks. SHOAL_ALONE=1 does the same.
            Default: False.

    Returns:
        The world of this process.

    Raises:
        LaunchError: If the environment variables contradict each other, the device or backend is not
            available, torch has another default device, the process group can't form, it contradicts an
            argument, an earlier World of several ranks is open, or another `seed` is given in the
            `with` block of an earlier World.
        LayoutError: If the layout does not fit the number of processes, or does not allow
            `exact="bits"`.

    Examples:
        >>> with shoal.init(device="cpu") as world:
        ...     print(world.size, world.rank, world.device)
        1 0 cpu
    """
    if seed is not None:
        check_integer(LaunchError, "shoal.init", "seed", seed, -(2**63), most=2**64 - 1)
    check_choice(LaunchError, "shoal.init", "exact", exact, EXACT)
    check_integer(LaunchError, "shoal.init", "virtual_ranks", virtual_ranks, 1, usual=VIRTUAL_RANKS)
    if seed is not None and any(world.seed != seed and not world.simulated for world in ENTERED):
        raise LaunchError(
            given=f"shoal.init(seed={seed}) inside of `with shoal.init() as world:`",
            found="it would change the seeds of the earlier World, which is still open",
            fix="use that one, as in shoal.train(…, world=world), or end its `with` block before",
        )
    bits = exact == BITS
    deterministic_mode = DeterministicMode(enabled=deterministic, bits=bits)  # NCCL's groups read it
    try:
        joined = join(
            layout=LAYOUT if layout is None else layout,
            backend=backend,
            device=device,
            devices_per_rank=devices_per_rank,
            timeout=timeout,
            prepare_timeout=prepare_timeout,
            virtual_ranks=virtual_ranks if bits else None,
            alone=alone,
        )
    except BaseException:
        deterministic_mode.restore()
        raise
    if joined.told:
        with contextlib.suppress(OSError):  # as in `World.print`
            print(f"shoal: {joined.told}", file=sys.stderr, flush=True)
    if folder := env_vars.failures():
        # Only jobs of `shoal submit` need it.
        from shoal.distributed.failure import report_into

        report_into(folder, rank=joined.placement.rank, size=joined.placement.size)
    limits = WaitLimits(step=timeout, prepare=prepare_timeout)
    return World(joined, seed, limits, deterministic_mode=deterministic_mode)

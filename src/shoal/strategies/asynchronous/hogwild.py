"""Hogwild: workers update the same parameters without waiting for each other.

Each worker reads the newest parameters, computes an optimizer step on its local batch, and adds the
change to the shared parameters, which other workers may have changed in the meantime. The results
differ from those of one process: they depend on the number of workers, their speed, and chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from shoal._torch import foreach
from shoal._torch.autograd import version
from shoal.data.batch import Batch
from shoal.distributed.membership import LOOK_SECONDS
from shoal.distributed.world import World
from shoal.strategies.asynchronous.shared_parameters import ParameterStorage, shared
from shoal.strategies.contracts import Engine
from shoal.strategies.correction import Factor, Totals
from shoal.strategies.coupling.batch_norm import SEPARATE_STEPS, refuse_coupled
from shoal.strategies.data_parallel.compressed_collectives import CountedCollectives
from shoal.strategies.data_parallel.local_sgd import IndependentEngine, average, others
from shoal.strategies.dtensor import is_divided
from shoal.strategies.task import Task
from shoal.telemetry.step_timer import COMMUNICATION
from shoal.util.clock import CLOCK
from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import StepError

SHARED, SERVED = "shared memory", "a server in rank 0"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01


@dataclass(frozen=True, kw_only=True)
class Hogwild:
    """Hogwild: lock-free asynchronous updates of shared parameters (Recht et al. 2011).

    Each rank steps separately on its local batch and adds the change to the shared parameters. Each
    worker has its own optimizer state. A checkpoint contains the mean over the workers. If a worker is
    killed, the others continue.

    Args:
        max_staleness: Number of steps that a worker may be ahead of the slowest one before it waits
            (Ho et al. 2013). With 0, all workers take the same step at the same time. None means that
            no worker waits. Default: None.
        server: Keep the parameters in a parameter server on rank 0, which other ranks reach over torch
            RPC (True), or in shared memory (False). None chooses shared memory if all ranks can share
            it, as on one machine, and the server otherwise. Default: None.

    Raises:
        StepError: If an argument is out of range, or `server` is False and the ranks cannot share
            memory.

    Examples:
        >>> strategy = shoal.Hogwild(max_staleness=8)
    """

    axes: ClassVar[tuple[str, ...]] = ("replicate",)
    defers: ClassVar[bool] = False

    max_staleness: int | None = None
    server: bool | None = None

    def __post_init__(self) -> None:
        bound = self.max_staleness
        if bound is not None and (type(bound) is not int or bound < 0):
            raise StepError(
                given=f"shoal.Hogwild(max_staleness={bound!r})",
                found="max_staleness is the number of steps that a worker may be ahead of the slowest, "
                "0 or more",
                fix="pass max_staleness=8, or leave it out for no bound",
            )
        if self.server is not None and type(self.server) is not bool:
            raise StepError(
                given=f"shoal.Hogwild(server={self.server!r})",
                found="server is True, False or None; a server always runs on rank 0",
                fix="pass server=True, or leave it out to let Shoal choose",
            )

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Broadcast rank 0's parameters and buffers, and return the engine."""
        if any(map(is_divided, model.parameters())):
            raise StepError(
                given="shoal.Hogwild() around a model whose layers are sharded",
                found="ranks that hold shards of one model must step together",
                fix="use shoal.Hogwild() alone, or shoal.TensorParallel(plan=…) alone",
            )
        if world.size > 1:
            refuse_coupled(model, "shoal.Hogwild()", SEPARATE_STEPS)
        return HogwildEngine(model.to(world.device), world, self)


class HogwildEngine(IndependentEngine):
    """Engine that steps on a copy of the shared parameters and adds the change to them."""

    def __init__(self, module: nn.Module, world: World, options: Hogwild) -> None:
        super().__init__(module, world)
        self._parameters = [p.detach() for p in self.held.parameters]
        self._worker = world.rank
        self._bound = options.max_staleness
        self._commons, choice = _commons(options.server, self._parameters, world)
        self._read: list[int] = []
        self._versions = self._now()
        self._apart = False
        self._gone: set[int] = set()
        self._staleness: Counter[int] = Counter()
        self._logged: Counter[int] = Counter()
        world.membership.survive(essential=choice.value == SERVED and world.is_rank_zero)
        survivors = world.membership.survivors
        self._ranks = [0] if survivors is None else list(survivors.members)
        bound = "any number of" if self._bound is None else f"at most {self._bound}"
        world.print(
            "shoal: Hogwild, whose results differ from those of one process: parameters are in "
            f"{choice.value}, because {choice.reason}; a worker may be {bound} steps ahead of the "
            "slowest"
        )

    @property
    def staleness(self) -> dict[int, int]:
        """Histogram of staleness over this worker's updates so far.

        The staleness of an update is the number of updates by other workers between the read of the
        parameters and the update that was computed from them.
        """
        return dict(sorted(self._staleness.items()))

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Compute the gradients of this rank's local batch at the newest parameters; see the contract.

        Raises StepError for float16.
        """
        if autocast is torch.float16:
            raise StepError(
                given="precision='fp16' with shoal.Hogwild()",
                found="each worker would scale its loss by a factor that the others do not know",
                fix="use precision='bf16', which needs no scaling",
            )
        with self.world.timeline.within(COMMUNICATION):
            if not self._apart:
                self._part()
            self._wait()
            self._read = self._commons.read(self._parameters)
            self._versions = self._now()
        return super().gradients(task, batch, autocast=autocast, scale=scale)

    def update(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        """Step on this rank's copy and add the change to the shared parameters; see the contract."""
        if factor == 0:  # this rank had no sample: a step would make its optimizer state decay
            self.discard()
            return
        before = [p.clone() for p in self._parameters]
        super().update(optimizer, factor)
        foreach.sub_(before, self._parameters)
        foreach.neg_(before)
        with self.world.timeline.within(COMMUNICATION):
            found = self._commons.add(self._worker, before)
            self._commons.tick(self._worker)
        self._versions = self._now()
        passed = sum(found) - sum(self._read)
        self._staleness[passed] += 1

    def discard(self) -> None:
        """Clear the gradients and count a step, so that no worker waits for this one."""
        super().discard()
        if self._apart:
            self._commons.tick(self._worker)

    def synchronize(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Wait for all, read the parameters while no worker changes them, and average everything else.

        If other values have replaced the parameters, such as those of an EMA, average these.
        """
        replaced = any(self.world.gather(self._versions != self._now()))
        rest = others(self.module, optimizer, self.world)
        if replaced:
            rest += self._parameters
        elif self._apart:
            self._commons.read(self._parameters)
            self._versions = self._now()
            self.world.barrier()
            self._apart = False
        average(rest, CountedCollectives(self.world), self.world.device)
        self._log()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Make all workers begin the next step from the parameters that have been loaded."""
        self._versions = self._now()
        self._apart = False

    def _now(self) -> list[int]:
        """Return numbers that change when the module's parameters get other values."""
        return [version(p) for p in self._parameters]

    def _part(self) -> None:
        """Synchronize, and let all workers begin with rank 0's parameters."""
        self.world.barrier()
        if self.world.is_rank_zero:
            self._commons.put(self._parameters)
        self.world.barrier()
        self._apart = True

    def _wait(self) -> None:
        """Wait until the slowest live worker is within the bound."""
        if self._bound is None:
            return
        begun = looked = CLOCK.now()
        pause = _FIRST_PAUSE
        while late := self._late(self._bound):
            now = CLOCK.now()
            if now >= begun + self.world.watchdog.limits.step:
                self._look(late, unreachable=True)
                self._check_left(late)
            elif now >= looked + LOOK_SECONDS:
                looked = now
                self._look(late)
            CLOCK.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look(self, workers: list[int], *, unreachable: bool = False) -> None:
        """Note which of some workers have ended or, if `unreachable`, can't be reached."""
        survivors = self.world.membership.survivors
        if survivors is not None:
            ended = survivors.gone([self._ranks[w] for w in workers], unreachable=unreachable)
            self._gone |= {worker for worker in workers if self._ranks[worker] in ended}

    def _check_left(self, late: list[int]) -> None:
        """Raise StepError if a worker for which this one has waited too long is still alive."""
        left = [worker for worker in late if worker not in self._gone]
        if left:
            raise StepError(
                given=f"a wait of more than {self.world.watchdog.limits.step:g} s in "
                f"shoal.Hogwild(max_staleness={self._bound})",
                found=f"rank {left[0]} is alive and takes no step",
                fix="find out what blocks it; if a step may take this long, use shoal.init(timeout=…)",
            )

    def _late(self, bound: int) -> list[int]:
        clocks = self._commons.clocks()
        least = clocks[self._worker] - bound
        return [w for w, clock in enumerate(clocks) if clock < least and w not in self._gone]

    def _log(self) -> None:
        """Log the staleness since the last synchronization to the open Run, if there is one."""
        new = self._staleness - self._logged
        if not (self.world.run_log.attached and new):
            return
        mean = sum(passed * times for passed, times in new.items()) / new.total()
        self.world.log({"staleness": mean, "largest staleness": max(new)})
        self._logged = self._staleness.copy()


def _commons(
    server: bool | None, like: list[torch.Tensor], world: World
) -> tuple[ParameterStorage, Decision[str]]:
    """Return the storage of the parameters, and the reason for it. Collective.

    Raises StepError if shared memory was requested and is not available.
    """
    found = "server=True was given" if server and world.size > 1 else shared(like, world)
    if not isinstance(found, str):
        reason = GIVEN if server is False else "all ranks are on one machine"
        return found, Decision(what="parameters", value=SHARED, reason=reason)
    if server is False:
        raise StepError(
            given="shoal.Hogwild(server=False)",
            found=f"the ranks cannot share memory: {found}",
            fix="pass server=True, or leave it out; or start all ranks on one machine",
        )
    from shoal.strategies.asynchronous.parameter_server import serve  # imports torch RPC

    return serve(like, world), Decision(what="parameters", value=SERVED, reason=found)

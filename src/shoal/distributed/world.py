"""Placement and layout brought to life: process group, device, mesh, agreement between ranks."""

from __future__ import annotations

import atexit
import contextlib
import random
import socket
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal._torch import c10d, mesh
from shoal.distributed import env_vars, mpi, objects
from shoal.distributed.determinism import DeterministicMode
from shoal.distributed.initialize import LAYOUT, Joined
from shoal.distributed.layout import AXES, DATA_AXES, Layout
from shoal.distributed.membership import Membership
from shoal.distributed.rank_zero_first import RankZeroFirst
from shoal.distributed.run_log import RunLog
from shoal.distributed.seeds import derive_seed
from shoal.distributed.watchdog.diagnosis import WaitLimits
from shoal.distributed.watchdog.world_watchdog import Watchdog
from shoal.telemetry.flight_recorder import RecordingGroup
from shoal.telemetry.step_timer import timeline_of
from shoal.util.differences import spans
from shoal.util.errors import AgreementError, LaunchError, LayoutError, ShoalError

LET_GO_SECONDS = 0.05
"""How long a rank that has left its group lets the group's threads finish."""


class Service(Protocol):
    """What a world has once for all that use it, such as torch's RPC."""

    def close(self) -> None:
        """Leave other ranks."""
        ...


S = TypeVar("S", bound=Service)
P = TypeVar("P")


class World:
    """The processes of a run as this one sees them. A world of one has every method too."""

    def __init__(
        self,
        joined: Joined,
        seed: int,
        limits: WaitLimits,
        *,
        deterministic_mode: DeterministicMode,
    ) -> None:
        placement, layout = joined.placement, joined.layout
        self.placement = placement
        self.layout = layout
        self.device = joined.device
        self.devices = joined.devices
        self.group = joined.group
        self.seed = seed
        self.rank = placement.rank
        self.size = placement.size
        self._variables = joined.variables
        self.data_rank = layout.data_rank(placement.rank)
        self.data_size = layout.data_size
        self.timeline = timeline_of(self.device)
        self._mesh: DeviceMesh | None = None
        self._data_group: dist.ProcessGroup | None = None
        self._services: dict[Callable[[World], Service], Service] = {}
        self._provided: dict[type, object] = {}
        self._before_closing: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._closed = False
        self._deterministic_mode = deterministic_mode
        self.decisions = (*joined.choices, self._deterministic_mode.decision)
        self.reseed("weights", by_rank=False)
        self.run_log: Final = RunLog()
        self.watchdog: Final = Watchdog(
            self.group,
            limits=limits,
            address=joined.host,
            directory=lambda: self.run_log.directory,
        )
        self.membership: Final = Membership(
            self.watchdog, rank=self.rank, size=self.size, renumber=self._renumber
        )
        atexit.register(self.close)

    @property
    def is_rank_zero(self) -> bool:
        """True on global rank 0, and on no other, however many ranks believe to be local rank 0."""
        return self.rank == 0

    @property
    def _alone(self) -> bool:
        """Whether this is a world of one. LaunchError where it was one of several and is closed."""
        if self.group is None and self.size > 1:
            raise LaunchError(
                given=f"a World of {self.size} ranks after its `with` block, or after close()",
                found=f"rank {self.rank} has left the group and would go on with its own share only",
                fix="evaluate and save inside `with shoal.init() as world:`",
            )
        return self.group is None

    @property
    def mesh(self) -> DeviceMesh:
        """torch's device mesh over all axes of the layout, outermost first. Collective, once."""
        if self.group is None:
            raise LayoutError(
                given="world.mesh in a world of one process",
                found="torch's device mesh needs a process group, which one process has not",
                fix="shoal run -n 1 is a world of one too; ask world.size before world.mesh",
            )
        if self._mesh is None:
            degrees = tuple(self.layout.degree(axis) for axis in AXES)
            self._mesh = init_device_mesh(self.device.type, degrees, mesh_dim_names=AXES)
            self.watchdog.extend_torch_timeouts()
        return self._mesh

    def flat_mesh(self, *axes: str, name: str) -> DeviceMesh:
        """Return the mesh over `axes` as one dimension, called `name`. Collective, once."""
        flat = mesh.flatten(self.mesh[axes], name)
        self.watchdog.extend_torch_timeouts()
        return flat

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The group of the ranks that have different samples, in the order of their data ranks."""
        if self.group is None or self.data_size == self.size:
            return self.group
        if self._data_group is None:
            self._data_group = self.flat_mesh(*DATA_AXES, name="data").get_group()
        return self._data_group

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce `tensor` over all ranks in place ("sum", "max" or "min") and return it."""
        operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        if op not in operations:
            raise AgreementError(
                given=f"world.all_reduce(…, op={op!r})",
                found=f"the operations are {', '.join(operations)}",
                fix="op='sum', divided by world.size for a mean",
            )
        if not self._alone:
            self.membership.meet()
            dist.all_reduce(tensor, operations[op], group=self.group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, in rank order, on every rank.

        A value is None, a number, text, bytes, a path, a list, tuple, set, dict, tensor or NumPy array,
        or a dataclass, named tuple or enum of these. Nothing is pickled. Tensors arrive on the CPU,
        without gradients. Raises AgreementError, on all ranks, for any other value.
        """
        if self._alone or self.group is None:
            return [value]
        self.membership.meet()
        return objects.gather(value, self.group)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source` on every rank; see `gather` for what can be sent."""
        if self._alone or self.group is None:
            return value
        self.membership.meet()
        return objects.broadcast(value, self.group, source)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if not self._alone and self.group is not None:
            self.membership.meet()
            objects.barrier(self.group)

    def agree(self, value: Any, what: str) -> Any:
        """Return `value` if every rank has the same; raise AgreementError naming the odd ones."""
        values = self.gather(value)
        usual = values[0]
        if any(other != usual for other in values):  # rank 0 may be the odd one
            usual = max(values, key=lambda one: sum(other == one for other in values))
            odd = [rank for rank, other in enumerate(values) if other != usual]
            raise AgreementError(
                given=f"{what}: {usual!r} on {self.size - len(odd)} of {self.size} ranks",
                found=f"{values[odd[0]]!r} on rank {odd[0]}"
                + (f", and {len(odd) - 1} more ranks differ" if len(odd) > 1 else ""),
                fix=f"make {what} the same on every rank",
            )
        return value

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[bool]:
        """Rank 0 runs the body alone, then the others do: to download or prepare something once.

            with world.rank_zero_first():
                data = prepare("cache/")

        The wait has no time limit, since it polls a key and starts no collective. If rank 0 fails,
        the others raise within a second instead of waiting.
        """
        if self._alone:
            yield True
            return
        with self.service(RankZeroFirst).next() as first:
            yield first

    def store(self, prefix: str) -> dist.PrefixStore:  # type: ignore[name-defined]
        """The keys under `prefix` in the store that several ranks share."""
        return dist.PrefixStore(prefix, c10d.default_store())  # type: ignore[attr-defined]

    def generator(self, purpose: str, *, by_rank: bool = True) -> torch.Generator:
        """A generator of its own for `purpose`; see `seed_for`."""
        generator = torch.Generator(self.device)
        return generator.manual_seed(self.seed_for(purpose, by_rank=by_rank))

    def seed_for(self, purpose: str, *, by_rank: bool = True) -> int:
        """A 63-bit seed derived from (seed, purpose) and, with `by_rank`, the data rank.

        Ranks that hold parts of one model, and so the same samples, draw alike.
        """
        return derive_seed(self.seed, purpose, self.data_rank if by_rank else 0)

    def reseed(self, purpose: str, *, by_rank: bool = True) -> None:
        """Set the global generators of Python, NumPy and torch to the stream of `purpose`.

        `init` calls it with "weights", the same on all ranks; `parallelize` with "noise", by rank.
        """
        seed = self.seed_for(purpose, by_rank=by_rank)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def print(self, *parts: object) -> None:
        """Print `parts` once, as `print` does: on rank 0. A log on a full disk ends no training."""
        if self.is_rank_zero:
            with contextlib.suppress(OSError):
                print(*parts, flush=True)

    def log(self, values: Mapping[str, Any]) -> None:
        """Record numbers of the present step with the Run that is open: losses, rates, scores.

            world.log({"rate": optimizer.param_groups[0]["lr"]})

        They become events, and curves in the Run's trackers; those of rank 0 are shown.
        Raises LaunchError where no Run is open.
        """
        self.run_log.write(values)

    def preparing(self) -> AbstractContextManager[None]:
        """Let one rank take its time while the others wait for it: `prepare_timeout` holds inside.

            with world.preparing():
                if world.is_rank_zero:
                    build_index("cache/")
                world.barrier()

        All ranks enter it. See `rank_zero_first` where the others need no collective.
        """
        return self.watchdog.preparing()

    def before_closing(self, method: Callable[[], None]) -> None:
        """Call this method of an object, if that is still alive, before the group is left."""
        self._before_closing.append(weakref.WeakMethod(method))

    def service(self, kind: Callable[[World], S]) -> S:
        """The one object of this kind that the world has, made when first asked for. Collective, once.

        It is closed before the group is left.
        """
        if kind not in self._services:
            self._services[kind] = kind(self)
        return cast(S, self._services[kind])

    def provide(self, kind: type[P], implementation: P) -> None:
        """Let `provided(kind)` return `implementation`, so that its users need not import it."""
        self._provided[kind] = implementation

    def provided(self, kind: type[P]) -> P | None:
        """Return the implementation of `kind` that was provided last, or None."""
        return cast("P | None", self._provided.get(kind))

    def close(self) -> None:
        """Leave the group and restore what `init` changed; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._leave)
            for service in self._services.values():
                leaving.callback(service.close)
            for reference in self._before_closing:
                if (method := reference()) is not None:
                    method()

    def _leave(self) -> None:
        atexit.unregister(self.close)
        self._mesh = self._data_group = None
        self._deterministic_mode.restore()
        self.watchdog.leave()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()
            # A model that lives on keeps Gloo's threads. One of them may still have to let go of
            # the last collective's tensors, for which it needs the interpreter: it would abort the
            # process if that had begun to end.
            time.sleep(LET_GO_SECONDS)
        env_vars.write_variables(dict.fromkeys(self._variables))
        self.group = None

    def _renumber(self, members: Sequence[int], lost: Sequence[int]) -> None:
        """Continue with `members`, the ranks by their first numbers, and without the `lost` ones."""
        self.group = dist.new_group(list(members), use_local_synchronization=True)
        self.rank = self.data_rank = members.index(self.placement.rank)
        self.size = self.data_size = len(members)
        self.layout = Layout.parse(LAYOUT).resolve(self.size)
        self._mesh = self._data_group = None
        self.watchdog.extend_torch_timeouts()
        self.print(f"shoal: rank {spans(lost)} has ended; the other {self.size} go on without it")

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ShoalError) and error.where is None:
            error.where = f"rank {self.rank} of {self.size} on {socket.gethostname()}" + _line(trace)
        over_mpi = isinstance(self.group, RecordingGroup)
        self.close()
        if over_mpi and type(error) is SystemExit:  # and not one with which all ranks stop
            mpi.leaving(error.code)

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, {self.layout}, {self.device})"


def _line(trace: TracebackType | None) -> str:
    """Where in the user's own file the error came from: the outermost frame of the `with` block."""
    frames = traceback.extract_tb(trace)
    return f", {frames[0].filename}:{frames[0].lineno}" if frames else ""

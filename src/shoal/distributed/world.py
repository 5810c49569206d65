"""The World: placement and layout in use, with process group, device, mesh and collectives."""

from __future__ import annotations

import atexit
import contextlib
import socket
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar, Final, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal._torch import c10d, mesh
from shoal.distributed import env_vars, mpi, objects, teardown
from shoal.distributed.initialize import LAYOUT, JoinedWorld
from shoal.distributed.layout import AXES, DATA_AXES, Layout
from shoal.distributed.membership import Membership
from shoal.distributed.other_names import OtherNames
from shoal.distributed.rank_zero_first import RankZeroFirst
from shoal.distributed.reductions import all_reduce, check_dtype, check_operation
from shoal.distributed.run_log import RunLog
from shoal.distributed.seeds import DeterministicMode, derive_seed, seed_all, start_generators
from shoal.distributed.watchdog import abort
from shoal.distributed.watchdog.diagnosis import WaitLimits
from shoal.distributed.watchdog.world_watchdog import Watchdog
from shoal.telemetry.flight_recorder import RecordingGroup
from shoal.telemetry.step_timer import timeline_of
from shoal.util import accelerator
from shoal.util.differences import and_more, minority, spans
from shoal.util.errors import AgreementError, LaunchError, LayoutError, ShoalError


class Service(Protocol):
    """A service of which a world has one for all its users, such as torch's RPC."""

    def close(self) -> None:
        """Disconnect from the other ranks."""
        ...


ENTERED: set[World] = set()
"""The worlds of this process whose `with` block is running."""
S = TypeVar("S", bound=Service)
P = TypeVar("P")


class World(OtherNames):
    """The processes of a run as seen by one of them, built by `shoal.init`.

    A world of size 1 has the same attributes and methods.

    Attributes:
        size: Number of ranks, or world size.
        rank: Number of this process among them, from 0.
        is_rank_zero: Whether this is rank 0.
        data_size: Number of ranks with different samples: the number of local batches per global batch.
        data_rank: Number of this rank among them. Model-parallel peers have the same number.
        device: The `torch.device` of this rank.
        devices: All devices of this rank, in order; `device` is the first.
        layout: Resolved Layout: the degrees of the axes of the device mesh.
        mesh: torch's `DeviceMesh` over all axes of the layout, if there are several ranks.
        group: Process group of all ranks; None if there is only this process.
        data_group: Process group of the ranks with different samples; None if there is only this
            process.
        placement: Placement of this process: its node, local rank and launcher.
        seed: Root of every random stream.
        virtual_ranks: With `exact="bits"`, their total and those of this rank; else None.
        decisions: Every Decision that `shoal.init` made.

    Examples:
        >>> with shoal.init(device="cpu") as world:
        ...     print(world.size, world.gather({"loss": 0.5}))
        1 [{'loss': 0.5}]
    """

    simulated: ClassVar[bool] = False
    """Whether the other ranks do not exist, as in a trace of `shoal plan`."""

    def __init__(
        self,
        joined: JoinedWorld,
        seed: int | None,
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
        self.rank = placement.rank
        self.size = placement.size
        self._variables = joined.variables
        self._store: Any = joined.store
        self._kept = joined.kept
        self.data_rank = layout.data_rank(placement.rank)
        self.data_size = layout.data_size
        self.virtual_ranks = joined.virtual_ranks
        self.timeline = timeline_of(self.device)
        self._mesh: DeviceMesh | None = None
        self._data_group: dist.ProcessGroup | None = None
        self._services: dict[Callable[[World], Service], Service] = {}
        self._provided: dict[type, object] = {}
        self._before_closing: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._closed = False
        self._deterministic_mode = deterministic_mode
        self.decisions = (*joined.choices, self._deterministic_mode.decision)
        self.run_log: Final = RunLog()
        self.watchdog: Final = Watchdog(
            None if self.simulated else self.group,
            limits=limits,
            address=joined.host,
            directory=lambda: self.run_log.directory,
        )
        self.membership: Final = Membership(
            self.watchdog,
            rank=self.rank,
            size=self.size,
            renumber=self._renumber,
            store=self.store,
        )
        self.seed = start_generators(seed, self.broadcast)
        atexit.register(self._close_at_exit)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is global rank 0; True on one rank of the world only."""
        return self.rank == 0

    @property
    def _alone(self) -> bool:
        """Whether the world size is 1.

        Raises:
            LaunchError: If the world has several ranks and is closed.
        """
        if self.group is None and self.size > 1:
            raise LaunchError(
                given=f"a World of {self.size} ranks after its `with` block, or after close()",
                found=f"rank {self.rank} has left the group and would use its local batch only",
                fix="evaluate and save inside `with shoal.init() as world:`",
            )
        return self.group is None

    @property
    def mesh(self) -> DeviceMesh:
        """torch's device mesh over all axes of the layout, outermost first. First use: collective.

        Raises:
            LayoutError: If the world has only one process and no process group.
        """
        if self.group is None:
            raise LayoutError(
                given="world.mesh in a world of one process",
                found="torch's device mesh needs a process group, and a single process has none",
                fix="check that world.size > 1 before world.mesh, or start several: shoal run -n 2 …",
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

    def group_along(self, *axes: str, name: str) -> dist.ProcessGroup:
        """Return the process group of the ranks along `axes`, for `name`. Collective, once.

        If only one axis has a degree above 1, this is the group of that axis. Shoal then
        creates no new group, because on a GPU each group in use has a communicator, which takes memory.
        """
        wide = [axis for axis in axes if self.layout.degree(axis) > 1]
        along = self.mesh[wide[0]] if len(wide) == 1 else self.flat_mesh(*axes, name=name)
        return along.get_group()

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that have different samples, in data-parallel rank order."""
        if self.group is None or self.data_size == self.size:
            return self.group
        if self._data_group is None:
            self._data_group = self.group_along(*DATA_AXES, name="data")
        return self._data_group

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce a tensor over all ranks in place. Collective.

        Args:
            tensor: Tensor of the same shape and dtype on every rank, on the device of the backend.
            op: `"sum"`, `"max"` or `"min"`; NaN on any rank is NaN in the result. Default: `"sum"`.

        Returns:
            `tensor`, which holds the result on every rank.

        Raises:
            AgreementError: If `op` is another operation, or backends do not reduce the dtype.
        """
        check_operation(op)
        check_dtype(tensor)
        if not self._alone:
            with self.membership.together():
                all_reduce(tensor, op, self.group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on every rank. Collective.

        Nothing is pickled. Tensors arrive on the CPU, without gradients.

        Args:
            value: None, a number, string, bytes, path, list, tuple, set, dict, tensor or NumPy array,
                or a dataclass, named tuple or enum of these. It may differ between ranks.

        Returns:
            One value per rank, in rank order.

        Raises:
            AgreementError: On all ranks, if a value has another type.
        """
        if self._alone or self.group is None:
            return [value]
        with self.membership.together():
            return objects.gather(value, self.group)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of one rank on every rank. Collective.

        Args:
            value: Value to send, of the types that `gather` takes; other ranks may pass None.
            source: Rank that sends its value. Default: 0.

        Returns:
            The value of rank `source`.

        Raises:
            AgreementError: If the value has a type that can't be sent.
        """
        if self._alone or self.group is None:
            return value
        with self.membership.together():
            return objects.broadcast(value, self.group, source)

    def barrier(self) -> None:
        """Wait until every rank has called `barrier`. Collective."""
        if not self._alone and self.group is not None:
            with self.membership.together():
                objects.barrier(self.group)

    def agree(self, value: Any, what: str) -> Any:
        """Check that every rank has the same value. Collective.

        Args:
            value: Value of this rank, of the types that `gather` takes.
            what: Name of the value for the error message.

        Returns:
            `value`.

        Raises:
            AgreementError: If the values differ; it lists the ranks in the minority.
        """
        values = self.gather(value)
        usual, odd = minority(values)  # rank 0 may be in it
        if odd:
            raise AgreementError(
                given=f"{what}: {values[usual]!r} on {self.size - len(odd)} of {self.size} ranks",
                found=f"{values[odd[0]]!r} on rank {odd[0]}{and_more(odd)}",
                fix=f"make {what} the same on every rank",
            )
        return value

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[bool]:
        """Run the body of a `with` block on rank 0 first, and then on the others.

        Use it to download or prepare files once. The wait has no time limit, since the other ranks poll
        a key and start no collective. If rank 0 fails, the others raise an error within a second.

            with world.rank_zero_first():
                data = prepare("cache/")

        Returns:
            A context manager whose value is True on rank 0 and False on the others.

        Raises:
            LaunchError: On the other ranks, if the body failed on rank 0.
        """
        if self._alone:
            yield True
            return
        with self.service(RankZeroFirst).next() as first:
            yield first

    def store(self, prefix: str) -> dist.PrefixStore:  # type: ignore[name-defined]
        """Return the part of the ranks' common store whose keys begin with `prefix`."""
        return dist.PrefixStore(prefix, self._store)  # type: ignore[attr-defined]

    def generator(self, purpose: str, *, by_rank: bool = True) -> torch.Generator:
        """Return a new random generator for one purpose, on the device of this rank.

        Args:
            purpose: Any string; each has its own random stream.
            by_rank: Whether each data-parallel rank has its own stream. Default: True.

        Returns:
            A `torch.Generator` seeded with `seed_for(purpose, by_rank=by_rank)`.
        """
        generator = torch.Generator(self.device)
        return generator.manual_seed(self.seed_for(purpose, by_rank=by_rank))

    def seed_for(self, purpose: str, *, by_rank: bool = True) -> int:
        """Return a 63-bit seed that is derived from the seed of the world and a purpose.

        Args:
            purpose: Any string; each has its own random stream.
            by_rank: Whether the seed depends on the data-parallel rank too. Ranks that hold parts of
                one model process the same samples and get the same seed. Default: True.

        Returns:
            An integer from 0 to 2**63 - 1.
        """
        return derive_seed(self.seed, purpose, self.data_rank if by_rank else 0)

    def reseed(self, purpose: str, *, by_rank: bool = True) -> None:
        """Seed the global generators of Python, NumPy and torch for one purpose.

        The first step of a model calls it with `"noise"`.

        Args:
            purpose: Any string; each has its own random stream.
            by_rank: Whether each data-parallel rank has its own stream. Default: True.
        """
        seed_all(self.seed_for(purpose, by_rank=by_rank))

    def print(self, *parts: object, **options: Any) -> None:
        """Print on rank 0 only.

        Errors of the output, such as a full disk, are ignored and do not end training.

        Args:
            parts: Values to print, as for Python's `print`.
            options: Its `sep`, `end`, `file` and `flush`. Default of `flush`: True.
        """
        if self.is_rank_zero:
            with contextlib.suppress(OSError):
                print(*parts, **{"flush": True, **options})

    def log(self, values: Mapping[str, Any]) -> None:
        """Record values of the current step in the open Run, such as losses and learning rates.

        They become events, and curves in the Run's trackers. The progress line shows rank 0's numbers.

            world.log({"rate": optimizer.param_groups[0]["lr"]})

        Args:
            values: Name → number.

        Raises:
            LaunchError: If no Run is open.
        """
        self.run_log.write(values)

    def preparing(self) -> AbstractContextManager[None]:
        """Apply `prepare_timeout` in place of `timeout` within a `with` block.

        Use it if ranks wait in a collective for a rank that prepares something. All ranks enter the
        block. See `rank_zero_first` if they need no collective.

            with world.preparing():
                if world.is_rank_zero:
                    build_index("cache/")
                world.barrier()

        Returns:
            A context manager.
        """
        return self.watchdog.preparing()

    def before_closing(self, method: Callable[[], None]) -> None:
        """Let the world call a method before it leaves its process group; keep a weak reference."""
        self._before_closing.append(weakref.WeakMethod(method))

    def service(self, kind: Callable[[World], S]) -> S:
        """Return the world's only object of this kind, and create it at the first call (collective).

        The world closes it before it leaves its process group.
        """
        if kind not in self._services:
            self._services[kind] = kind(self)
        return cast(S, self._services[kind])

    def provide(self, kind: type[P], implementation: P) -> None:
        """Make `provided(kind)` return `implementation`, so that its users need not import it."""
        self._provided[kind] = implementation

    def provided(self, kind: type[P]) -> P | None:
        """Return the implementation of `kind` that was provided last, or None."""
        return cast("P | None", self._provided.get(kind))

    def close(self) -> None:
        """Leave the process group and restore what `init` changed. A second call has no effect.

        If it is called while an exception is handled, in `except` or `finally`, it aborts collectives
        that have not ended.
        """
        self._close(sys.exception())

    def _close_at_exit(self) -> None:
        """Close when Python exits, and has printed the traceback of an error that ends it."""
        try:
            self._close(getattr(sys, "last_value", None), exiting=True)
        except ShoalError:
            # Python ignores errors of exit functions, and would end with the code of success.
            traceback.print_exc()
            abort.exit_process((), 1)

    def _close(self, error: BaseException | None, *, exiting: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        ENTERED.discard(self)
        with contextlib.ExitStack() as leaving:
            leaving.push(lambda _, raised, __: self._leave(raised or error, exiting=exiting))
            for service in self._services.values():
                leaving.callback(service.close)
            if self.group is not None and not teardown.exit_code(error):
                # Before the services are closed: the watchdog still reports a hang.
                leaving.callback(accelerator.synchronize, self.device)
            for reference in self._before_closing:  # the last one first
                if (method := reference()) is not None:
                    leaving.callback(method)

    def _leave(self, error: BaseException | None, *, exiting: bool) -> None:
        atexit.unregister(self._close_at_exit)
        self._mesh = self._data_group = None
        self._deterministic_mode.restore()
        self.watchdog.leave()
        if self.group is not None and dist.is_initialized():
            teardown.leave_groups(error, exiting=exiting, kept=self._kept)
            for group in c10d.process_groups():
                if limit := self._kept.get(group):
                    c10d.set_timeout(group, limit)
        env_vars.remove_defaults(self._variables)
        self.group = self._store = None
        self._kept = {}

    def _renumber(self, members: Sequence[int], lost: Sequence[int]) -> None:
        """Continue with `members`, given by their original ranks, and without the `lost` ranks."""
        self.group = dist.new_group(list(members), use_local_synchronization=True)
        self.rank = self.data_rank = members.index(self.placement.rank)
        self.size = self.data_size = len(members)
        self.layout = Layout.parse(LAYOUT).resolve(self.size)
        self._mesh = self._data_group = None
        self.watchdog.extend_torch_timeouts()
        self.print(f"shoal: rank {spans(lost)} has ended; the other {self.size} continue without it")

    def __enter__(self) -> World:
        ENTERED.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        named = None if error is None else self.watchdog.explain_end(error)
        shown = error if named is None else named
        if isinstance(shown, ShoalError) and shown.where is None:
            shown.where = f"rank {self.rank} of {self.size} on {socket.gethostname()}" + _line(trace)
        over_mpi = isinstance(self.group, RecordingGroup)
        self._close(error)
        if named is not None:
            raise named.with_traceback(trace) from None
        if over_mpi and type(error) is SystemExit:  # not a subclass, with which all ranks stop
            mpi.leaving(error.code)

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, {self.layout}, {self.device})"


def _line(trace: TracebackType | None) -> str:
    """Return the line of the user's file that raised the error: the outermost frame of the block."""
    frames = traceback.extract_tb(trace)
    return f", {frames[0].filename}:{frames[0].lineno}" if frames else ""

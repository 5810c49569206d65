"""One copy of the model per rank (DDP), per GPU of one process (DataParallel), or just one (Single).

torch's DistributedDataParallel serves as a *reducer* here: it buckets gradients and all-reduces each
bucket while backward goes on. It is built around a private holder of the user's module, whose forward
is never called through it. So the module stays the user's own, needs no hooks and no `no_sync`, and
the engine tells the reducer itself when a backward is the last of a batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from shoal._torch.autograd import after_backward
from shoal._torch.ddp import GradientReducer
from shoal.data.batch import IN_A_LOOP, Count
from shoal.data.micro import Micro
from shoal.distributed.layout import AXES
from shoal.distributed.world import World
from shoal.strategies.contracts import Engine, Totals
from shoal.strategies.data_parallel import choose_compression, compression
from shoal.strategies.data_parallel.compressed_collectives import Wire
from shoal.strategies.data_parallel.compression import Compress
from shoal.strategies.device_placement.multi_device import bring, check_replicas
from shoal.strategies.dtensor import is_divided
from shoal.strategies.engine import SynchronousEngine
from shoal.strategies.held_parameters import HeldParameters, as_scalar, first
from shoal.strategies.local import LocalRunner, local_engine
from shoal.strategies.reducer import LocalReducer, Reducer, backward_seed
from shoal.telemetry.step_timer import COMMUNICATION
from shoal.util.errors import StepError


@dataclass(frozen=True, kw_only=True)
class SingleProcess:
    """The whole model in this process and nothing else; StepError in a world of several."""

    axes: ClassVar[tuple[str, ...]] = AXES
    defers: ClassVar[bool] = False
    several: ClassVar[bool] = True

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Move the model to the device and return the engine of one process."""
        if world.size > 1:
            raise StepError(
                given=f"shoal.SingleProcess() in a world of {world.size} processes",
                found="every process would train a copy of its own",
                fix="shoal.DDP(), or leave the strategy out",
            )
        bring(model, world)
        return local_engine(model, world)


@dataclass(frozen=True, kw_only=True)
class DDP:
    """Replicas that average gradients in buckets during backward (Li et al. 2020).

    `bucket_cap_mb` is the size of a bucket in MiB. `gradient_as_bucket_view` lets gradients live
    inside the buckets, which saves a copy and their memory. `static_graph` promises that the same
    parameters are used in the same way at every step, as re-entrant activation checkpointing needs.
    `find_unused_parameters` allows parameters without a gradient, at the price of a walk over the
    graph; they are named once. `broadcast_buffers` sends rank 0's buffers to all after each batch,
    not only before evaluating and saving. `sync_batch_norm` replaces BatchNorm by SyncBatchNorm (CUDA
    only, a limit of torch's).

    `compression` sends fewer bytes, which loses something and leaves the promise that one process is
    the specification: "fp16", "bf16", "int8", `shoal.PowerSGD()`, `shoal.TopK()`, or "auto", which
    measures the link and takes the one that is worth it, or none.
    """

    axes: ClassVar[tuple[str, ...]] = ("replicate",)
    defers: ClassVar[bool] = False
    several: ClassVar[bool] = True

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    sync_batch_norm: bool = False
    compression: Compress | None = None

    def __post_init__(self) -> None:
        if self.compression is not None:
            compression.check_compression(self.compression)
        if self.bucket_cap_mb <= 0:
            raise StepError(
                given=f"shoal.DDP(bucket_cap_mb={self.bucket_cap_mb})",
                found="a bucket holds at least one parameter",
                fix="bucket_cap_mb=25, torch's default",
            )

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Replicate rank 0's parameters and buffers; in a world of one there is nothing to do."""
        if self.sync_batch_norm:
            if world.device.type != "cuda":
                raise StepError(
                    given="shoal.DDP(sync_batch_norm=True) on the CPU",
                    found="torch has SyncBatchNorm for CUDA only",
                    fix="GroupNorm or LayerNorm, which don't couple samples; or train on GPUs",
                )
            nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if any(map(is_divided, model.parameters())):
            raise StepError(
                given="shoal.DDP() around a model whose layers are divided",
                found="its reducer loses divided parameters after the first forward",
                fix="shoal.TensorParallel(plan=…) alone, which sums over replicas too, or followed by "
                "shoal.FSDP()",
            )
        bring(model, world)
        check_replicas(model, world)
        if world.size == 1:
            return local_engine(model, world)
        return SynchronousEngine(LocalRunner(DDPReducer(HeldParameters(model, world), self)))


class DDPReducer(Reducer):
    """Drives torch's gradient reducer; sums of loss and count ride in its first bucket.

    A parameter of two elements, the tally, is reduced along with the user's. Its "gradient" is
    (loss sum, count) of this rank, so that after backward every rank holds the exact global sums
    without a collective of their own.
    """

    def __init__(self, held: HeldParameters, options: DDP) -> None:
        self.held = held
        self.world = world = held.world
        self.options = options
        self.wire = Wire(world)
        """What compression sends."""
        self._primed = False
        self.reports_loss = world.layout.coordinate(world.rank, "context") == 0
        # On the device of the last parameters, whose bucket is the first: on all ranks the same.
        place = held.parameters[-1].device
        self._tally = nn.Parameter(torch.zeros(2, dtype=tally_dtype(held.parameters), device=place))
        self._reducer = GradientReducer(
            _Holder(held.module, self._tally),
            process_group=world.group,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
        )
        self._buffers = any(True for _ in held.module.buffers())
        self._method: compression.Method | None = None
        self._scale = 1.0
        self._names = {id(p): name for name, p in held.module.named_parameters()}
        if options.compression is not None:
            self._compress(options.compression)
        # With `find_unused_parameters`, torch never rebuilds the buckets, and a static graph is
        # primed by the first real backward, because it records how often each parameter is used.
        self._primed = options.find_unused_parameters and not options.static_graph
        if not options.find_unused_parameters and not options.static_graph:
            self._prime()
        self._last = False
        self._tally.register_hook(_weakly(self._mark_end))

    def backward(
        self, loss: Tensor, count: Count, micro: Micro, size: int, *, scale: float, last: bool
    ) -> None:
        """Run backward; in the last one the reducer all-reduces. See the contract."""
        ranks = self.world.size
        weight = micro.weight * ranks  # the reducer averages over ranks; what is meant is a sum
        copies = self.world.layout.degree("context")  # of this loss, of which one is counted
        seed = backward_seed(loss, scale * weight / size / copies)
        if loss.device.type == "cpu" and not isinstance(count, Tensor):
            value = self._tally.new_tensor((loss.item() * weight, count * weight))
        else:
            sums = (loss.detach().to(self._tally), as_scalar(count, self._tally))
            value = torch.stack(sums) * weight
        if micro.weight == 0 or not self.reports_loss:
            value = torch.zeros_like(value)  # not 0 * loss, which is NaN for an infinite loss
        if not self._primed:
            # Before any other backward: the reducer takes the first that it sees for the graph.
            self._prime_static(loss, value)
        if last:
            roots = (
                [loss, self._tally.view_as(self._tally)] if self.options.find_unused_parameters else []
            )
            self._reducer.begin(roots)
        self._last, self._scale = last, scale
        torch.autograd.backward([loss, self._tally], [seed, value], inputs=self._leaves())
        if last:
            self._check_reduced()

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its graphs split where buckets end, as torch does for its own DDP."""

        def split(*arguments: Any, **named: Any) -> Any:
            with self._reducer.splitting():
                return call(*arguments, **named)

        return split

    def totals(self) -> Totals:
        """Return the tally's sums and the norm; then rank 0's buffers go to all, as DDP has it."""
        self.held.check()
        totals = self._totals(self.held.norm())
        if self._buffers and self.options.broadcast_buffers:
            with self.world.timeline.within(COMMUNICATION):
                self._reducer.broadcast_buffers()
        return totals

    def _mark_end(self, _: Tensor) -> None:
        """Mark where backward has computed all, and begins to wait for buckets that are not reduced.

        The tally is a root of the graph, so its hook runs before any gradient is ready, and what it
        queues comes before what the reducer queues: that waits.
        """
        if self._last:
            enter = self.world.timeline.enter
            after_backward(lambda: enter(COMMUNICATION))

    def synchronize(self) -> None:
        """Send rank 0's buffers to all: they may differ, or another model's loss have changed them."""
        if self._buffers:
            self._reducer.broadcast_buffers()
        if self._method is not None:
            self._method.synchronize(self.wire)

    def state(self) -> dict[str, Any]:
        """Return what compression has left out so far."""
        return {} if self._method is None else {"compression": self._method.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what was left out; a checkpoint without compression has nothing."""
        if self._method is not None:
            self._method.load_state(state.get("compression", {}))

    def _compress(self, how: Compress) -> None:
        """Let each bucket pass through here on its way to the other ranks."""
        named = [(n, p.detach()) for n, p in self.held.module.named_parameters() if p.requires_grad]
        if how == "auto":
            some = list(_first_bytes(named, self.options.bucket_cap_mb * (1 << 20)))
            if not some:
                self.world.print("shoal: compression of gradients: none, since there are no real ones")
                return
            choice = choose_compression.choose(some, self.wire)
            self.world.print(f"shoal: {choice.what}: {choice.value or 'none'}, since {choice.reason}")
            if choice.value is None:
                return
            how = choice.value
        self._method = compression.method(how)
        self._reducer.register_hook(_weakly(self._reduced))

    def _reduced(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The means of the gradients in a bucket of torch's, nearly."""
        with self.world.timeline.within(COMMUNICATION):
            self._reduce(bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _reduce(self, bucket: Any) -> None:
        if any(p.is_complex() for p in bucket.parameters()):
            # They pass as they are; and torch cuts the gradients of such a bucket wrongly.
            self.wire.mean(bucket.buffer())
            return
        own = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter is self._tally:
                self.wire.mean(gradient)  # the sums of loss and count stay exact
            else:
                own.append((self._names[id(parameter)], gradient))
        if own:
            names, gradients = zip(*own, strict=True)
            found = compression.Bucket(names, gradients, self._scale)
            compression.reduce(self._method if self._primed else None, found, self.wire)

    def multiply(self, factor: float) -> None:
        """The batch has come to its end: what compression has left out of it is kept."""
        if self._method is not None:
            named = self.held.module.named_parameters()
            # Compression has sent what was left of these too, and it reached no gradient.
            self._method.keep([n for n, p in named if p.requires_grad and p.grad is None])
        self.held.multiply(factor)

    def discard(self) -> None:
        """Drop the gradients, the tally's too, and what compression has left out of a failed batch."""
        self.held.clear()
        self._tally.grad = None
        if self._method is not None:
            self._method.forget()

    @property
    def pending(self) -> bool:
        """Whether the tally has sums of a batch that was not finished."""
        return self._tally.grad is not None

    def _check_reduced(self) -> None:
        """Raise StepError if a bucket still waits for a gradient: all in it would stay this rank's."""
        self._check_unused()
        try:
            self._reducer.rebuild_buckets()  # done long ago; it still checks that all are reduced
        except RuntimeError:
            self.held.check_converted()
            self.held.check_replaced()
            names = self.held.without_gradient()
            some = f": {first(names)}" if names else ""
            raise StepError(
                given=f"shoal.DDP() around {type(self.held.module).__name__}",
                found="parameters that earlier batches used got no gradient in the last micro-batch "
                f"of this one{some}; the parameters were not touched",
                fix="shoal.DDP(find_unused_parameters=True) where the loss does not always use all of "
                "them; freeze or "
                "convert parameters before parallelize",
            ) from None

    def _leaves(self) -> list[nn.Parameter] | None:
        leaves = self.held.leaves()
        return None if leaves is None else [*leaves, self._tally]

    def _totals(self, norm: Tensor) -> Totals:
        tally = self._tally.grad
        if tally is None:
            raise StepError(
                given="the gradients of a batch",
                found="no backward of its last micro-batch",
                fix=IN_A_LOOP,
            )
        self._tally.grad = None
        if norm.device.type == "cpu":
            loss_sum, count = tally.tolist()
            value = norm.item()
        else:
            loss_sum, count, value = torch.cat((tally, norm.to(tally).reshape(1))).tolist()
        return Totals(loss_sum, whole(count, tally.dtype, self.world.size), value)

    def _prime(self) -> None:
        """Reduce gradients of zeros once, so that the reducer rebuilds its buckets now.

        The reducer rebuilds its buckets after the first backward anyway, in the order in which
        gradients arrived. A resumed run would do so again and sum in another order than the
        uninterrupted run in that one step, which shows in the last bit from 3 ranks on. Priming fixes
        the order to the reverse order of the parameters, torch's own first guess, whether the run is
        fresh or resumed.

        Each leaf gets a backward of its own: autograd runs the roots of one backward in an arbitrary
        order, and buckets in that order would hold the last gradients first, so that no all-reduce
        could start before backward has ended.
        """
        self._reducer.begin()
        for leaf in reversed([*self.held.parameters, self._tally]):
            torch.autograd.backward(leaf, torch.zeros_like(leaf))
        self.discard()
        self._reducer.rebuild_buckets()
        self._primed = True

    def _prime_static(self, loss: Tensor, value: Tensor) -> None:
        """The same with the real graph, whose gradients are then thrown away."""
        kept = [(leaf, leaf.grad) for leaf in (*self.held.parameters, self._tally)]
        for leaf, _ in kept:
            leaf.grad = None
        self._reducer.begin()
        handle = loss.register_hook(lambda _: self._reducer.reduce_after_backward())
        roots, seeds = [loss, self._tally], [torch.zeros_like(loss), value]
        torch.autograd.backward(roots, seeds, retain_graph=True)
        handle.remove()
        # The reducer notes the order of the gradients only in the second backward of a static graph.
        self._reducer.begin()
        torch.autograd.backward(roots, seeds, retain_graph=True)
        for leaf, gradient in kept:
            leaf.grad = gradient
        self._reducer.rebuild_buckets()
        self._primed = True

    def _check_unused(self) -> None:
        """Raise StepError for parameters that the first batch has not used, or print them."""
        if self.options.find_unused_parameters or self.options.static_graph:
            self.held.print_unused()
        elif names := self.held.unused():
            raise StepError(
                given=f"shoal.DDP() around {type(self.held.module).__name__}",
                found=f"parameters that the loss does not use: {', '.join(names)}",
                fix="shoal.DDP(find_unused_parameters=True), or freeze them with requires_grad_(False) "
                "beforehand",
            )


def _weakly(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`method` for a hook on something that its object holds.

    A circle would keep the engine, its reducer and their threads after the model is gone.
    """
    reference = WeakMethod(method)

    def call(given: Any) -> Any:
        found = reference()
        return None if found is None else found(given)

    return call


def _first_bytes(named: Sequence[tuple[str, Tensor]], most: float) -> Iterator[tuple[str, Tensor]]:
    """Of the real dtype that most bytes are of as many as have so many bytes, one at least."""
    bytes_of: Counter[torch.dtype] = Counter()
    for _, tensor in named:
        if tensor.is_floating_point() and tensor.numel():
            bytes_of[tensor.dtype] += tensor.nbytes
    most_of = max(bytes_of, key=bytes_of.__getitem__, default=None)
    size = 0
    for name, tensor in named:
        if tensor.dtype == most_of and tensor.numel() and (not size or size + tensor.nbytes <= most):
            size += tensor.nbytes
            yield name, tensor


class _Holder(nn.Module):
    def __init__(self, module: nn.Module, tally: nn.Parameter) -> None:
        super().__init__()
        self.module = module
        self.tally = tally


def tally_dtype(parameters: Sequence[Tensor]) -> torch.dtype:
    """The widest real floating dtype among `parameters`, at least float32.

    Sharing a dtype with the parameters lets the tally share a bucket with them.
    """
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    return torch.float64 if wide else torch.float32


def whole(count: float, dtype: torch.dtype, ranks: int) -> float:
    """`count` without the rounding that averaging over ranks left on a whole number."""
    if not math.isfinite(count):
        return count
    nearest = float(round(count))
    return nearest if abs(count - nearest) <= 4 * ranks * torch.finfo(dtype).eps * nearest else count


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """One process, several GPUs: scatter, replicate, gather at each forward (torch.nn.DataParallel).

    For scripts that need it; DDP with a process per GPU is faster. Without two GPUs it does nothing
    and says so.
    """

    axes: ClassVar[tuple[str, ...]] = AXES
    defers: ClassVar[bool] = False

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Return an engine that spreads each forward over the visible GPUs."""
        if world.size > 1:
            raise StepError(
                given=f"shoal.DataParallel() in a world of {world.size} processes",
                found="it spreads one process over several GPUs; processes are spread by DDP",
                fix="shoal.DDP(), or start one process",
            )
        visible = torch.cuda.device_count() if world.device.type == "cuda" else 0
        if visible < 2:
            world.print(
                f"shoal: DataParallel does nothing here: it needs two GPUs, and {visible} are visible "
                f"on {world.device}"
            )
            return local_engine(model.to(world.device), world)
        model.to(world.device)
        reducer = LocalReducer(HeldParameters(model, world))
        # A user's own loop uses one GPU.
        return SynchronousEngine(LocalRunner(reducer, nn.DataParallel(model)))

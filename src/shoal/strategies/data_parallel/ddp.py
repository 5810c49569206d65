"""Replicated models: one per rank (DDP), one per GPU of a process (DataParallel), or SingleProcess.

torch's DistributedDataParallel serves as a *reducer* here: it buckets gradients and all-reduces each
bucket while backward runs. It wraps a private holder of the user's module, and Shoal never calls the
forward through it. So the user's module is not wrapped, needs no hooks and no `no_sync`, and the engine
tells the reducer when a backward pass is the last of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from shoal._torch.autograd import after_backward
from shoal._torch.ddp import GradientReducer
from shoal.data.batch import IN_A_LOOP, Count
from shoal.data.micro import MicroBatch
from shoal.distributed.layout import AXES
from shoal.distributed.tensors import broadcast
from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.correction import AnyTotals, DeviceTotals, Factor, Totals
from shoal.strategies.coupling.batch_norm import refuse_coupled, uncovered_buffers
from shoal.strategies.data_parallel import choose_compression, compression
from shoal.strategies.data_parallel.compressed_collectives import CountedCollectives, finished
from shoal.strategies.data_parallel.compression import Compress
from shoal.strategies.data_parallel.fixed_order import FixedOrderReducer, RepeatableEngine
from shoal.strategies.data_parallel.tally import tally_dtype, whole, whole_on_device
from shoal.strategies.dtensor import is_divided
from shoal.strategies.held_parameters import HeldParameters, as_scalar, first
from shoal.strategies.local import LocalEngine, local_engine
from shoal.strategies.multi_device import bring, check_replicas
from shoal.strategies.reducer import LocalReducer, Reducer, backward_seed
from shoal.telemetry.step_timer import COMMUNICATION
from shoal.util.accelerator import SideStream
from shoal.util.arguments import check_number
from shoal.util.errors import StepError


@dataclass(frozen=True, kw_only=True)
class SingleProcess:
    """Training in a single process, on one device.

    Raises:
        StepError: If the world has more than one process.

    Examples:
        >>> strategy = shoal.SingleProcess()
    """

    axes: ClassVar[tuple[str, ...]] = AXES
    defers: ClassVar[bool] = False
    several: ClassVar[bool] = True

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Move the model to the device and return the engine of one process."""
        if world.size > 1:
            raise StepError(
                given=f"shoal.SingleProcess() in a world of {world.size} processes",
                found="each process would train a separate model",
                fix="pass shoal.DDP(), or leave the strategy out",
            )
        bring(model, world)
        return local_engine(model, world)


@dataclass(frozen=True, kw_only=True)
class DDP:
    """Data parallelism (DDP): replicas all-reduce gradients in buckets during backward.

    Uses the reducer of torch's DistributedDataParallel (Li et al. 2020).

    Args:
        bucket_cap_mb: Size of a gradient bucket, in MiB. Default: 25.0.
        gradient_as_bucket_view: Make gradients views of the buckets, which saves a copy and their
            memory. Default: True.
        static_graph: Promise that every step uses the same parameters in the same way, as re-entrant
            activation checkpointing needs. Default: False.
        find_unused_parameters: Allow parameters without a gradient and report them once. Costs a
            traversal of the autograd graph per step. Default: False.
        broadcast_buffers: Broadcast rank 0's buffers after each batch, if they may differ between
            ranks. If False, only before evaluating and saving. Default: True.
        compression: Gradient compression: "fp16", "bf16", "int8", a `PowerSGD`, a `TopK`, or "auto",
            which measures the network and chooses a method or none. Compression is lossy: results
            differ from those of one process. None means no compression. Default: None.

    Raises:
        StepError: If an argument is out of range, or a layer of the model is sharded.

    Examples:
        >>> strategy = shoal.DDP(bucket_cap_mb=50, find_unused_parameters=True)
    """

    axes: ClassVar[tuple[str, ...]] = ("replicate",)
    defers: ClassVar[bool] = False
    several: ClassVar[bool] = True

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    compression: Compress | None = None

    def __post_init__(self) -> None:
        if self.compression is not None:
            compression.check_compression(self.compression)
        check_number(StepError, "shoal.DDP", "bucket_cap_mb", self.bucket_cap_mb, above=True, usual=25)

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Broadcast rank 0's parameters and buffers. In a world of size 1, do nothing."""
        if any(map(is_divided, model.parameters())):
            raise StepError(
                given="shoal.DDP() around a model whose layers or experts are sharded",
                found="the reducer of DDP loses sharded parameters after the first forward pass",
                fix="use shoal.TensorParallel(plan=…) or shoal.ExpertParallel() alone, which also sum "
                "over replicas, or followed by shoal.FSDP()",
            )
        bring(model, world)
        check_replicas(model, world)
        if world.virtual_ranks is not None:
            if self.compression is not None:
                raise StepError(
                    given=f"shoal.DDP(compression={self.compression!r}) with exact='bits'",
                    found="compressed gradients depend on the number of ranks",
                    fix="leave compression out, or exact='bits'",
                )
            held = HeldParameters(model, world)
            return RepeatableEngine(FixedOrderReducer(held, world.virtual_ranks))
        if world.size == 1:
            return local_engine(model, world)
        return LocalEngine(DDPReducer(HeldParameters(model, world), self))


class DDPReducer(Reducer):
    """Reducer that drives torch's gradient reducer and sums loss and count in its first bucket.

    A parameter of two elements, the tally, is reduced along with the user's parameters. Its "gradient"
    is (loss sum, count) of this rank, so that after backward every rank holds the exact global sums
    without another collective.
    """

    def __init__(self, held: HeldParameters, options: DDP) -> None:
        self.held = held
        self.world = world = held.world
        self.options = options
        self.wire = CountedCollectives(world)
        """Collectives of compressed gradients, which count the bytes sent."""
        self._primed = False
        self.reports_loss = world.layout.coordinate(world.rank, "context") == 0
        # On the device of the last parameters, whose bucket is the first: the same on all ranks.
        place = held.parameters[-1].device
        self._tally = nn.Parameter(torch.zeros(2, dtype=tally_dtype(held.parameters), device=place))
        if not world.simulated:
            broadcast((*held.module.parameters(), *held.module.buffers()), world.group)
        self._reducer = GradientReducer(
            _Holder(held.module, self._tally),
            process_group=world.group,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
            fake=world.simulated,
        )
        # Layers that take statistics over all ranks have the same buffers on all of them.
        self._buffers = bool(uncovered_buffers(held.module))
        self._method: compression.CompressionMethod | None = None
        self._streams: dict[torch.device, SideStream] = {}
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
        self, loss: Tensor, count: Count, micro: MicroBatch, size: int, *, scale: float, last: bool
    ) -> None:
        """Run backward. The reducer all-reduces in the last one of a batch. See the contract."""
        ranks = self.world.size
        weight = micro.weight * ranks  # the reducer averages over ranks, and a sum is needed
        copies = self.world.layout.degree("context")  # of this loss; only one is counted
        seed = backward_seed(loss, scale * weight / size / copies)
        if loss.device.type == "cpu" and not isinstance(count, Tensor):
            value = self._tally.new_tensor((loss.item() * weight, count * weight))
        else:
            sums = (loss.detach().to(self._tally), as_scalar(count, self._tally))
            value = torch.stack(sums) * weight
        if micro.weight == 0 or not self.reports_loss:
            value = torch.zeros_like(value)  # not 0 * loss, which is NaN for an infinite loss
        if not self._primed:
            # Before any other backward: the reducer records the first graph that it sees.
            self._prime_static(loss, value)
        if last:
            roots = (
                [loss, self._tally.view_as(self._tally)] if self.options.find_unused_parameters else []
            )
            self._reducer.begin(roots)
        self._last, self._scale = last, scale
        torch.autograd.backward([loss, self._tally], [seed, value], inputs=self._leaves(loss))
        if last:
            self._check_reduced()

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its graphs split where buckets end, as torch does for its own DDP."""

        def split(*arguments: Any, **named: Any) -> Any:
            with self._reducer.splitting():
                return call(*arguments, **named)

        return split

    def totals(self) -> AnyTotals:
        """Return the sums of the tally and the norm, then broadcast rank 0's buffers as DDP does."""
        self.held.check()
        totals = self._totals(self.held.norm())
        if self._buffers and self.options.broadcast_buffers:
            with self.world.timeline.within(COMMUNICATION):
                self._broadcast_buffers()
        return totals

    def _mark_end(self, _: Tensor) -> None:
        """Mark where backward has computed all gradients and begins to wait for buckets.

        The tally is a root of the graph, so its hook runs before any gradient is ready. Its callback
        is queued before that of the reducer, which waits.
        """
        if self._last:
            enter = self.world.timeline.enter
            after_backward(lambda: enter(COMMUNICATION))

    def synchronize(self) -> None:
        """Broadcast rank 0's buffers. They may differ: another model's loss can change them."""
        if self._buffers:
            self._broadcast_buffers()
        if self._method is not None:
            self._method.synchronize(self.wire)

    def _broadcast_buffers(self) -> None:
        broadcast(self.held.module.buffers(), self.world.group)

    def state(self) -> dict[str, Any]:
        """Return the error feedback of compression."""
        return {} if self._method is None else {"compression": self._method.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the error feedback of compression. A checkpoint without compression has none."""
        if self._method is not None:
            self._method.load_state(state.get("compression", {}))

    def _compress(self, how: Compress) -> None:
        """Reduce each bucket with a compression method, "auto" with the one chosen for the network."""
        named = [(n, p.detach()) for n, p in self.held.module.named_parameters() if p.requires_grad]
        if how == "auto":
            some = list(choose_compression.first_bytes(named, self.options.bucket_cap_mb * (1 << 20)))
            if not some:
                self.world.print("shoal: gradients are not compressed, because all of them are complex")
                return
            choice = choose_compression.choose(some, self.wire)
            self.world.print(f"shoal: {choice.what}: {choice.value or 'none'}, because {choice.reason}")
            if choice.value is None:
                return
            how = choice.value
        self._method = compression.method(how)
        self.waits_because = "the error feedback of compressed gradients depends on it"
        self._reducer.register_hook(_weakly(self._reduced))

    def _reduced(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Replace the gradients of a bucket by approximate means over the ranks, and return it.

        On an accelerator backward does not wait for it: all of it runs on a stream of its own, and the
        reducer waits for the future.
        """
        buffer = bucket.buffer()
        stream = self._streams.setdefault(buffer.device, SideStream(buffer.device))
        with self.world.timeline.within(COMMUNICATION), stream.after_current():
            self._reduce(bucket)
            return finished(buffer)

    def _reduce(self, bucket: Any) -> None:
        if any(p.is_complex() for p in bucket.parameters()):
            # Complex gradients are not compressed, and torch splits such a bucket wrongly.
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

    def multiply(self, factor: Factor) -> None:
        """Multiply the gradients, and keep the error feedback of the batch, which is complete."""
        if self._method is not None:
            named = self.held.module.named_parameters()
            # Compression has sent the residuals of these too, and they reached no gradient.
            self._method.keep([n for n, p in named if p.requires_grad and p.grad is None])
        self.held.multiply(factor)

    def discard(self) -> None:
        """Clear the gradients and the tally, and drop the error feedback of a failed batch."""
        self.held.clear()
        self._tally.grad = None
        if self._method is not None:
            self._method.forget()

    @property
    def pending(self) -> bool:
        """Whether the tally holds sums of an unfinished batch."""
        return self._tally.grad is not None

    def _check_reduced(self) -> None:
        """Raise StepError if a bucket still waits for a gradient, since it would not be reduced."""
        self._check_unused()
        try:
            self._reducer.rebuild_buckets()  # already rebuilt; the call checks that all are reduced
        except RuntimeError:
            self.held.check_converted()
            self.held.check_replaced()
            names = self.held.without_gradient()
            some = f": {first(names)}" if names else ""
            raise StepError(
                given=f"shoal.DDP() around {type(self.held.module).__name__}",
                found="the last micro-batch gave no gradient to some parameters that earlier batches "
                f"used{some}; no parameter was changed",
                fix="use shoal.DDP(find_unused_parameters=True) if the loss does not always use all "
                "parameters; freeze or convert parameters before parallelize",
            ) from None

    def _leaves(self, loss: Tensor) -> list[Tensor] | None:
        leaves = self.held.leaves(loss)
        return None if leaves is None else [*leaves, self._tally]

    def _totals(self, norm: Tensor) -> AnyTotals:
        tally = self._tally.grad
        if tally is None:
            raise StepError(
                given="the gradients of a batch",
                found="no backward pass of its last micro-batch",
                fix=IN_A_LOOP,
            )
        self._tally.grad = None
        if norm.device.type == "cpu":
            loss_sum, count = tally.tolist()
            return Totals(loss_sum, whole(count, tally.dtype, self.world.size), norm.item())
        sums = torch.cat((tally, norm.to(tally).reshape(1))).double()
        sums[1] = whole_on_device(sums[1], tally.dtype, self.world.size)
        return DeviceTotals(sums)

    def _prime(self) -> None:
        """Reduce gradients of zeros once, so that the reducer rebuilds its buckets now.

        The reducer rebuilds its buckets after the first backward pass anyway, in the order in which
        gradients arrived. A resumed run would do so again and sum in a different order than the
        uninterrupted run in that one step, which shows in the last bit from 3 ranks on. Priming fixes
        the order to the reverse order of the parameters, torch's own first guess, whether the run is
        fresh or resumed.

        Each leaf gets a separate backward: autograd runs the roots of one backward pass in an arbitrary
        order, and buckets in that order would hold the last gradients first, so that no all-reduce
        could start before the end of backward.
        """
        self._reducer.begin()
        for leaf in reversed([*self.held.parameters, self._tally]):
            torch.autograd.backward(leaf, torch.zeros_like(leaf))
        self.discard()
        self._reducer.rebuild_buckets()
        self._primed = True

    def _prime_static(self, loss: Tensor, value: Tensor) -> None:
        """Do the same as `_prime` with the real graph, and discard its gradients."""
        kept = [(leaf, leaf.grad) for leaf in (*self.held.parameters, self._tally)]
        for leaf, _ in kept:
            leaf.grad = None
        self._reducer.begin()
        handle = loss.register_hook(lambda _: self._reducer.reduce_after_backward())
        roots, seeds = [loss, self._tally], [torch.zeros_like(loss), value]
        torch.autograd.backward(roots, seeds, retain_graph=True)
        handle.remove()
        # The reducer notes the order of the gradients only in the second backward pass of a static
        # graph.
        self._reducer.begin()
        torch.autograd.backward(roots, seeds, retain_graph=True)
        for leaf, gradient in kept:
            leaf.grad = gradient
        self._reducer.rebuild_buckets()
        self._primed = True

    def _check_unused(self) -> None:
        """Raise StepError for parameters that the first batch did not use, or print them."""
        if self.options.find_unused_parameters or self.options.static_graph:
            self.held.print_unused()
        elif names := self.held.unused():
            raise StepError(
                given=f"shoal.DDP() around {type(self.held.module).__name__}",
                found=f"parameters that the loss does not use: {', '.join(names)}",
                fix="use shoal.DDP(find_unused_parameters=True), or freeze them with "
                "requires_grad_(False) beforehand",
            )


def _weakly(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `method` with a weak reference to its object, for a hook on something that it holds.

    A reference cycle would keep the engine, its reducer and their threads alive after the model.
    """
    reference = WeakMethod(method)

    def call(given: Any) -> Any:
        found = reference()
        return None if found is None else found(given)

    return call


class _Holder(nn.Module):
    def __init__(self, module: nn.Module, tally: nn.Parameter) -> None:
        super().__init__()
        self.module = module
        self.tally = tally


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Data parallelism over the GPUs of one process, with torch.nn.DataParallel.

    Each forward pass scatters the inputs, replicates the model and gathers the outputs. `DDP` with one
    process per GPU is faster. With fewer than two GPUs, the model runs on one device, and Shoal prints
    a line about it.

    Raises:
        StepError: If the world has more than one process.

    Examples:
        >>> strategy = shoal.DataParallel()
    """

    axes: ClassVar[tuple[str, ...]] = AXES
    defers: ClassVar[bool] = False

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Return an engine that runs each forward pass on all visible GPUs."""
        if world.size > 1:
            raise StepError(
                given=f"shoal.DataParallel() in a world of {world.size} processes",
                found="DataParallel uses several GPUs from one process; DDP uses several processes",
                fix="use shoal.DDP(), or start one process",
            )
        visible = torch.cuda.device_count() if world.device.type == "cuda" else 0
        if visible < 2:
            world.print(
                f"shoal: DataParallel has no effect: it needs two GPUs, and {visible} are visible "
                f"on {world.device}"
            )
            return local_engine(model.to(world.device), world)
        refuse_coupled(model, "shoal.DataParallel()", "its replicas are copies in separate threads")
        model.to(world.device)
        reducer = LocalReducer(HeldParameters(model, world))
        # A custom training loop uses one GPU.
        return LocalEngine(reducer, nn.DataParallel(model))

"""Reducer and engine of `shoal.init(exact="bits")`: gradients of virtual ranks, in one fixed tree.

A rank adds the subtrees that it holds. Then each rank gets one chunk of everyone's subtrees
(all-to-all), adds them up in the order of the tree, and all ranks gather the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shoal._torch.c10d import all_gather_tensor
from shoal.data.batch import Batch, Count
from shoal.data.coupling.step import CoupledStep
from shoal.data.micro import MicroBatch
from shoal.distributed.tensors import broadcast
from shoal.distributed.virtual_ranks import VirtualRanks, virtual_ranks_of
from shoal.strategies.contracts import PartialSums
from shoal.strategies.correction import Totals
from shoal.strategies.coupling.batch_norm import uncovered_buffers
from shoal.strategies.data_parallel.gradient_buffers import BufferPool, GradientBuffers, SingleGradients
from shoal.strategies.data_parallel.summation_tree import TreeSum, subtrees
from shoal.strategies.eval_mode import random_states_kept
from shoal.strategies.held_parameters import HeldParameters, first
from shoal.strategies.local import LocalEngine
from shoal.strategies.reducer import Reducer, backward_seed
from shoal.strategies.task import Task
from shoal.telemetry.step_timer import COMMUNICATION
from shoal.util.errors import StepError


class FixedOrderReducer(Reducer):
    """Reducer whose sums have the same bits on any number of ranks."""

    waits_because = "its losses are summed in a fixed order on the host"

    def __init__(self, held: HeldParameters, virtual: VirtualRanks) -> None:
        self.held = held
        self.world = held.world
        self._virtual = virtual
        ranks = self.world.size
        self._nodes = [
            subtrees(*virtual_ranks_of(rank, ranks=ranks, total=virtual.total)[1:], virtual.total)
            for rank in range(ranks)
        ]
        self._pool = BufferPool(held.parameters, ranks)
        self._tree = self._new_tree()
        self._sums: GradientBuffers | None = None
        """The sums of the last batch, which are the gradients of the parameters."""
        self._single = SingleGradients(held.parameters)
        self._received: dict[int, Tensor] = {}
        """The nodes of this rank's chunk of each bucket."""
        self._rows: list[tuple[float, float]] = []
        self._table: tuple[Tensor, dist.Work | None] | None = None
        """The rows of all ranks, and the collective that adds them up."""
        self.observer: Callable[[PartialSums], None] | None = None
        """Called with the sums of this rank before they are exchanged."""
        self._broadcast()
        self._buffers: dict[str, Tensor] | None = {
            name: buffer.clone() for name, buffer in uncovered_buffers(held.module).items()
        }
        """The buffers before the first batch, until that batch has been checked."""

    @property
    def pending(self) -> bool:
        """Whether there are sums of an unfinished batch."""
        return bool(self._rows)

    def backward(
        self, loss: Tensor, count: Count, micro: MicroBatch, size: int, *, scale: float, last: bool
    ) -> None:
        """Run backward of one virtual rank; the `last` one reduces. See the contract."""
        leaf = _leaf(micro)
        row = (loss.item() * micro.weight, float(count) * micro.weight) if micro.weight else (0.0, 0.0)
        self._rows.append(row)
        if last:
            self._table = self._add_up_rows()  # while backward runs
        if self._sums is not None:
            self._pool.give_back(self._sums)
            self._sums = None
        start, buffers = self._room(self._tree, leaf)
        self._run_backward(loss, micro, size, scale, buffers)
        if last:
            self.held.print_unused()
        self._collect(buffers)
        self._tree.push(start, leaf + 1, buffers)
        if last:
            with self.world.timeline.within(COMMUNICATION):
                self._reduce()

    def partial_sums(
        self, passes: Iterable[tuple[Tensor, MicroBatch]], size: int, scale: float
    ) -> PartialSums:
        """Return the sums of the virtual ranks of any rank, whose losses are `passes`.

        The gradients of the parameters and the sums of the running batch stay as they are.
        """
        kept = [parameter.grad for parameter in self.held.parameters]
        tree = self._new_tree()
        try:
            for loss, micro in passes:
                leaf = _leaf(micro)
                start, buffers = self._room(tree, leaf)
                self._run_backward(loss, micro, size, scale, buffers)
                self._collect(buffers)
                tree.push(start, leaf + 1, buffers)
        finally:
            for parameter, gradient in zip(self.held.parameters, kept, strict=True):
                parameter.grad = gradient
        return [buffers.views for *_, buffers in tree.nodes]

    def totals(self) -> Totals:
        """Return the sums over virtual ranks in their order, and the norm of the gradients."""
        self.held.check()
        self._check_buffers()
        (table, work), self._table = self._table or self._add_up_rows(), None
        self._rows.clear()
        if work is not None:
            work.wait()
        rows = table.tolist()
        loss_sum, counted = (sum(column) for column in zip(*rows, strict=True))
        return Totals(loss_sum, counted, self.held.norm().item())

    def discard(self) -> None:
        """Clear the gradients, and drop the sums recorded for their batch."""
        self.held.clear()
        self._rows.clear()
        self._table = None
        self._tree = self._new_tree()

    def _room(self, tree: TreeSum[GradientBuffers], leaf: int) -> tuple[int, GradientBuffers]:
        """Return the buffers for the gradients of a virtual rank, and the first virtual rank in them.

        They contain the left sibling, so that backward adds the two; or zeros. A sum that begins with 0
        is never -0, so that 0 + g and g give the same sum with a sibling.
        """
        return tree.pop_sibling(leaf, leaf + 1) or (leaf, self._pool.take())

    def _run_backward(
        self, loss: Tensor, micro: MicroBatch, size: int, scale: float, buffers: GradientBuffers
    ) -> None:
        """Run backward, which adds each gradient to `buffers`."""
        # The first batch checks which parameters have a gradient.
        given = buffers.views if self.held.unused_checked else [None] * len(buffers.views)
        for parameter, view in zip(self.held.parameters, given, strict=True):
            parameter.grad = view
        seed = backward_seed(loss, scale * micro.weight / size)
        with self._single:
            torch.autograd.backward([loss], [seed], inputs=self.held.leaves(loss))

    def _collect(self, buffers: GradientBuffers) -> None:
        """Take the gradients from the parameters; `buffers` has them after this."""
        with torch.no_grad():
            for parameter, view in zip(self.held.parameters, buffers.views, strict=True):
                if parameter.grad is not None and parameter.grad is not view:
                    view.add_(parameter.grad)
                parameter.grad = None

    def _new_tree(self) -> TreeSum[GradientBuffers]:
        return TreeSum(self._virtual.total, self._added)

    def _added(self, one: GradientBuffers, other: GradientBuffers) -> GradientBuffers:
        one.add(other)
        self._pool.give_back(other)
        return one

    def _add_up_rows(self) -> tuple[Tensor, dist.Work | None]:
        """Begin to add up the rows of all ranks, exactly: all but one addend are 0. Collective."""
        table = torch.zeros(self._virtual.total, 2, dtype=torch.float64, device=self.world.device)
        table[self._virtual.start : self._virtual.stop] = table.new_tensor(self._rows)
        alone = self.world.size == 1
        return table, None if alone else dist.all_reduce(table, group=self.world.group, async_op=True)

    def _reduce(self) -> None:
        """Set the gradients to the sums over all virtual ranks. Collective."""
        nodes = [buffers for *_, buffers in self._tree.nodes]
        self._tree = self._new_tree()
        if self.observer is not None:
            self.observer([buffers.views for buffers in nodes])
        self._sums, *others = nodes
        if self.world.size > 1:
            for work in self._add_up(nodes):
                work.wait()
        for buffers in others:
            self._pool.give_back(buffers)
        for parameter, view in zip(self.held.parameters, self._sums.views, strict=True):
            if parameter.requires_grad:  # weight decay would change one that was frozen since
                parameter.grad = view

    def _add_up(self, nodes: Sequence[GradientBuffers]) -> list[dist.Work]:
        """Begin to replace the contents of the first node by the sums over all ranks."""
        flats, group = nodes[0].flats, self.world.group
        if [len(each) for each in self._nodes] == [1, 1]:  # a + b = b + a: any order has the same bits
            return [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]
        exchanges = [
            self._exchange(bucket, [buffers.flats[bucket] for buffers in nodes])
            for bucket in range(len(flats))
        ]
        return [
            work
            for bucket, (flat, exchange) in enumerate(zip(flats, exchanges, strict=True))
            for work in self._sum_chunk(bucket, flat, exchange)
        ]

    def _exchange(self, bucket: int, nodes: Sequence[Tensor]) -> dist.Work:
        """Send each rank its chunk of this rank's nodes; begin to receive this rank's of all ranks."""
        ranks = self.world.size
        sent, chunk = nodes[0], len(nodes[0]) // ranks
        if len(nodes) > 1:
            sent = torch.stack([node.view(ranks, chunk) for node in nodes], dim=1).flatten()
        counts = [len(each) * chunk for each in self._nodes]
        if bucket not in self._received:
            self._received[bucket] = sent.new_empty(sum(counts))
        work: dist.Work = dist.all_to_all_single(
            self._received[bucket],
            sent,
            counts,
            [len(nodes) * chunk] * ranks,
            group=self.world.group,
            async_op=True,
        )
        return work

    def _sum_chunk(self, bucket: int, flat: Tensor, exchange: dist.Work) -> list[dist.Work]:
        """Add up the nodes of this rank's chunk in the order of the tree; begin to gather chunks."""
        exchange.wait()
        tree: TreeSum[Tensor] = TreeSum(self._virtual.total, Tensor.add_)
        places = [node for held in self._nodes for node in held]
        parts = self._received[bucket].chunk(len(places))
        for (start, stop), value in zip(places, parts, strict=True):
            tree.push(start, stop, value)
        ((_, _, total),) = tree.nodes
        return self._gather_chunks(flat, total)

    def _gather_chunks(self, flat: Tensor, total: Tensor) -> list[dist.Work]:
        """Begin to replace each chunk of `flat` by its sum, which one rank has as `total`."""
        rank, ranks, group = self.world.rank, self.world.size, self.world.group
        if flat.device.type != "cpu":
            return [all_gather_tensor(flat, total, group=group, async_op=True)]
        # Gloo's all-gather allocates the result, and copies it.
        chunks = flat.chunk(ranks)
        others = [(rank + distance) % ranks for distance in range(1, ranks)]
        works = [dist.irecv(chunks[other], group=group, group_src=other) for other in others]
        works += [dist.isend(total, group=group, group_dst=other) for other in others]
        chunks[rank].copy_(total)
        return list(filter(None, works))

    def _broadcast(self) -> None:
        """Give all ranks the parameters and buffers of rank 0."""
        if self.world.size > 1:
            broadcast((*self.held.module.parameters(), *self.held.module.buffers()), self.world.group)

    def _check_buffers(self) -> None:
        """Raise StepError, after the first batch, if its forward passes changed buffers."""
        before, self._buffers = self._buffers, None
        if before is None:
            return
        now = uncovered_buffers(self.held.module)
        changed = [n for n, value in before.items() if n in now and not torch.equal(value, now[n])]
        if changed:
            raise StepError(
                given=f"exact='bits' with the buffers {first(changed)}",
                found="the forward pass changes them, so they depend on how many virtual ranks a rank "
                "computes",
                fix="freeze these layers with .eval(), or use a layer derived from shoal.Coupled; or "
                "leave exact out",
            )


def _leaf(micro: MicroBatch) -> int:
    """Return the number of a virtual rank. Raise StepError for another micro-batch."""
    if micro.place is None or not micro.place.whole:
        raise StepError(
            given="a batch that no Loader of this world cut, with exact='bits'",
            found="its micro-batches are not virtual ranks",
            fix="shoal.Loader(dataset, world, batch_size=64)",
        )
    return micro.place.number


class RepeatableEngine(LocalEngine):
    """Engine that computes the partial sums of any rank, with the same bits as that rank.

    `names` has the names of the parameters, in the order of the sums.
    """

    reducer: FixedOrderReducer

    def __init__(self, reducer: FixedOrderReducer) -> None:
        super().__init__(reducer)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.names = [names[id(parameter)] for parameter in self.held.parameters]

    @contextmanager
    def observed(self, observer: Callable[[PartialSums], None]) -> Iterator[None]:
        """Call `observer` with the partial sums of this rank in the batch inside the block."""
        self.reducer.observer = observer
        try:
            yield
        finally:
            self.reducer.observer = None

    def compute(
        self, rank: int, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> PartialSums:
        """Return the partial sums that `rank` computes in the batch.

        Gradients, random states and the statistics that layers record stay as they are.
        """
        coupled = self.world.service(CoupledStep)

        def passes() -> Iterator[tuple[Tensor, MicroBatch]]:
            for micro in batch.micros_of(rank):
                with coupled.processing(micro):
                    yield self.loss(task, micro, batch.seed, autocast)[0], micro

        with random_states_kept(self.module), coupled.recording_nothing():
            return self.reducer.partial_sums(passes(), batch.size, scale)

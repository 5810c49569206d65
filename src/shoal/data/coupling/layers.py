"""The contract of layers that couple the samples of a batch: sums over groups, on any ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.autograd import in_backward
from shoal.data.coupling.step import Coupling, Part, coupling_of


class SampleGroups:
    """The groups that the rows of a layer's input belong to, as `Coupled.groups` returns them.

    Args:
        rows: Number of rows of the input.
        part: Groups of this rank in the running step. `None` is one group of all rows. Default: None.
        module: Layer whose state `update` changes. Default: None.

    Examples:
        >>> groups = shoal.SampleGroups(rows=4)  # outside a step: one group, the rows at hand
        >>> groups.sum(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([10.])
    """

    def __init__(self, rows: int, part: Part | None = None, module: nn.Module | None = None) -> None:
        self._rows = rows
        self._part = part
        self._module = module
        # Without samples on any rank, the padding is a group that is not recorded.
        self._segments = part.segments if part and part.segments else [(0, rows)]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums of `values` over the rows of each group, on all ranks. Collective.

        Gradients flow back to the rows of every rank.

        Args:
            values: Tensor of shape (rows, …).

        Returns:
            Tensor of shape (groups of this rank, …).
        """
        sums = torch.stack([values[start:stop].sum(0) for start, stop in self._segments])
        return sums if self._part is None else add_up(sums, self._part)

    def expand(self, sums: Tensor) -> Tensor:
        """Return, for each row, the values of its group.

        Args:
            sums: Tensor of shape (groups of this rank, …).

        Returns:
            Tensor of shape (rows, …).
        """
        numbers = torch.full((self._rows,), len(self._segments) - 1)
        for number, (start, stop) in enumerate(self._segments):
            numbers[start:stop] = number
        return sums[numbers.to(sums.device)]

    def before(self, values: Tensor) -> Tensor:
        """Return, for each row, the sum of `values` over earlier rows of its group. Collective.

        Rows are in the order of their positions in the batch, also those of other ranks.

        Args:
            values: Tensor of shape (rows, …).

        Returns:
            Tensor of shape (rows, …), without gradients.
        """
        values = values.detach()
        found = torch.zeros_like(values)
        for start, stop in self._segments:
            found[start:stop] = values[start:stop].cumsum(0) - values[start:stop]
        if self._part is None or not self._part.groups.shared:
            return found
        world = self._part.coupling.world
        table = values.new_zeros(len(self._segments), world.data_size, *values.shape[1:])
        for row, (start, stop) in enumerate(self._segments):
            table[row, world.data_rank] = values[start:stop].sum(0)
        return found + self.expand(self._part.add_up(table)[:, : world.data_rank].sum(1))

    def update(self, function: Callable[..., object], *sums: Tensor) -> None:
        """Call `function(*sums)` at the end of the step, for each group of the batch, on all ranks.

        Shoal calls the function in the order of the groups' positions, so that the state of the layer
        is the same as on one process. Outside a step, it calls the function directly. It does not call
        the function after a step that fails or is skipped, or for a recomputed forward pass.

        Args:
            function: Function that changes the state of the layer, such as a moving average.
            sums: Tensors of shape (groups of this rank, …); the function gets the sums of one group,
                without gradients.
        """
        if in_backward():
            return
        if self._part is None or self._module is None:
            with torch.no_grad():
                function(*(each[0].detach() for each in sums))
            return
        step = self._part.coupling.step
        recorded = step.recorded.get(self._module)
        if not isinstance(recorded, _Calls):
            recorded = step.recorded[self._module] = _Calls(self._part.coupling)
        recorded.add(step.number(self._module), function, self._part, [s.detach() for s in sums])


class Coupled(nn.Module):
    """Base class of layers whose result for a sample depends on other samples of the batch.

    `groups` returns the groups of samples that the layer may couple: the whole batch, or groups of
    `statistics` consecutive positions (see `parallelize`). A layer that uses sums over these groups
    gives the same results at any number of ranks and micro-batches. Every rank must call the layer the
    same number of times.

    Examples:
        >>> class Centered(shoal.Coupled):
        ...     def forward(self, x):
        ...         groups = self.groups(x)
        ...         count = groups.sum(torch.ones(len(x), 1))
        ...         return x - groups.expand(groups.sum(x) / count)
        >>> Centered()(torch.tensor([[1.0], [3.0]]))
        tensor([[-1.],
                [ 1.]])
    """

    def __init__(self) -> None:
        super().__init__()

    def groups(self, x: Tensor) -> SampleGroups:
        """Return the groups of the rows of `x`, which has a row for each sample of the micro-batch.

        Args:
            x: Tensor of shape (samples, …).

        Returns:
            The groups; outside a step, one group of all rows.

        Raises:
            StepError: If the whole batch is one group and has several micro-batches, or this rank
                has samples of several groups and `x` does not have one row for each sample.
        """
        coupling = coupling_of(self)
        part = None if coupling is None else coupling.part(self, len(x))
        return SampleGroups(len(x), part, self)


class _Calls:
    """The sums that a Coupled layer has recorded in a batch, for each of its calls of `update`."""

    def __init__(self, coupling: Coupling) -> None:
        self.coupling = coupling
        self._calls: list[tuple[Callable[..., object], list[Tensor]]] = []

    def add(self, number: int, function: Callable[..., object], part: Part, sums: list[Tensor]) -> None:
        """Record the sums of the groups that this rank leads, or of the only one."""
        if number == len(self._calls):
            self._calls.append((function, [s.new_zeros(part.groups.total, *s.shape[1:]) for s in sums]))
        _, tables = self._calls[number]
        for row, each in enumerate(part.held):
            if each.leads or not self.coupling.split:
                for table, values in zip(tables, sums, strict=True):
                    table[each.group] = values[row]

    def sums(self) -> Tensor:
        """See Recorded."""
        return torch.cat([t.double().flatten() for _, tables in self._calls for t in tables])

    def apply(self, total: Tensor) -> None:
        """See Recorded."""
        begin = 0
        for function, tables in self._calls:
            values = []
            for table in tables:
                values.append(total[begin : begin + table.numel()].view_as(table).to(table))
                begin += table.numel()
            for group in zip(*values, strict=True):
                function(*group)


def add_up(sums: Tensor, part: Part) -> Tensor:
    """Return the sums of this rank's groups over all ranks; twice differentiable. Collective."""
    if not part.groups.shared:
        return sums
    total: Tensor = _AddUp.apply(sums, part)
    return total


class _AddUp(torch.autograd.Function):
    """Sums over the ranks of a group; the backward sums the gradients of all ranks' losses."""

    @staticmethod
    def forward(context: Any, sums: Tensor, part: Part) -> Tensor:
        context.part = part
        return part.add_up(sums)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return add_up(gradients[0].contiguous(), context.part), None

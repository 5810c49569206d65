"""One rank of many, simulated: tensors without values, and a process group without other ranks.

Both are private parts of torch: fake tensors are those of its compiler, the process group that of its
own tests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from shoal._torch.dispatch import (
    UncompiledMode,
    has_values,
    schema_of,
    tree_leaves,
    without_modes,
)
from shoal._torch.versions import imported, required

_FEATURE = "a trace of `shoal plan`"


def form_fake_group(rank: int, size: int) -> dist.ProcessGroup | None:
    """Make the default process group of `size` ranks, of which only this one exists."""
    imported("torch.testing._internal.distributed.fake_pg", "FakeStore", _FEATURE)  # registers it
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=size)
    return dist.group.WORLD


def end_fake_group() -> None:
    """Destroy the process groups, and the cached layouts of DTensors that refer to them."""
    imported("torch.distributed.tensor.debug", "_clear_sharding_prop_cache", _FEATURE)()
    if dist.is_initialized():
        dist.destroy_process_group()


class KnownNumbers(UncompiledMode):
    """Dispatch mode in which a number that is read from a tensor is 1, unless `by_user()` is true.

    Inside `finding_nothing`, no comparison finds a difference: numbers are NaN, conditions are false.
    """

    def __init__(self, by_user: Callable[[], bool]) -> None:
        super().__init__()
        self._by_user = by_user
        self._finding_nothing = False

    @contextmanager
    def finding_nothing(self) -> Iterator[None]:
        """Let the comparisons inside find no difference."""
        self._finding_nothing = True
        try:
            yield
        finally:
            self._finding_nothing = False

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Return a number in place of one that is read, and True for a comparison of all values."""
        aten = torch.ops.aten
        if function in (aten.equal.default, aten._local_scalar_dense.default) and not self._by_user():
            return function is aten.equal.default or self._number(arguments[0].dtype)
        return function(*arguments, **(named or {}))

    def _number(self, dtype: torch.dtype) -> float:
        if dtype is torch.bool:
            return not self._finding_nothing
        if not dtype.is_floating_point:
            return 1
        return math.nan if self._finding_nothing else 1.0


_MOVE = nn.Module.to


@contextmanager
def constructing(numbers: KnownNumbers) -> Iterator[None]:
    """Let the user's code construct a module: values are read by it, and modules are converted.

    The values that torch's initialization reads do not matter: it finds that nothing is left to do.
    """
    stay, nn.Module.to = nn.Module.to, _MOVE  # type: ignore[method-assign]
    try:
        with numbers.finding_nothing():
            yield
    finally:
        nn.Module.to = stay  # type: ignore[method-assign]


class FakeTensors(FakeTensorMode):
    """Fake tensors, which have a shape and no values; an error is raised if a value is read.

    While `keeps_values` is true, operations on tensors with values alone compute, and new integers have
    values.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.keeps_values = False

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Run an operation, with the workspace of recurrent layers.

        torch's fake product of groups of rows, as of experts, takes no other numbers than bfloat16.
        """
        if function is torch.ops.aten._grouped_mm.default and arguments[0].dim() == 2:
            rows, weights = arguments[:2]
            groups = (len(arguments[2]),) if weights.dim() == 2 else ()  # gradients of weights
            with self:
                return rows.new_empty(*groups, len(rows), weights.shape[-1])
        if self.keeps_values and has_values(function, arguments, named or {}):
            return function(*arguments, **(named or {}))
        result: Any = super().__torch_dispatch__(function, types, arguments, named or {})
        if function is torch.ops.aten.mkldnn_rnn_layer.default:
            *outputs, workspace = result
            size = _recurrent_workspace(arguments[0].shape, hidden=arguments[10])
            with self:
                return *outputs, workspace.new_empty(size)
        return result


def _recurrent_workspace(shape: Sequence[int], *, hidden: int) -> int:
    """Return the bytes that a recurrent layer keeps for its backward pass on the CPU.

    torch's fake kernel returns none. The formula was fitted to nine shapes with torch 2.13; it differs
    by 10 % from the smallest and by at most 0.3 % from those above 1 MB.
    """
    steps, batch, inputs = shape
    return int(4 * batch * (steps * (9 * hidden + 6.125 * max(inputs, hidden)) + 10 * hidden))


class KernelWorkspaces(UncompiledMode):
    """Allocates what kernels of the CPU allocate for themselves while they run, by measured peaks."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Run an operation, and count its workspace in addition to its results."""
        result = function(*arguments, **(named or {}))
        size = _workspace(function, arguments, result)
        if size:
            torch.empty(size, dtype=torch.uint8)
        return result


_CHANNELS = 8
"""Channels of a block of oneDNN's tensors, measured on a processor with AVX2."""


def _workspace(function: Any, arguments: Any, result: Any) -> int:
    """Return the bytes that an operation allocates in addition to its results, with oneDNN.

    A convolution holds copies of its operands, and later one of its result, in blocks of _CHANNELS
    channels, unless it unrolls its input; some need less. A recurrent layer copies its weights, and
    keeps the gates of all steps.
    """
    aten = torch.ops.aten
    if function is aten.convolution.default:
        given, weight = arguments[:2]
        if _is_unrolled(given):
            return _unrolled(result, weight)
        copied = _in_blocks(result, 1)
        operands = _in_blocks(given, 1) + _in_blocks(weight, 2)
        return max(operands + copied - int(result.nbytes), copied)
    if function is aten.convolution_backward.default:
        gradient, given, weight = arguments[:3]
        if _is_unrolled(given):
            return _unrolled(gradient, weight)
        blocked = _in_blocks(weight, 2)
        copied = _in_blocks(gradient, 1) + _in_blocks(given, 1)
        # One gradient is not allocated yet.
        return max(copied + blocked - int(weight.nbytes), blocked)
    if function in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default):
        steps, batch, _ = arguments[0].shape
        weights, hidden = arguments[1:3], arguments[5].shape[-1]
        return int(sum(each.nbytes for each in weights) + 16 * batch * hidden * (steps + 4))
    return 0


def _is_unrolled(given: Tensor) -> bool:
    """Return whether this processor has no convolution of bfloat16, so that torch unrolls the input."""
    if given.dtype is not torch.bfloat16:
        return False
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _unrolled(result: Tensor, weight: Tensor) -> int:
    """Return the bytes of the pixels below the kernel at each pixel of the result."""
    pixels = result.numel() // result.shape[1]
    return pixels * weight[0].numel() * weight.element_size()


def _in_blocks(tensor: Tensor, dimensions: int) -> int:
    """Return the bytes with the channels, in the second or the first two dimensions, in full blocks."""
    first = 2 - dimensions
    counts = [
        -(-size // _CHANNELS) * _CHANNELS if first <= place < 2 else size
        for place, size in enumerate(tensor.shape)
    ]
    return math.prod(counts) * tensor.element_size()


_COPYING = ("_allgather_base_", "_reduce_scatter_base_")
"""Collectives for which Gloo allocates a copy of the full tensor in torch 2.13, by measured peaks."""


class LocalCollectives(UncompiledMode):
    """Replaces the collectives of process groups: none communicates, and tensors do not change.

    Lists of tensors are gathered as if every rank had that of this one. All-gathers and reduce-scatters
    allocate a copy of the full tensor, as Gloo does; NCCL does not.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Return the first argument, the tensors that a collective changes, with completed work."""
        if function.name() == "_c10d_functional::wait_tensor":
            return arguments[0]  # torch's fake kernel returns a copy
        if function.namespace != "c10d":
            return function(*arguments, **(named or {}))
        tensors = arguments[0]
        if schema_of(function).name.endswith(_COPYING):
            torch.empty_like(max(tree_leaves(arguments[:2]), key=lambda each: each.numel()))
        if schema_of(function).name == "c10d::allgather_":
            for each in tree_leaves(tensors):
                each.copy_(arguments[1][0])
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([tensors] if isinstance(tensors, Tensor) else tensors)
        finish = imported("torch._C._distributed_c10d", "_create_work_from_future", _FEATURE)
        work = finish(future).boxed()
        return (tensors, work) if len(schema_of(function).returns) > 1 else work


@contextmanager
def simulating() -> Iterator[None]:
    """Let device meshes compute with values inside dispatch modes, and modules stay on their device.

    torch can't replace fake parameters to which a graph refers, even by themselves.
    """
    names = ("__init__", "__getitem__", "_flatten")
    own = {name: required(DeviceMesh, name, _FEATURE) for name in names}
    move = nn.Module.to
    for name, method in own.items():
        setattr(DeviceMesh, name, _without_modes(method))
    nn.Module.to = lambda self, *_, **__: self  # type: ignore[method-assign]
    # Its tracebacks of operations that fail on fake tensors repeat the error.
    log = logging.getLogger(FakeTensorMode.__module__)
    told, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = told
        nn.Module.to = move  # type: ignore[method-assign]
        for name, method in own.items():
            setattr(DeviceMesh, name, method)


def _without_modes(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        with without_modes():
            return method(*arguments, **named)

    return call

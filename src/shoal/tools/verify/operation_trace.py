"""Observation of the operations of one step: each one's module, line, inputs and outputs.

The checksums of tensors and generators change neither.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal._torch.autograd import last_node_number, running_node_number
from shoal._torch.dispatch import UncompiledMode, schema_of, tree_leaves
from shoal._torch.mesh import local_slices
from shoal.strategies.pipeline.stage import StageModule
from shoal.tools.verify.operations import TracedOperation, TracedTensor

CHUNK = 1 << 20
_NUMPY_STATE, _PYTHON_STATE = np.random.get_state, random.getstate
_TORCH_STATE = torch.get_rng_state
"""The functions before calls of them are observed: this module's are not the script's."""


def checksum_bytes(parts: Iterable[bytes]) -> str:
    """Return the checksum of bytes, 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def local_values(tensor: Tensor) -> Tensor:
    """Return a copy of this rank's part of a tensor, on the CPU.

    A copy, because `numpy()` makes memory that FSDP frees later impossible to free. Raises RuntimeError
    if it is freed already.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel() and not local.untyped_storage().nbytes():
        raise RuntimeError("FSDP has freed the memory of this tensor")
    return local.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def checksum_tensor(tensor: Tensor) -> str:
    """Return the checksum of the values of this rank's part of a tensor, of its dtype and shape."""
    local = local_values(tensor)
    head = f"{local.dtype}{tuple(local.shape)}".encode()
    return checksum_bytes([head, local.reshape(-1).view(torch.uint8).numpy().tobytes()])


def sketch(tensor: Tensor) -> tuple[str, float, float, tuple[int, ...] | None]:
    """Return the checksum, the norm and a fixed projection of a tensor.

    Of a DTensor, they are those of this rank's shard, followed by the place of its first element in the
    full tensor. The projections of all shards add up to that of the full tensor.
    """
    values = local_values(tensor).reshape(-1).to(torch.float64).numpy()
    place, index = None, np.arange(len(values))
    if isinstance(tensor, DTensor) and tensor.ndim:
        slices = local_slices(tensor)
        place = tuple(each.start for each in slices)
        inside = np.unravel_index(index, tuple(each.stop - each.start for each in slices))
        index = np.ravel_multi_index(
            tuple(at + first for at, first in zip(inside, place, strict=True)), tuple(tensor.shape)
        )
    projection = 0.0
    for start in range(0, len(values), CHUNK):
        chunk = slice(start, start + CHUNK)
        projection += float(values[chunk] @ np.cos(index[chunk].astype(np.float64)))
    return checksum_tensor(tensor), float(np.sqrt(values @ values)), projection, place


def checksum_state(state: Any) -> str:
    """Return the checksum of nested containers of tensors and plain values."""
    return checksum_bytes(_parts(state))


def checksum_generators() -> dict[str, str]:
    """Return the checksums of the states of the Python, NumPy and torch generators."""
    name, key, *position = _NUMPY_STATE(legacy=True)
    return {
        "python": checksum_bytes([repr(_PYTHON_STATE()).encode()]),
        "numpy": checksum_bytes(
            [str(name).encode(), np.asarray(key).tobytes(), repr(position).encode()]
        ),
        "torch": checksum_bytes([_TORCH_STATE().numpy().tobytes()]),
    }


def _parts(state: Any) -> Iterable[bytes]:
    if isinstance(state, Tensor):
        yield checksum_tensor(state).encode()
    elif isinstance(state, dict):
        for key, value in state.items():
            yield repr(key).encode()
            yield from _parts(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _parts(value)
    else:
        yield repr(state).encode()


ROWS = 1 << 12
"""Largest first dimension of which the entries are compared one by one."""
PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device)
COLLECTIVES = ("c10d", "_c10d_functional")
FILLED_LATER = ("empty", "new_empty")
WRAPPERS = ("module.", "_forward_module.", "_orig_mod.")
"""Names by which DDP, Fabric and torch.compile hold the model."""


class OperationTrace(UncompiledMode):
    """Records each operation from `__enter__` to the end of the process.

    `line` returns the line of the user's code; with True, "" if torch's autograd called the operation.
    """

    def __init__(self, line: Callable[[bool], str]) -> None:
        super().__init__()
        self.records: list[TracedOperation] = []
        self.phase = ""
        self._paused = False
        self._line = line
        self._process = os.getpid()
        self._running: list[str] = []
        self._modules: dict[int, str] = {}
        self._tensors: dict[int, str] = {}
        self._nodes: dict[int, tuple[str, str]] = {}
        self._states: dict[str, Any] = {}

    @property
    def is_paused(self) -> bool:
        """Whether the observer itself computes."""
        return self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the operations inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def module_begins(self, module: nn.Module, *, outermost: bool) -> None:
        """Enter the forward pass of a module."""
        if outermost:
            self._running.clear()  # hooks after an exception in a forward pass do not run
            root = user_module(module)
            self._modules |= {id(part): plain_name(name) for name, part in root.named_modules()}
            for name, value in (*root.named_parameters(), *root.named_buffers()):
                self._tensors[id(value)] = plain_name(name)
        self._running.append(self._modules.get(id(module), type(module).__name__))

    def module_ends(self) -> None:
        """Leave the forward pass of a module."""
        if self._running:
            self._running.pop()

    def as_events(self) -> list[dict[str, Any]]:
        """Return the records as plain values."""
        return [asdict(record) for record in self.records]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        named = kwargs or {}
        if self._paused or os.getpid() != self._process:  # workers of a DataLoader inherit the mode
            return operation(*args, **named)
        leaves = tree_leaves((args, named))
        random = torch.Tag.nondeterministic_seeded in operation.tags
        generator = checksum_bytes([_TORCH_STATE().numpy().tobytes()]) if random else ""
        inputs = self._describe(leaves)
        phase, module, line = self._place()
        result = operation(*args, **named)
        name = str(operation)
        space, _, short = name.partition(".")
        if short.startswith(FILLED_LATER):
            for tensor in _tensors(result):
                tensor.zero_()  # memory that was not written has other values in each run
        changed = _tensors(_changed(operation, args, named)) or _tensors(result)
        self.records.append(
            TracedOperation(
                operation=name,
                phase=phase,
                module=module,
                line=line,
                inputs=inputs,
                arguments=tuple(
                    repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__
                    for leaf in leaves
                    if not isinstance(leaf, Tensor)
                ),
                outputs=() if space in COLLECTIVES else self._describe(changed),
                generator=generator,
                drawn=self._drawn(),
            )
        )
        return result

    def _drawn(self) -> tuple[str, ...]:
        """Return the generators whose states changed since the last operation."""
        before = self._states
        _, key, *place = _NUMPY_STATE(legacy=True)
        self._states = {"python": _PYTHON_STATE(), "numpy": (np.asarray(key).tobytes(), *place)}
        return tuple(name for name, state in before.items() if state != self._states[name])

    def _place(self) -> tuple[str, str, str]:
        """Return the phase, the module and the line of an operation that begins."""
        number = running_node_number()
        here = self._running[-1] if self._running else ""
        if number is None:
            line = self._line(False)
            self._nodes.setdefault(last_node_number(), (here, line))
            return self.phase or "forward", here, line
        module, line = self._nodes.get(number, ("", ""))
        return "backward", here or module, self._line(True) or line or self._line(False)

    def _describe(self, values: list[Any]) -> tuple[TracedTensor, ...]:
        return tuple(
            _tensor_record(value, self._tensors.get(id(value), ""))
            for value in values
            if isinstance(value, Tensor)
        )


def _tensor_record(tensor: Tensor, name: str) -> TracedTensor:
    try:
        values = local_values(tensor)
        spacing = torch.finfo(values.dtype).eps if values.dtype.is_floating_point else 0.0
        return TracedTensor(
            checksum=checksum_tensor(tensor),
            shape=tuple(values.shape),
            rows=_rows(values),
            spacing=spacing,
            name=name,
        )
    except (RuntimeError, TypeError, NotImplementedError, AttributeError):
        # Sparse, nested, fake and freed tensors have no bytes to read.
        return TracedTensor(checksum="", shape=(), name=name)


def _rows(values: Tensor) -> tuple[float, ...] | None:
    if values.is_complex():
        values = torch.view_as_real(values)
    rows = values.reshape(values.shape[0] if values.dim() else 1, -1).to(torch.float64).numpy()
    if len(rows) > ROWS:
        return None
    return tuple((rows @ np.cos(np.arange(rows.shape[1], dtype=np.float64))).tolist())


def _changed(operation: Any, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    found = []
    for number, argument in enumerate(schema_of(operation).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else named.get(argument.name))
    return found


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def user_module(module: nn.Module) -> nn.Module:
    """Return the module whose parameters have the names of the user's model."""
    return module.body if isinstance(module, StageModule) else module


def plain_name(name: str) -> str:
    """Return a name in the user's model, without the names of wrappers around it."""
    while f"{name}.".startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name.replace("_orig_mod.", "")

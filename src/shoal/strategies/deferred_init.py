"""Deferred initialization: create a model that is too large for one process, then keep its shards.

While a constructor runs, its operations on tensors are recorded, with the state of the random generator
before each random one. Large tensors that have not been used for a while are freed, because their
values can be recomputed from the recorded operations. So every parameter gets the value that the same
constructor gives it in one process, in an amount of memory that does not grow with the model, and in
about twice the time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from shoal._torch.autograd import storage_key
from shoal._torch.dispatch import TorchDispatchMode, schema_of, tree_iter, tree_map
from shoal._torch.modules import apply_to_tensors, buffers, parameters
from shoal.strategies.dtensor import copy_share, is_divided, share

RESIDENT = 2**30
"""Bytes of large tensors in memory at a time while a model is constructed."""
LARGE = 2**20
"""Smaller tensors, in bytes, are never freed: some reads of a constructor are not recorded."""

_OVERWRITING = frozenset(
    ("uniform_", "normal_", "zero_", "fill_", "copy_", "exponential_", "random_", "bernoulli_")
)
"""Operations that overwrite all values of a tensor."""

_Memory = dict[int, torch.UntypedStorage]


@dataclass(frozen=True)
class _Place:
    """A tensor as it was in a call. Its storage may be replaced afterwards (`p.data = …`)."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        offset = int(tensor.storage_offset())
        return cls(storage_key(tensor), tensor.dtype, offset, tensor.size(), tensor.stride())

    def within(self, memory: _Memory) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(memory[self.storage], self.offset, self.size, self.stride)


class _RecordedOp(NamedTuple):
    """An operation, its arguments and results with places for tensors, and the storages it uses."""

    operation: Any
    arguments: Any
    results: list[Any]
    read: frozenset[int]
    written: frozenset[int]
    state: Tensor | None
    """State of the random generator before the call of a random operation; None for others."""


class InitRecord:
    """Record of calls in their order, indexed by the storages that they write."""

    def __init__(self) -> None:
        self._calls: list[_RecordedOp] = []
        self._writers: dict[int, list[int]] = {}
        self._alive: _Memory = {}
        """The storages themselves, full or emptied, so that no other one gets their number."""
        self.sizes: dict[int, int] = {}
        """Their sizes in bytes when they are full."""
        self.given: _Memory = {}
        """Copies of storages that no recorded call has created."""

    def know(self, storages: _Memory) -> None:
        """Copy storages that occur for the first time, before a call changes them."""
        for key in storages.keys() - self.sizes.keys():
            self.sizes[key], self._alive[key] = storages[key].nbytes(), storages[key]
            self.given[key] = storages[key].clone()

    def add(self, call: _RecordedOp, written: _Memory) -> None:
        """Append a call that has been made."""
        for key, storage in written.items():
            self._writers.setdefault(key, []).append(len(self._calls))
            self.sizes[key], self._alive[key] = storage.nbytes(), storage
        self._calls.append(call)

    def value(self, tensor: Tensor) -> Tensor:
        """Recompute the value of `tensor` after all calls."""
        return _Place.of(tensor).within(self.values({storage_key(tensor)}))

    def values(self, wanted: set[int]) -> _Memory:
        """Recompute the storages `wanted` after all calls."""
        memory: _Memory = {}
        with torch.random.fork_rng(devices=[]):
            for call in self._needed(wanted):
                if call.state is not None:
                    torch.set_rng_state(call.state)
                self._play(call, memory)
        self._provide(wanted, memory)
        return memory

    def _needed(self, wanted: set[int]) -> list[_RecordedOp]:
        """Return the calls on which the storages depend, in their order."""
        chosen: list[_RecordedOp] = []
        needed = set(wanted)
        ahead = [-number for key in wanted for number in self._writers.get(key, ())]
        heapq.heapify(ahead)
        seen = len(self._calls)
        while ahead:
            number = -heapq.heappop(ahead)
            call = self._calls[number]
            if number == seen or not call.written & needed:
                continue
            seen = number
            chosen.append(call)
            needed -= call.written - call.read
            for key in call.read - needed:
                needed.add(key)
                for earlier in self._writers.get(key, ()):
                    if earlier < number:
                        heapq.heappush(ahead, -earlier)
        return chosen[::-1]

    def _play(self, call: _RecordedOp, memory: _Memory) -> None:
        def again(value: Any) -> Any:
            if not isinstance(value, _Place):
                return value
            self._provide({value.storage}, memory)
            return value.within(memory)

        positional, named = tree_map(again, call.arguments)
        result = call.operation(*positional, **named)
        for made, meant in zip(tree_iter(result), call.results, strict=True):
            if isinstance(meant, _Place):
                memory.setdefault(meant.storage, made.untyped_storage())

    def _provide(self, keys: set[int], memory: _Memory) -> None:
        for key in keys - memory.keys():
            given = self.given.get(key)
            # A storage that is neither given nor created is overwritten next.
            memory[key] = torch.UntypedStorage(self.sizes[key]) if given is None else given.clone()


class _Recorder(TorchDispatchMode):
    def __init__(self, resident: int) -> None:
        super().__init__()
        self.record = InitRecord()
        self._limit = resident
        self._large: _Memory = {}
        """Large storages in memory, least recently used first."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        arguments = (args, dict(kwargs or {}))
        given = _storages(arguments)
        self.record.know(given)
        read = given.keys() - self._overwritten(operation, args)
        self._bring_back(given, read)
        places = _places(arguments)
        draws = torch.Tag.nondeterministic_seeded in operation.tags
        state = torch.get_rng_state() if draws else None
        result = operation(*args, **arguments[1])
        written = _storages((_changed(operation, args), result))
        results = list(tree_iter(_places(result)))
        call = _RecordedOp(operation, places, results, frozenset(read), frozenset(written), state)
        self.record.add(call, written)
        self._drop_others(given | written)
        return result

    def _overwritten(self, operation: Any, positional: tuple[Any, ...]) -> set[int]:
        """Return the storage that the operation overwrites completely, if any."""
        if operation.overloadpacket.__name__ not in _OVERWRITING:
            return set()
        target, *others = positional
        key = storage_key(target)
        whole = target.is_contiguous() and target.nbytes == self.record.sizes[key]
        return {key} if whole and key not in _storages(others) else set()

    def _bring_back(self, given: _Memory, read: set[int]) -> None:
        """Reallocate storages that were freed, and recompute those that are read."""
        for key, storage in given.items():
            size = self.record.sizes[key]
            if storage.nbytes() != size:
                storage.resize_(size)
                if key in read:
                    storage.copy_(self.record.values({key})[key])

    def _drop_others(self, used: _Memory) -> None:
        for key, storage in used.items():
            self._large.pop(key, None)
            if storage.nbytes() >= LARGE and key not in self.record.given:
                self._large[key] = storage
        total = sum(storage.nbytes() for storage in self._large.values())
        for key in [key for key in self._large if key not in used]:
            if total <= self._limit:
                break
            storage = self._large.pop(key)
            total -= storage.nbytes()
            storage.resize_(0)


@dataclass(frozen=True)
class Deferred:
    """Result of `construct`: a module on the meta device, and the record of its tensors."""

    module: nn.Module
    record: InitRecord
    made: dict[str, Tensor]
    """The parameters and buffers that the constructor created, by name."""

    @torch.no_grad()
    def fill(self) -> None:
        """Fill the module's tensors, which are allocated by now, or this rank's shards of them."""
        for name, target in _tensors(self.module):
            copy_share(self.record.value(self.made[name]), target)


def construct(factory: Callable[[], nn.Module], *, resident: int = RESIDENT) -> Deferred:
    """Call `factory` on the CPU, with at most `resident` bytes of large tensors in memory.

    The random numbers are the same as in a normal call.
    """
    with _Recorder(resident) as recorder:
        module = factory()
    made = dict(_tensors(module))
    recorder.record.know(_storages(list(made.values())))  # created elsewhere, such as a backbone
    _to_meta(module)
    return Deferred(module, recorder.record, made)


def construct_empty(factory: Callable[[], nn.Module]) -> nn.Module:
    """Call `factory`; its parameters get no memory. Buffers are computed as usual."""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return parameter
        return like(parameter, torch.device("meta"))

    handle = register_module_parameter_registration_hook(without_memory)
    try:
        with _WithoutValues():
            return factory()
    finally:
        handle.remove()


class _WithoutValues(TorchFunctionMode):
    """Skips operations that only overwrite tensors on the meta device, which take long there."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in _OVERWRITING and args and args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def mark_empty(module: nn.Module) -> None:
    """Set the first element of each shard to NaN, so that training without loading it fails.

    Filling all of it would take as long as loading it.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            local = share(parameter)
            local[(slice(1),) * local.dim()].fill_(math.nan)


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Replace tensors on the meta device by empty ones on `device`. Tied tensors stay tied."""
    _replace(module, lambda tensor: like(tensor, device) if tensor.is_meta else tensor)


def move_allocated(module: nn.Module, device: torch.device) -> None:
    """Move tensors to `device`, except those on the meta device."""
    found = [t.device for t in (*module.parameters(), *module.buffers()) if not t.is_meta]
    if any(each != device for each in found):  # torch can't replace fake parameters
        apply_to_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give all tensors of a module that FSDP2 has sharded memory on `device`."""
    apply_to_tensors(
        module, lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device)
    )


def _to_meta(module: nn.Module) -> None:
    """Replace all tensors by meta tensors, which `fully_shard` accepts. Tied tensors stay tied."""
    _replace(module, lambda tensor: like(tensor, torch.device("meta")))


def _replace(module: nn.Module, each: Callable[[Tensor], Tensor]) -> None:
    replaced: dict[int, Tensor] = {}
    for part in module.modules():
        for held in (parameters(part), buffers(part)):
            for name, tensor in held.items():
                if tensor is not None:
                    new = replaced.get(id(tensor))
                    replaced[id(tensor)] = each(tensor) if new is None else new
                    held[name] = replaced[id(tensor)]  # type: ignore[assignment] # of its own kind


def like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an empty tensor, or parameter, of the same shape and strides on another device."""
    if is_divided(tensor):
        values = torch.empty_like(tensor.detach(), device=device)
        sharded: Tensor = nn.Parameter(values, tensor.requires_grad)
        sharded.__class__ = type(tensor)  # that of a parameter of a plan
        return sharded
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _changed(operation: Any, positional: tuple[Any, ...]) -> list[Any]:
    arguments = zip(schema_of(operation).arguments, positional, strict=False)
    return [value for a, value in arguments if a.alias_info is not None and a.alias_info.is_write]


def _is_plain(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _places(tree: Any) -> Any:
    return tree_map(lambda value: _Place.of(value) if _is_plain(value) else value, tree)


def _storages(tree: Any) -> _Memory:
    return {
        storage_key(value): value.untyped_storage() for value in tree_iter(tree) if _is_plain(value)
    }

"""Models too large for one process: constructed whole but never all at once, then kept share by share.

While a constructor runs, what it does to tensors is recorded, with the state of the random generator
wherever it draws. Large tensors are dropped when they have not been used for a while: whatever they
held can be computed again from the calls that it depends on. So every parameter gets the value that the
same constructor gives it in one process, whatever it does, in an amount of memory that does not grow
with the model, for about twice the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from shoal._torch.autograd import storage_key
from shoal._torch.dispatch import TorchDispatchMode, schema_of, tree_iter, tree_map
from shoal._torch.modules import buffers, parameters
from shoal.strategies.dtensor import copy_share

RESIDENT = 2**30
"""How many bytes of large tensors are there at once while a model is constructed."""
LARGE = 2**20
"""Tensors of fewer bytes than this stay: some of a constructor's reading of numbers is not seen."""

_OVERWRITING = frozenset(
    ("uniform_", "normal_", "zero_", "fill_", "copy_", "exponential_", "random_", "bernoulli_")
)
"""Operations that leave nothing of what a tensor held."""

_Memory = dict[int, torch.UntypedStorage]


@dataclass(frozen=True)
class _Place:
    """A tensor as it was at a call: what it is a view of may change afterwards (`p.data = …`)."""

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
    """An operation, its arguments and results with places for tensors, and what it reads and writes."""

    operation: Any
    arguments: Any
    results: list[Any]
    read: frozenset[int]
    written: frozenset[int]
    state: Tensor | None
    """Of the random generator before the call, where it draws."""


class InitRecord:
    """Calls in their order, found by the storages that they write."""

    def __init__(self) -> None:
        self._calls: list[_RecordedOp] = []
        self._writers: dict[int, list[int]] = {}
        self._alive: _Memory = {}
        """The storages themselves, perhaps emptied, so that no other one gets their number."""
        self.sizes: dict[int, int] = {}
        """Their bytes when they are full."""
        self.given: _Memory = {}
        """What storages held that no call has made."""

    def know(self, storages: _Memory) -> None:
        """Keep what storages hold that are met for the first time, before a call changes it."""
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
        """What `tensor` held after all calls, computed again."""
        return _Place.of(tensor).within(self.values({storage_key(tensor)}))

    def values(self, wanted: set[int]) -> _Memory:
        """What the storages `wanted` held after all calls, computed again."""
        memory: _Memory = {}
        with torch.random.fork_rng(devices=[]):
            for call in self._needed(wanted):
                if call.state is not None:
                    torch.set_rng_state(call.state)
                self._play(call, memory)
        self._provide(wanted, memory)
        return memory

    def _needed(self, wanted: set[int]) -> list[_RecordedOp]:
        """The calls on which the storages depend, in their order."""
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
            # What is neither given nor made is about to be overwritten.
            memory[key] = torch.UntypedStorage(self.sizes[key]) if given is None else given.clone()


class _Recorder(TorchDispatchMode):
    def __init__(self, resident: int) -> None:
        super().__init__()
        self.record = InitRecord()
        self._limit = resident
        self._large: _Memory = {}
        """Large storages that are there, least recently used first."""

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
        """The storage of which the operation leaves nothing, if it is one of these."""
        if operation.overloadpacket.__name__ not in _OVERWRITING:
            return set()
        target, *others = positional
        key = storage_key(target)
        whole = target.is_contiguous() and target.nbytes == self.record.sizes[key]
        return {key} if whole and key not in _storages(others) else set()

    def _bring_back(self, given: _Memory, read: set[int]) -> None:
        """Give storages that were dropped their memory again, and what they held if it is read."""
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
    """What `construct` made: a module on the meta device, and how its tensors came to be."""

    module: nn.Module
    record: InitRecord
    made: dict[str, Tensor]
    """The module's parameters and buffers as the constructor left them, by name."""

    @torch.no_grad()
    def fill(self) -> None:
        """Give the module's tensors, which have memory by now, their values, or this rank's shares."""
        for name, target in _tensors(self.module):
            copy_share(self.record.value(self.made[name]), target)


def construct(factory: Callable[[], nn.Module], *, resident: int = RESIDENT) -> Deferred:
    """Call `factory` with at most `resident` bytes for large tensors; on the CPU, drawing as ever."""
    with _Recorder(resident) as recorder:
        module = factory()
    made = dict(_tensors(module))
    recorder.record.know(_storages(list(made.values())))  # made elsewhere, as a backbone may be
    _to_meta(module)
    return Deferred(module, recorder.record, made)


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Replace tensors on the meta device by empty ones on `device`; what was tied stays tied."""
    _replace(module, lambda tensor: like(tensor, device) if tensor.is_meta else tensor)


def _to_meta(module: nn.Module) -> None:
    """Replace all tensors by such as `fully_shard` takes; what was tied stays tied."""
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
    """An empty tensor, or parameter, of the same form on another device."""
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

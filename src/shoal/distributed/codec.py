"""Conversion of values to bytes and back without pickle, so that forged bytes run no code.

The bytes are a JSON text, followed by the content of tensors, arrays and byte strings. The text
contains the kind of each value that JSON lacks. Classes are looked up among the modules that are
imported already. Only dataclasses, named tuples, enums and Shoal's errors are allowed, and none of
their methods is called to set their fields.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.distributed.passing_faults import note_cause, passing_cause
from shoal.util.errors import ShoalError

SENDABLE = (
    "None, numbers, strings, bytes, paths, lists, tuples, sets, dicts, tensors, NumPy arrays, and "
    "dataclasses, named tuples and enums of these"
)
_LENGTH = 8
_WIDE = 1 << 63
"""Python does not parse very long decimal integers; from here on they are written in base 16."""
_FACTORIES: dict[str, Any] = {"None": None} | {
    kind.__name__: kind for kind in (list, dict, set, int, float, str)
}


class CodecError(ValueError):
    """A value that can't be encoded, or bytes that are not an encoded value."""


def dumps(value: object) -> bytes:
    """Return the bytes of a value.

    A tensor is detached, and read on the CPU; a subclass of `str` is read as a `str`. Raises CodecError
    with the type of the part that can't be encoded.
    """
    writer = _Writer()
    try:
        text = json.dumps(writer.write(value), separators=(",", ":")).encode()
    except RecursionError:
        raise CodecError("values nested too deeply, or that contain themselves") from None
    return b"".join([len(text).to_bytes(_LENGTH, "big"), text, *writer.buffers])


def loads(data: bytes) -> Any:
    """Return the value that `dumps` encoded. Raises CodecError for any other bytes."""
    size = int.from_bytes(data[:_LENGTH], "big")
    view = memoryview(data)
    try:
        tree = json.loads(bytes(view[_LENGTH : _LENGTH + size]))
        return _ByteReader(view[_LENGTH + size :]).read(tree)
    except CodecError:
        raise
    except Exception as error:  # forged bytes can raise any error
        raise CodecError(f"bytes that are not a value: {type(error).__name__}: {error}"[:500]) from None


class _Writer:
    def __init__(self) -> None:
        self.buffers: list[bytes] = []

    def write(self, value: Any) -> Any:
        """Return the representation of `value` in the text."""
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and -_WIDE <= value < _WIDE):
            return value
        if kind is list:
            return self.items(value)
        if kind is dict and all(type(key) is str for key in value):
            return {"map": {key: self.write(item) for key, item in value.items()}}
        if isinstance(value, str) and not isinstance(value, Enum | np.generic):
            return str(value)
        name = _NAMES.get(kind) or next(
            (n for n, base in _BASES.items() if isinstance(value, base)), "object"
        )
        return {name: _FORMS[name].write(self, value)}

    def items(self, values: Iterable[Any]) -> list[Any]:
        """Return the representations of several values."""
        return [self.write(item) for item in values]

    def pairs(self, value: Mapping[Any, Any]) -> list[Any]:
        """Return the representations of keys and values, which JSON restricts to strings."""
        return [self.items(pair) for pair in value.items()]

    def default_dict(self, value: defaultdict[Any, Any]) -> list[Any]:
        """Return the name of a built-in factory, and the pairs."""
        for name, factory in _FACTORIES.items():
            if value.default_factory is factory:
                return [name, self.pairs(value)]
        raise CodecError("collections.defaultdict with a factory of its own")

    def tensor(self, value: torch.Tensor) -> list[Any]:
        """Return dtype, shape and bytes."""
        if value.layout is not torch.strided:
            raise CodecError(f"torch.Tensor of layout {value.layout}")
        plain = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value.detach())
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype).removeprefix("torch."), list(value.shape), *self.buffer(data)]

    def array(self, value: Any) -> list[int]:
        """Return the bytes of an array or a scalar of NumPy."""
        if value.dtype.hasobject:
            raise CodecError("a NumPy array of objects")
        file = io.BytesIO()
        np.save(file, np.asarray(value), allow_pickle=False)
        return self.buffer(file.getvalue())

    def buffer(self, data: bytes) -> list[int]:
        """Append bytes after the text, and return their number."""
        self.buffers.append(data)
        return [len(data)]

    def member(self, value: Enum) -> list[str]:
        """Return the class and the name of an enum's member."""
        if value.name not in type(value).__members__:
            raise CodecError(f"{value!r}, which has no name in {type(value).__qualname__}")
        return [*_path(type(value)), value.name]

    def error(self, value: ShoalError) -> list[Any]:
        """Return the class and the strings of an error, and its cause if that may pass."""
        texts = (value.given, value.found, value.fix, value.where)
        return [*_path(type(value)), *texts, passing_cause(value)]

    def object(self, value: Any) -> list[Any]:
        """Return the class and the fields of a dataclass or named tuple."""
        kind: type = type(value)
        names, shown = _fields(kind), f"{kind.__module__}.{kind.__qualname__}"
        if names is None:
            raise CodecError(shown)
        if not isinstance(value, tuple) and not getattr(value, "__dict__", {}).keys() <= set(names):
            raise CodecError(f"{shown} with attributes that are not fields")
        return [*_path(kind), self.items(getattr(value, name) for name in names)]


class _ByteReader:
    def __init__(self, buffers: memoryview) -> None:
        self._buffers = buffers
        self._at = 0

    def read(self, tree: Any) -> Any:
        """Return the value that `tree` represents in the text."""
        if isinstance(tree, list):
            return [self.read(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((name, content),) = tree.items()
        if name == "map":
            return {key: self.read(item) for key, item in content.items()}
        return _FORMS[name].read(self, content)

    def pairs(self, content: list[Any]) -> list[tuple[Any, Any]]:
        """Return keys and values."""
        return [(self.read(key), self.read(item)) for key, item in content]

    def buffer(self, size: int) -> bytearray:
        """Return the next `size` bytes after the text."""
        data = bytearray(self._buffers[self._at : self._at + size])
        if type(size) is not int or len(data) != size:
            raise CodecError("bytes that end too soon")
        self._at += size
        return data

    def tensor(self, content: list[Any]) -> torch.Tensor:
        """Return a tensor on the CPU."""
        name, shape, size = content
        data = self.buffer(size)
        flat = (
            torch.frombuffer(data, dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return flat.view(_constant("dtype", name)).reshape(shape)

    def array(self, content: list[Any]) -> np.ndarray[Any, Any]:
        """Return a NumPy array."""
        found: np.ndarray[Any, Any] = np.load(io.BytesIO(self.buffer(*content)), allow_pickle=False)
        return found

    def object(self, content: list[Any]) -> Any:
        """Return a dataclass or named tuple of an imported module, without calling its methods."""
        *path, values = content
        kind = _find(path)
        names = _fields(kind)
        if names is None or len(names) != len(values):
            raise CodecError(f"{'.'.join(path)} with {len(values)} fields")
        read = [self.read(value) for value in values]
        if issubclass(kind, tuple):
            return tuple.__new__(kind, read)
        made = object.__new__(kind)
        for name, value in zip(names, read, strict=True):
            object.__setattr__(made, name, value)
        return made


def _constant(kind: str, name: str) -> Any:
    found = vars(torch).get(name)
    if type(found) is not getattr(torch, kind):
        raise CodecError(f"a {kind} {name!r}")
    return found


def _error(content: list[Any]) -> ShoalError:
    *path, given, found, fix, where, cause = content
    kind = _find(path)
    if not issubclass(kind, ShoalError) or kind.__init__ is not ShoalError.__init__:
        raise CodecError(f"{'.'.join(path)} in place of an error")
    error = kind(given=given, found=found, fix=fix)
    error.where = where
    return note_cause(error, cause)


def _enum(content: list[Any]) -> Enum:
    *path, name = content
    kind = _find(path)
    if not issubclass(kind, Enum):
        raise CodecError(f"{'.'.join(path)} in place of an enum")
    return kind.__members__[name]


class _Form(NamedTuple):
    """The values of some types in the text: how they are written, and read."""

    types: tuple[type, ...]
    write: Callable[[_Writer, Any], Any]
    read: Callable[[_ByteReader, Any], Any]


def _sequence(kind: type, make: Callable[[list[Any]], Any]) -> _Form:
    return _Form((kind,), _Writer.items, lambda reader, content: make(reader.read(content)))


def _mapping(kind: type, make: Callable[[Any], Any]) -> _Form:
    return _Form((kind,), _Writer.pairs, lambda reader, content: make(reader.pairs(content)))


def _text(kind: type, make: Callable[[str], Any]) -> _Form:
    return _Form(
        (kind,), lambda _, value: str(value).removeprefix("torch."), lambda _, text: make(text)
    )


_FORMS: dict[str, _Form] = {
    "tuple": _sequence(tuple, tuple),
    "set": _sequence(set, set),
    "frozenset": _sequence(frozenset, frozenset),
    "Size": _sequence(torch.Size, torch.Size),
    "dict": _mapping(dict, dict),
    "OrderedDict": _mapping(OrderedDict, OrderedDict),
    "Counter": _mapping(Counter, lambda pairs: Counter(dict(pairs))),
    "defaultdict": _Form(
        (defaultdict,),
        _Writer.default_dict,
        lambda reader, content: defaultdict(_FACTORIES[content[0]], reader.pairs(content[1])),
    ),
    "int": _Form((int,), lambda _, value: hex(value), lambda _, text: int(text, 16)),
    "complex": _Form(
        (complex,),
        lambda _, value: [value.real, value.imag],
        lambda _, parts: complex(*parts),
    ),
    "bytes": _Form((bytes,), _Writer.buffer, lambda reader, content: bytes(reader.buffer(*content))),
    "bytearray": _Form(
        (bytearray,),
        lambda writer, value: writer.buffer(bytes(value)),
        lambda reader, content: reader.buffer(*content),
    ),
    "tensor": _Form((torch.Tensor, torch.nn.Parameter), _Writer.tensor, _ByteReader.tensor),
    "array": _Form((np.ndarray,), _Writer.array, _ByteReader.array),
    "scalar": _Form((), _Writer.array, lambda reader, content: reader.array(content)[()]),
    "device": _text(torch.device, torch.device),
    "dtype": _text(torch.dtype, lambda name: _constant("dtype", name)),
    "layout": _text(torch.layout, lambda name: _constant("layout", name)),
    "memory_format": _text(torch.memory_format, lambda name: _constant("memory_format", name)),
    "path": _text(Path, Path),
    "enum": _Form((), _Writer.member, lambda _, content: _enum(content)),
    "error": _Form((), _Writer.error, lambda _, content: _error(content)),
    "object": _Form((), _Writer.object, _ByteReader.object),
}
_NAMES = {kind: name for name, form in _FORMS.items() for kind in form.types}
_BASES = {"scalar": np.generic, "path": Path, "enum": Enum, "error": ShoalError}
"""The forms of subclasses."""


def _path(kind: type) -> tuple[str, str]:
    """Return the module and name of a class that can be found again."""
    path = kind.__module__, kind.__qualname__
    try:
        found = _find(path)
    except (LookupError, CodecError):
        found = None
    if found is not kind:
        raise CodecError(f"{'.'.join(path)}, which is not a class at the top level of a module")
    return path


def _find(path: Iterable[str]) -> type:
    """Return a class of a module that is imported already, without imports and computed attributes."""
    module, name = path
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if found is None:
            raise CodecError(f"{module}.{name}, which this rank has not imported")
        found = vars(found).get(part)
    if not isinstance(found, type):
        raise CodecError(f"{module}.{name}, which is not a class on this rank")
    return found


@functools.cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass or named tuple; None for any other class."""
    if issubclass(kind, tuple):
        names = vars(kind).get("_fields")
        return names if isinstance(names, tuple) else None
    if dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__:
        return tuple(field.name for field in dataclasses.fields(kind))
    return None

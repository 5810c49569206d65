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
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.util.errors import ShoalError

SENDABLE = (
    "None, numbers, strings, bytes, paths, lists, tuples, sets, dicts, tensors, NumPy arrays, and "
    "dataclasses, named tuples and enums of these"
)
_LENGTH = 8
_WIDE = 1 << 63
"""Python does not parse very long decimal integers; from here on they are written in base 16."""

_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_FACTORIES: dict[str, Any] = {"None": None} | {
    kind.__name__: kind for kind in (list, dict, set, int, float, str)
}
_CONSTANTS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}
_NAMES = {id(kind): name for name, kind in (_SEQUENCES | _MAPPINGS).items()} | {id(Counter): "Counter"}


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
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if -_WIDE <= value < _WIDE else {"int": hex(value)}
        if kind is list:
            return [self.write(item) for item in value]
        if kind is dict and all(type(key) is str for key in value):
            return {"map": {key: self.write(item) for key, item in value.items()}}
        name = _NAMES.get(id(kind))
        if name in _SEQUENCES:
            return {name: [self.write(item) for item in value]}
        if name is not None:
            return {name: self._pairs(value)}
        return self._write_rare(value, kind)

    def _write_rare(self, value: Any, kind: type) -> Any:
        if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            return {"tensor": self._tensor(value)}
        if kind in (bytes, bytearray):
            return {kind.__name__: self._buffer(bytes(value))}
        if kind is np.ndarray or isinstance(value, np.generic):
            return {"array" if kind is np.ndarray else "scalar": self._array(np.asarray(value))}
        if kind is defaultdict and value.default_factory in _FACTORIES.values():
            factory = value.default_factory
            return {"defaultdict": [factory.__name__ if factory else "None", self._pairs(value)]}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if isinstance(value, Path):
            return {"path": str(value)}
        if kind is torch.device:
            return {"device": str(value)}
        if kind in _CONSTANTS:
            return {_CONSTANTS[kind]: str(value).removeprefix("torch.")}
        return self._write_object(value, kind)

    def _write_object(self, value: Any, kind: type) -> Any:
        if isinstance(value, Enum):
            if value.name not in type(value).__members__:
                raise CodecError(f"{value!r}, which has no name in {kind.__qualname__}")
            return {"enum": [*_path(kind), value.name]}
        if isinstance(value, ShoalError):
            fields = [value.given, value.found, value.fix, value.where]
            return {"error": [*_path(kind), *fields]}
        if isinstance(value, str):
            return str(value)
        names = _fields(kind)
        if names is None:
            raise CodecError(f"{kind.__module__}.{kind.__qualname__}")
        if not isinstance(value, tuple) and not getattr(value, "__dict__", {}).keys() <= set(names):
            raise CodecError(
                f"{kind.__module__}.{kind.__qualname__} with attributes that are not fields"
            )
        return {"object": [*_path(kind), [self.write(getattr(value, name)) for name in names]]}

    def _pairs(self, value: Any) -> list[Any]:
        return [[self.write(key), self.write(item)] for key, item in value.items()]

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        plain = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value.detach())
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype).removeprefix("torch."), list(value.shape), *self._buffer(data)]

    def _array(self, value: np.ndarray[Any, Any]) -> list[int]:
        if value.dtype.hasobject:
            raise CodecError("a NumPy array of objects")
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return self._buffer(file.getvalue())

    def _buffer(self, data: bytes) -> list[int]:
        self.buffers.append(data)
        return [len(data)]


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
        ((kind, content),) = tree.items()
        if kind == "map":
            return {key: self.read(item) for key, item in content.items()}
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.read(item) for item in content)
        if kind in _MAPPINGS:
            return _MAPPINGS[kind](self._pairs(content))
        if kind == "defaultdict":
            return defaultdict(_FACTORIES[content[0]], self._pairs(content[1]))
        if kind in _CONSTANTS.values():
            return _constant(kind, content)
        return _READ[kind](self, content)

    def _pairs(self, content: list[Any]) -> list[tuple[Any, Any]]:
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
    if _CONSTANTS.get(type(found)) != kind:
        raise CodecError(f"a {kind} {name!r}")
    return found


def _error(content: list[Any]) -> ShoalError:
    *path, given, found, fix, where = content
    kind = _find(path)
    if not issubclass(kind, ShoalError) or kind.__init__ is not ShoalError.__init__:
        raise CodecError(f"{'.'.join(path)} in place of an error")
    error = kind(given=given, found=found, fix=fix)
    error.where = where
    return error


def _enum(content: list[Any]) -> Enum:
    *path, name = content
    kind = _find(path)
    if not issubclass(kind, Enum):
        raise CodecError(f"{'.'.join(path)} in place of an enum")
    return kind.__members__[name]


_READ: dict[str, Callable[[_ByteReader, Any], Any]] = {
    "int": lambda _, content: int(content, 16),
    "tensor": _ByteReader.tensor,
    "bytes": lambda reader, content: bytes(reader.buffer(*content)),
    "bytearray": lambda reader, content: reader.buffer(*content),
    "array": _ByteReader.array,
    "scalar": lambda reader, content: reader.array(content)[()],
    "complex": lambda _, content: complex(*content),
    "path": lambda _, content: Path(content),
    "device": lambda _, content: torch.device(content),
    "enum": lambda _, content: _enum(content),
    "error": lambda _, content: _error(content),
    "object": _ByteReader.object,
}


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

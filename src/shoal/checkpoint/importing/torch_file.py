"""Files of `torch.save`, read without `torch.load`: tensors and plain values, and no other class."""

from __future__ import annotations

import io
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.paths import open_file
from shoal.checkpoint.state_tree import DTYPES
from shoal.util.pickling import InertObject, read_inert

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_LOCAL_HEADER = 30
"""The bytes of a zip entry before its name."""


class _Harmless:
    """A function that a file may call; unlike a plain one, a file can't change its attributes."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it changes a function")


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    return torch.as_strided(storage, tuple(size), tuple(stride), offset)


def _tensor_of(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    """Rebuild a tensor of a dtype without a storage class of its own (`_rebuild_tensor_v3`)."""
    dtype = rest[2]
    return torch.as_strided(storage.view(dtype), tuple(size), tuple(stride), offset)


def _subclass(rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
    """Rebuild a tensor that has attributes, without these."""
    if not isinstance(rebuild, _Harmless):
        raise ValueError("it has a tensor of an unknown kind")
    return rebuild(*args)


KNOWN: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _Harmless(_tensor),
    "torch._utils._rebuild_tensor_v2": _Harmless(_tensor),
    "torch._utils._rebuild_tensor_v3": _Harmless(_tensor_of),
    "torch._utils._rebuild_parameter": _Harmless(lambda tensor, *_: tensor),
    "torch._tensor._rebuild_from_type_v2": _Harmless(_subclass),
    "torch.Size": _Harmless(lambda sizes=(): tuple(sizes)),
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "collections.defaultdict": _Harmless(lambda *_: defaultdict(None)),
    "builtins.set": _Harmless(lambda items=(): list(items)),
    "__builtin__.set": _Harmless(lambda items=(): list(items)),
    **{f"torch.{name}": _Harmless(lambda *_: None) for name in ("device",)},
    **{f"torch.{name}": name for name in _STORAGES},
    "torch.storage.UntypedStorage": "UntypedStorage",
    **{str(dtype): dtype for dtype in DTYPES},
}


def read_torch_file(path: Path) -> Any:
    """Return the value in a file of `torch.save`. Its tensors share memory with the file's pages.

    Objects of classes become InertObjects. Raises OSError or ValueError if it can't be read.
    """
    with open_file(path) as file:
        if not file.seek(0, io.SEEK_END):
            raise ValueError("it is empty")
    return read_torch_bytes(np.memmap(path, dtype=np.uint8, mode="c"))


def read_torch_bytes(data: Bytes) -> Any:
    """Return the value in the bytes of a file of `torch.save`, as `read_torch_file` does."""
    try:
        with zipfile.ZipFile(_ArrayFile(data)) as archive:
            return _read(archive, data)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(f"it is not a whole file of torch.save: {error}") from None
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # forged bytes can raise any error
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from None


def plain_tree(value: Any) -> Any:
    """Return a value without InertObjects: their entries in dicts, lists and tuples are left out.

    Raises ValueError if the state of an optimizer has one: it would be incomplete.
    """
    if isinstance(value, dict) and not isinstance(value, InertObject):
        if {"state", "param_groups"} <= value.keys() and (odd := _first_object(value)) is not None:
            raise ValueError(f"the state of its optimizer has an object of the class {odd.name}")
        items = value.items()
        return {
            key: plain_tree(item)
            for key, item in items
            if type(key) in (str, int) and not isinstance(item, InertObject)
        }
    if isinstance(value, list | tuple):
        return type(value)(plain_tree(item) for item in value if not isinstance(item, InertObject))
    return None if isinstance(value, InertObject) else value


def _first_object(value: Any) -> InertObject | None:
    if isinstance(value, InertObject):
        return value
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return None
    return next((odd for item in items if (odd := _first_object(item)) is not None), None)


def _read(archive: zipfile.ZipFile, data: Bytes) -> Any:
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("it is not a file of torch.save")
    folder = pickles[0].removesuffix("data.pkl")
    order = f"{folder}byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise ValueError("its bytes are in the order of another kind of machine")
    storages: dict[str, Tensor] = {}

    def storage(pid: Any) -> Tensor:
        word, kind, key, _, count = pid
        if word != "storage" or not isinstance(kind, str):
            raise ValueError("it refers to data that torch.save does not write")
        if key not in storages:
            entry = _entry(archive.getinfo(f"{folder}data/{key}"), data)
            dtype = _STORAGES[kind]
            if kind != "UntypedStorage" and len(entry) < count * dtype.itemsize:
                raise ValueError(f"its storage {key} is shorter than it says")
            aligned = entry if entry.ctypes.data % dtype.itemsize == 0 else entry.copy()
            size = len(aligned) // dtype.itemsize * dtype.itemsize
            storages[key] = torch.from_numpy(aligned[:size]).view(dtype)
        return storages[key]

    return read_inert(archive.read(pickles[0]), KNOWN, storage)


def _entry(info: zipfile.ZipInfo, data: Bytes) -> Bytes:
    """Return the bytes of an uncompressed entry of a zip file, without a copy."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its tensors are compressed")
    at = info.header_offset + _LOCAL_HEADER
    lengths = data[at - 4 : at].tobytes()
    start = at + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    found = data[start : start + info.file_size]
    if len(found) != info.file_size:
        raise ValueError("it is truncated")
    return found


class _ArrayFile(io.RawIOBase):
    """Bytes of an array as a file to read."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to another place."""
        at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence] + offset
        if at < 0:
            raise OSError("a place before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read as much as fits."""
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part.tobytes()
        self._at += len(part)
        return len(part)

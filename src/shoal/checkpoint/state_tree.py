"""State trees as named tensors and JSON, and back.

A tree is made of `dict` (also `OrderedDict` and `Counter`; keys are `str` or `int`), `list` and
`tuple`; of tensors, NumPy arrays and NumPy scalars; and of plain values: `None`, `bool`, `int`,
`float`, `str`, `bytes`. A restore returns the same types and exactly the same values. Any other
type, subclasses included, raises an error with its path, because a restore would change its type.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shoal.util.errors import CheckpointError
from shoal.util.safe_text import masked

Tree = dict[str, Any]

# The dtypes that can be stored, with safetensors' names. Complex ones are stored as pairs of reals.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "F32",
    torch.complex128: "F64",
}


def safetensors_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, slice]]:
    """Return the header of a safetensors file, and the place of each tensor's data after it.

    `tensors` has the dtype, the shape and the bytes of each. Default of `metadata`: none. The format
    (https://huggingface.co/docs/safetensors): the length of the header in 8 bytes, the header, the data
    without gaps. Wide dtypes come first, so that all are aligned.
    """
    described: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    places, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape, size = tensors[name]
        start, end = end, end + size
        places[name] = slice(start, end)
        kind = "C64" if dtype is torch.complex64 else DTYPES[dtype]
        described[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


# Not every reader of JSON is exact beyond this integer.
_EXACT = 2**53
_DEEPEST = 64
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


@dataclass
class StateParts:
    """A tree in parts: its tensors by name, and JSON that refers to them.

    A tensor's name is its path: keys and positions joined by `/`. Within a key, `~`, `/` and `#` are
    written `~0`, `~1` and `~2`.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    json: Any = None


def take_apart(tree: Any, *root: str) -> StateParts:
    """Return the tensors and the JSON of a tree; names of its tensors begin with `root`.

    Raises CheckpointError with the path of a value that can't be stored. Copies only NumPy arrays.
    """
    parts = StateParts()
    parts.json = _Encoder(parts.tensors).encode(tree, root)
    return parts


def encode_checkpoint(
    state: Tree, rank_state: Tree, info: Mapping[str, Any], rank: int
) -> tuple[StateParts, StateParts, Any]:
    """Return the parts of a checkpoint: the state, this rank's own state, and `info` without secrets.

    Raises CheckpointError for values that can't be stored, and for tensors in `info`.
    """
    parts = take_apart(state, "state")
    own_parts = take_apart(rank_state, "rank", str(rank))
    described = take_apart(masked(dict(info)), "info")
    if described.tensors:
        raise CheckpointError(
            given=f"the info of a checkpoint, at {next(iter(described.tensors))}",
            found="a tensor or an array",
            fix="put it into the state",
        )
    return parts, own_parts, described.json


def put_together(json: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree from the parts that `take_apart` returned; raises CheckpointError if it can't.

    The tree contains the objects of `tensors` themselves.
    """
    try:
        return _decode(json, tensors)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            given="a stored state",
            found=f"it can't be decoded: {type(error).__name__}: {error}",
            fix="delete this checkpoint, or read it with the version of Shoal that wrote it",
        ) from error


def names_in(json: Any) -> set[str]:
    """Return the names of the tensors that an encoded tree refers to."""
    names: set[str] = set()
    pending = [json]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, dict):
            for tag, content in node.items():
                if tag in _TENSORS:
                    names.add(content)
                elif isinstance(content, dict):
                    pending.extend(content.values())
                else:
                    pending.append(content)
    return names


def joined(one: Any, other: Any) -> Any:
    """Return two encoded trees as one: dicts have the keys of both, other values are those of `one`."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one
    [(tag, mine)], theirs = one.items(), other.get(next(iter(one)))
    if tag not in _DICTS.values() or not isinstance(mine, dict) or not isinstance(theirs, dict):
        return one
    both = {key: joined(value, theirs[key]) if key in theirs else value for key, value in mine.items()}
    return {tag: both | {key: value for key, value in theirs.items() if key not in mine}}


def present(tree: Any) -> Any:
    """Return a decoded tree without the tensors that were not read because other ranks hold them."""
    if not isinstance(tree, dict):
        return tree
    kept = {key: present(value) for key, value in tree.items() if not _absent(value)}
    return kept if type(tree) is dict else type(tree)(kept)


def some(tree: Any, keep: Callable[[str, torch.Tensor], bool], *root: str | int) -> dict[Any, Any]:
    """Return only the tensors of a tree for which `keep(path, tensor)` is true, in dicts."""
    kept: dict[Any, Any] = {}
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        at = (*root, key)
        if isinstance(value, torch.Tensor):
            if keep(path_of(*at), value):
                kept[key] = value
        elif isinstance(value, dict | list | tuple) and (below := some(value, keep, *at)):
            kept[key] = below
    return kept


def path_of(*keys: str | int) -> str:
    """Return the name of the tensor below these keys."""
    return "/".join(map(_escape, keys))


def _absent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a tree, for `compare_names`."""
    return {name: tuple(tensor.shape) for name, tensor in take_apart(tree).tensors.items()}


@dataclass(frozen=True)
class TensorDifferences:
    """The differences between stored and expected tensors; `str` shows the first of each kind."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]

    def __str__(self) -> str:
        kinds = [("missing", self.missing), ("unexpected", self.unexpected)]
        kinds.append(("of another shape", self.reshaped))
        return "; ".join(
            f"{len(names)} {kind}, the first: {names[0]}" for kind, names in kinds if names
        )


def compare_names(
    expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]
) -> TensorDifferences | None:
    """Compare names and shapes, in the given order; return None if they are equal."""
    difference = TensorDifferences(
        missing=tuple(name for name in expected if name not in found),
        unexpected=tuple(name for name in found if name not in expected),
        reshaped=tuple(
            f"{name} (expected {tuple(shape)}, found {tuple(found[name])})"
            for name, shape in expected.items()
            if name in found and tuple(found[name]) != tuple(shape)
        ),
    )
    differs = difference.missing or difference.unexpected or difference.reshaped
    return difference if differs else None


class _Encoder:
    """Encodes values as JSON; each object has a single key, the kind of the value."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if len(path) > _DEEPEST:
            raise _refusal(path, "it is nested too deeply, or contains itself", "flatten it")
        if isinstance(value, torch.Tensor):
            return {"tensor": self._keep(value, path)}
        if isinstance(value, np.ndarray):
            return {"array": self._keep(_from_numpy(value, path), path)}
        if isinstance(value, np.generic):
            return {"scalar": self._keep(_from_numpy(np.asarray(value), path), path)}
        kind = type(value)
        if kind is list:
            return self._encode_all(value, path)
        if kind is tuple or kind is torch.Size:
            return {"tuple": self._encode_all(value, path)}
        if kind in _DICTS:
            return {_DICTS[kind]: self._encode_items(value, path)}
        return _encode_plain(value, path)

    def _encode_all(self, values: Sequence[Any], path: tuple[str, ...]) -> list[Any]:
        return [self.encode(value, (*path, str(i))) for i, value in enumerate(values)]

    def _encode_items(self, values: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        for key in values:
            if type(key) not in (str, int):
                found = f"a key {key!r} of type {type(key).__name__}"
                raise _refusal(path, found, "use keys of type str or int")
        encoded = [(key, self.encode(value, (*path, _escape(key)))) for key, value in values.items()]
        if all(type(key) is str for key in values):
            return dict(encoded)
        return [[_encode_plain(key, path), value] for key, value in encoded]

    def _keep(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        found = None
        if tensor.dtype not in DTYPES:
            found = f"a tensor of {tensor.dtype}"
        elif tensor.layout is not torch.strided:
            found = f"a tensor of layout {tensor.layout}"
        elif tensor.is_meta:
            found = "a tensor on the meta device, without data"
        if found is not None:
            raise _refusal(path, found, "store a dense tensor of an ordinary dtype, or leave it out")
        name = "/".join(path)
        if name in self._tensors:
            raise _refusal(path, "keys that differ only in type, as 0 and '0'", "rename one of them")
        self._tensors[name] = tensor.detach()
        return name


def _encode_plain(value: Any, path: tuple[str, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_EXACT < value < _EXACT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise _refusal(
        path,
        f"a value of type {kind.__module__}.{kind.__qualname__}",
        "convert it to tensors, NumPy arrays, dicts, lists, tuples or plain values",
    )


def _escape(key: str | int) -> str:
    return str(key).replace("~", "~0").replace("/", "~1").replace("#", "~2")


def _from_numpy(array: np.ndarray[Any, Any], path: tuple[str, ...]) -> torch.Tensor:
    try:
        # torch also needs the copy for writable memory and positive strides.
        return torch.from_numpy(array.copy(order="C"))
    except (TypeError, ValueError):
        found = f"a NumPy array of dtype {array.dtype}"
        raise _refusal(path, found, "convert it to numbers in native byte order") from None


def _refusal(path: tuple[str, ...], found: str, fix: str) -> CheckpointError:
    return CheckpointError(
        given=f"a state to save, at {'/'.join(path) or 'its root'}",
        found=f"{found}, which a checkpoint can't hold",
        fix=fix,
    )


def _items(content: Any) -> dict[Any, Any]:
    # A list of pairs if not all keys are strings.
    if isinstance(content, dict):
        return content
    return {_decode(key, {}): value for key, value in content}


def _decode(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    [(tag, content)] = node.items()
    if tag in _TENSORS:
        return _TENSORS[tag](tensors[content])
    if tag in _PLAIN:
        return _PLAIN[tag](content)
    if tag == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    return _MAPPINGS[tag]({key: _decode(item, tensors) for key, item in _items(content).items()})


_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "array": lambda tensor: tensor.numpy(),
    "scalar": lambda tensor: tensor.numpy()[()],
}
_PLAIN: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": lambda text: base64.b64decode(text, validate=True),
}
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {tag: kind for kind, tag in _DICTS.items()}

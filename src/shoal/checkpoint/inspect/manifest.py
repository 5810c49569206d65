"""One checkpoint as plain values: its manifest, its tensors' table, its state without the tensors."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint import tensor_index
from shoal.checkpoint.object_store import RemoteError
from shoal.checkpoint.paths import AnyPath, open_file
from shoal.checkpoint.store import DamageError, Manifest, NewerError, damage, read_manifest
from shoal.checkpoint.tensor_index import TensorEntry
from shoal.util.errors import CheckpointError

_DEEPEST = 200
_LONGEST_INT = 3000

Keys = tuple[str, ...]
"""Keys and positions that lead to a value in a tree."""


@dataclass(frozen=True)
class Reference:
    """A "tensor", an "array" or a NumPy "scalar" in a tree: its name in the table."""

    kind: str
    name: str


@dataclass(frozen=True)
class CheckpointManifest:
    """A checkpoint, except for the values of its tensors."""

    path: AnyPath
    manifest: Manifest
    info: dict[str, Any]
    state: Any
    rank_state: list[Any]
    tensors: dict[str, TensorEntry]

    @property
    def bytes(self) -> int:
        """The size of all files in the manifest."""
        return sum(record.bytes for record in self.manifest.files.values())


def inspect_checkpoint(path: AnyPath) -> CheckpointManifest:
    """Read a checkpoint's JSON; checks the sizes of its files, but not their contents.

    Raises CheckpointError for a damaged checkpoint or a path that is not one; RemoteError if a file
    can't be reached now.
    """
    try:
        manifest = read_manifest(path)
        if reason := damage(path, manifest, read=False):
            raise DamageError(reason)
        with open_file(path / tensor_index.STATE) as file:
            content = tensor_index.read_tensor_index(file.read(), manifest)
        info, state = simplify(manifest.info), simplify(content["state"])
        ranks = [simplify(each) for each in content["rank_state"]]
        rows = tensor_index.rows(content, manifest.files)
        if not isinstance(info, dict):
            raise DamageError("the info of its manifest is not a dict")
        for at, leaf in leaves([info, state, ranks]):
            if isinstance(leaf, Reference) and leaf.name not in rows:
                raise DamageError(
                    f"{'/'.join(at)} is a tensor that {tensor_index.STATE} does not describe"
                )
        return CheckpointManifest(path, manifest, info, state, ranks, rows)
    except RemoteError:
        raise
    except (DamageError, OSError, ValueError, TypeError, RecursionError) as error:
        found = str(error)
        if isinstance(error, FileNotFoundError):
            found = f"{str(error.filename).rpartition('/')[2]} is missing"
        newer = isinstance(error, NewerError)
        raise CheckpointError(
            given=f"the checkpoint {path}",
            found=found,
            fix="pip install --upgrade shoal"
            if newer
            else f"shoal checkpoint ls {_folder(path)} lists others",
        ) from None


def _folder(path: AnyPath) -> AnyPath:
    return path.absolute().parent if isinstance(path, Path) else path.parent


def simplify(node: Any, depth: int = 0) -> Any:
    """Return an encoded tree (see `checkpoint.state_tree`) as Python values and References.

    Raises ValueError if it is not such a tree.
    """
    if depth > _DEEPEST:
        raise ValueError("a state that is nested too deeply")
    if isinstance(node, list):
        return [simplify(item, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) != 1:
        raise ValueError("a state with an object of several tags")
    [(tag, content)] = node.items()
    if tag in ("dict", "ordered", "counter"):
        items = content.items() if isinstance(content, dict) else content
        return {simplify(key): simplify(item, depth + 1) for key, item in items}
    if tag == "tuple":
        return tuple(simplify(item, depth + 1) for item in content)
    if tag in ("tensor", "array", "scalar") and isinstance(content, str):
        return Reference(tag, content)
    if tag in _SIMPLE and isinstance(content, str):
        return _SIMPLE[tag](content)
    raise ValueError(f"a state with a value of kind {tag!r}")


def _int(text: str) -> int:
    if len(text) > _LONGEST_INT:  # Python prints no longer ones
        raise ValueError(f"a state with a number of {len(text):,} digits")
    return int(text, 16)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a state with invalid bytes: {error}") from None


_SIMPLE: Mapping[str, Any] = {
    "int": _int,
    "float": float,
    "bytes": _bytes,
}


def leaves(tree: Any, *at: str) -> Iterator[tuple[Keys, Any]]:
    """Yield the values of a tree with their paths: References, and values that contain none.

    A list or tuple of plain values is one value.
    """
    if isinstance(tree, dict) and tree:
        for key, item in tree.items():
            yield from leaves(item, *at, str(key))
    elif isinstance(tree, list | tuple) and not _is_plain(tree):
        for index, item in enumerate(tree):
            yield from leaves(item, *at, str(index))
    else:
        yield at, tree


def _is_plain(tree: Any) -> bool:
    if isinstance(tree, list | tuple):
        return all(_is_plain(item) for item in tree)
    return not isinstance(tree, Reference | dict)

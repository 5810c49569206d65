"""Verification of a checkpoint by the sizes of its files or by their SHA-256."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from shoal.checkpoint import tensor_index
from shoal.checkpoint.directory_names import is_named
from shoal.checkpoint.object_store import RemoteError
from shoal.checkpoint.paths import AnyPath, open_file
from shoal.checkpoint.store import DamageError, Manifest, manifest_of, read_manifest

THREADS = 8
"""The number of reading threads; more gain little and slow down other users of the file system."""


def manifest(path: AnyPath) -> Manifest:
    """Return the manifest of a checkpoint, checked against the step in its name. Raises DamageError."""
    if is_named(path):
        return manifest_of(path)
    try:
        return read_manifest(path)
    except RemoteError:
        raise
    except OSError as error:
        raise DamageError(str(error)) from None


class Examined(NamedTuple):
    """A checkpoint that was read: its manifest, unless that is damaged, and its problems."""

    path: AnyPath
    manifest: Manifest | None
    problems: list[str]


def examine(path: AnyPath, *, read: bool) -> Examined:
    """Examine a checkpoint; it has no problems if it is complete. With `read`, read its files."""
    try:
        said = manifest(path)
    except DamageError as damage:
        return Examined(path, None, [str(damage)])
    names = sorted(said.files)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        # Hashing and reading release the GIL.
        found = list(
            threads.map(lambda name: said.files[name].difference(path / name, read=read), names)
        )
    listed = [f"{name} {reason}" for name, reason in zip(names, found, strict=True) if reason]
    if read and not listed:
        try:
            with open_file(path / tensor_index.STATE) as file:
                tensor_index.read_tensor_index(file.read(), said)
        except RemoteError:
            raise
        except (DamageError, OSError) as error:
            listed = [str(error)]
    return Examined(path, said, listed)

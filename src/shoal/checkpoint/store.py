"""Checkpoints as directories: the commit of a save, and the proof that a checkpoint is complete.

Each save fills its own directory. The manifest is written and synced last, which is the commit, and a
removal removes it first. Whenever a process dies, each directory is therefore either a complete
checkpoint or visibly incomplete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, Generic

from shoal.checkpoint.directory_names import PARTIAL, DirectoryName, step_of
from shoal.checkpoint.filesystem import Files
from shoal.checkpoint.object_store import RemoteError
from shoal.checkpoint.paths import AnyPath, P, open_file

MANIFEST = "manifest.json"
FORMAT = "shoal checkpoint"
VERSION = 1

# Names that are in a checkpoint's own directory on every file system, and that any terminal shows.
_FILE = re.compile(r"\w[\w.+-]*", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST_MANIFEST = 1 << 28
_LISTINGS = 5


@dataclass(frozen=True)
class FileRecord:
    """The expected content of a file: its size in bytes and the SHA-256 of its content."""

    bytes: int
    sha256: str

    def difference(self, path: AnyPath, *, read: bool = True) -> str | None:
        """Return the difference between the file at `path` and this record; None if there is none.

        Compares only the size, unless `read`. Raises RemoteError if the file can't be reached now.
        """
        try:
            with open_file(path) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                if size != self.bytes:
                    return f"has {size:,} bytes, should have {self.bytes:,}"
                if read and hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                    return "is altered (its SHA-256 differs)"
        except FileNotFoundError:
            return "is missing"
        except RemoteError:
            raise
        except OSError as error:
            return f"can't be read: {error}"
        return None


class DamageError(Exception):
    """An error for a directory that is not a complete checkpoint; its message is the reason."""


class NewerError(DamageError):
    """A checkpoint in a format that this version of Shoal does not know."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint; `info` is JSON from the caller."""

    step: int
    world_size: int
    info: Any
    files: Mapping[str, FileRecord]

    def render(self) -> bytes:
        """Return the text of this manifest; a reader accepts only exactly these bytes."""
        body = {
            "step": self.step,
            "world_size": self.world_size,
            "info": self.info,
            "files": {name: asdict(record) for name, record in self.files.items()},
        }
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        content = {"format": FORMAT, "version": VERSION, "sha256": digest, "manifest": body}
        return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"

    @staticmethod
    def parse(raw: bytes) -> Manifest:
        """Return the manifest that renders as `raw`; raises DamageError if there is none."""
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            raise DamageError(f"{MANIFEST} is truncated or altered (not JSON)") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DamageError(f"{MANIFEST} is not one of a Shoal checkpoint")
        if content.get("version") != VERSION:
            found = repr(content.get("version"))[:20]
            raise NewerError(f"{MANIFEST} has format version {found}, this Shoal reads {VERSION}")
        try:
            body = content["manifest"]
            files = {name: FileRecord(**record) for name, record in body["files"].items()}
            manifest = Manifest(body["step"], body["world_size"], body["info"], files)
            whole = manifest.render() == raw
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            whole = False
        if not whole:
            raise DamageError(f"{MANIFEST} is altered (its own SHA-256 differs)")
        if not manifest.is_possible():
            raise DamageError(f"{MANIFEST} has values that no checkpoint can have")
        return manifest

    def is_possible(self) -> bool:
        """Return whether its values have the types and ranges that a reader relies on.

        Anyone can write a manifest with the right SHA-256, so an invalid value need not be damage.
        """
        records = self.files.values()
        numbers = [self.step, self.world_size, *(record.bytes for record in records)]
        return (
            all(type(number) is int and number >= 0 for number in numbers)
            and self.world_size > 0
            and all(name != MANIFEST and _FILE.fullmatch(name) for name in self.files)
            and all(isinstance(r.sha256, str) and _DIGEST.fullmatch(r.sha256) for r in records)
        )


class _Digest(Thread):
    """Hashes blocks on a separate core while they are written: both take about the same time."""

    def __init__(self, blocks: Sequence[bytes | memoryview]) -> None:
        super().__init__(name="shoal digest", daemon=True)
        self.sha256 = hashlib.sha256()
        self._blocks = blocks
        self.start()

    def run(self) -> None:
        for block in self._blocks:
            self.sha256.update(block)


class Store(ABC, Generic[P]):
    """The checkpoints below one directory.

    Any rank may call `write` and `probe`. Only one rank may call the methods that move or remove
    directories, and only while no other rank writes. The subclasses define the directory of a save.
    """

    def __init__(self, directory: P, files: Files) -> None:
        self.directory: P = directory
        self.files = files

    @abstractmethod
    def expect(self, step: int) -> None:
        """Announce a save of `step`, on all ranks, before any other call for it."""

    @abstractmethod
    def where(self, step: int) -> P:
        """Return the directory of the checkpoint that is being saved, once it exists."""

    @abstractmethod
    def unfinished(self, step: int) -> P:
        """Return the directory that the save writes to."""

    @abstractmethod
    def tidy(self) -> None:
        """Finish interrupted saves and removals without losing a checkpoint."""

    @abstractmethod
    def publish(self, step: int) -> P:
        """Give a sealed checkpoint its final name, replacing one of the same step.

        If that fails, the checkpoint keeps its name and stays valid. Nothing needs to be synced: if
        a power failure undoes the rename, the checkpoint is also valid under its first name.
        """

    @abstractmethod
    def confirm(self, path: P) -> None:
        """Raise OSError if a file of a published checkpoint is missing.

        An operation of an earlier attempt that was stopped after its check of the fence may have
        removed it.
        """

    @abstractmethod
    def remove(self, path: P) -> None:
        """Remove a checkpoint so that at no moment a part of it looks complete."""

    @abstractmethod
    def remove_tree(self, path: P) -> None:
        """Remove a directory with its contents, the manifest first."""

    def candidates(self) -> list[P]:
        """Return the directories that may be checkpoints, newest first.

        At the same step the partial one comes first: its manifest was written later. A partial one
        without a valid manifest was never committed and is not listed.
        """
        return [path for _, path, whole in reversed(self._judged()) if whole]

    def leftovers(self) -> list[P]:
        """Return the directories of unfinished saves and removals, in order of steps."""
        return [
            path for name, path, whole in self._judged() if (name.suffix or name.numbered) and not whole
        ]

    def begin(self, step: int, size: int = 0, files: int = 0) -> None:
        """Make room for a checkpoint, before any rank writes to it.

        Raises OSError (ENOSPC) if the disk has no space for `size` bytes in `files` files.
        """
        self.tidy()
        self._check_room(size, files)
        target = self.unfinished(step)
        if target.exists():
            raise FileExistsError(
                errno.EEXIST, "it is a complete checkpoint and can't be replaced", str(target)
            )

    def write(self, step: int, name: str, blocks: Sequence[bytes | memoryview]) -> FileRecord:
        """Write and sync one file of an unfinished checkpoint, and hash it without reading it back.

        Its bytes are reserved first, so that a full disk raises an error at once.
        """
        target = self.unfinished(step)
        self.files.make_directory(target)
        return self._write(target / name, blocks, sum(map(len, blocks)))

    def seal(self, step: int, manifest: Manifest) -> None:
        """Commit: the checkpoint exists from the moment at which the manifest is on the disk."""
        target = self.unfinished(step)
        # A power failure must not keep the manifest and lose a file that it lists.
        self.files.sync_directory(target)
        self._write(target / MANIFEST, [manifest.render()])
        self.files.sync_directory(target)
        self.files.sync_directory(self.directory)

    def discard(self, step: int) -> None:
        """Free the space of a failed save, as far as possible, before it is published."""
        with suppress(OSError):
            self.remove_tree(self.unfinished(step))

    def probe(self, rank: int) -> None:
        """Write, sync and remove a small file; raises OSError if that is not possible."""
        self.files.make_directory(self.directory)
        path = self.directory / f".probe-{rank}"
        if path.exists():
            self.files.unlink(path)
        self._write(path, [b"?"])
        self.files.unlink(path)

    def directories(self) -> list[tuple[DirectoryName, P]]:
        """Return the directories named like checkpoints, in the order of saves as far as names show."""
        if not self.directory.is_dir():
            return []
        found = [(DirectoryName.read(path.name), path) for path in self.directory.iterdir()]
        # A plain file of such a name belongs to the user, not to Shoal.
        named = [
            (name, path)
            for name, path in found
            if name is not None and not (isinstance(path, Path) and path.is_file())
        ]
        return sorted(named, key=lambda each: each[0])

    def _judged(self) -> list[tuple[DirectoryName, P, bool]]:
        """Return the directories, in the order of `directories`, and whether each may be whole.

        Another process may give a partial one its final name after it was listed: list them again.
        """
        judged: list[tuple[DirectoryName, P, bool]] = []
        for _ in range(_LISTINGS):
            found = self.directories()
            judged = [(name, path, self.may_be_whole(name, path)) for name, path in found]
            if all(path.exists() for name, path in found if name.suffix == PARTIAL):
                break
        return judged

    def may_be_whole(self, name: DirectoryName, path: P) -> bool:
        """Return whether to list a directory; damaged checkpoints are listed, for users to see."""
        if name.suffix == PARTIAL:
            return self.is_committed(path)
        # The name is final from the first file on; the save may still be running.
        return (path / MANIFEST).exists() if name.numbered else not name.suffix

    def is_committed(self, path: P) -> bool:
        """Return whether the directory has a valid manifest."""
        # A manifest that can't be read now may be valid: that raises an error.
        try:
            _refuse_link(path)
            return read_manifest(path).step == step_of(path)
        except (FileNotFoundError, DamageError):
            return False

    def _check_room(self, size: int, files: int) -> None:
        room = self.files.room(self.directory)
        for needed, free, what, show in (
            (size, room.bytes, "bytes", "df -h"),
            # The directory, the state and the manifest.
            (files + 3 if files else 0, room.files, "files", "df -i"),
        ):
            if free is not None and needed > free:
                said = f"{os.strerror(errno.ENOSPC)}: {needed:,} {what} are needed, {free:,} are free"
                raise OSError(errno.ENOSPC, f"{said} ({show})", str(self.directory))

    def _reserve(self, file: BinaryIO, path: P, size: int) -> None:
        try:
            self.files.reserve(file, size)
        except OSError as error:
            free = self.files.room(path).bytes
            known = "" if free is None else f", {free:,} are free on the disk"
            said = f"{os.strerror(error.errno or 0)}: {size:,} bytes are needed{known}"
            raise OSError(error.errno, said, str(path)) from None

    def _write(self, path: P, blocks: Sequence[bytes | memoryview], reserved: int = 0) -> FileRecord:
        digest = _Digest(blocks)
        try:
            with self.files.create(path) as file:
                if reserved:
                    self._reserve(file, path, reserved)
                for block in blocks:
                    self.files.write(file, block)
                self.files.sync(file)
        except OSError as error:
            # Errors of write and fsync have no file name.
            error.filename = error.filename or str(path)
            raise
        finally:
            digest.join()  # the blocks may be overwritten after this call
        return FileRecord(sum(map(len, blocks)), digest.sha256.hexdigest())


def damage(
    path: AnyPath, manifest: Manifest, *, share: int = 0, of: int = 1, read: bool = True
) -> str | None:
    """Return the first difference between the files of a checkpoint and its manifest, or None.

    Reads every `of`-th file from number `share` on, so that ranks split the work; compares only their
    sizes unless `read`. Raises RemoteError if a file can't be reached now.
    """
    for name in sorted(manifest.files)[share::of]:
        if reason := manifest.files[name].difference(path / name, read=read):
            return f"{name} {reason}"
    return None


def is_complete(path: AnyPath) -> bool:
    """Return whether a candidate has a manifest and all files in their sizes. Raises RemoteError."""
    with suppress(DamageError):
        return damage(path, manifest_of(path), read=False) is None
    return False


def manifest_of(path: AnyPath) -> Manifest:
    """Return the manifest of a checkpoint, of the step in its name if it has one. Raises DamageError.

    Raises RemoteError if it can't be reached now.
    """
    name = DirectoryName.read(path.name)
    if name is not None:
        _refuse_link(path)
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        raise DamageError(f"{MANIFEST} is missing") from None
    except RemoteError:
        raise
    except OSError as error:
        raise DamageError(f"{MANIFEST} can't be read: {error}") from None
    if name is not None and manifest.step != name.step:
        raise DamageError(f"its {MANIFEST} is of step {manifest.step}")
    return manifest


def _refuse_link(path: AnyPath) -> None:
    """Raise DamageError if the path of a checkpoint is a symbolic link."""
    if isinstance(path, Path) and path.is_symlink():
        raise DamageError("it is a symbolic link, whose target may be outside of the directory")


def read_manifest(path: AnyPath) -> Manifest:
    """Return the manifest in a directory of any name; raises OSError or DamageError."""
    with open_file(path / MANIFEST) as file:
        return Manifest.parse(file.read(_LARGEST_MANIFEST))

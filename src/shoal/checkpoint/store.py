"""Checkpoints as directories: what commits one, what proves one whole, what removes one safely.

A save fills `step-N.partial/`. Its manifest, written and synced last, is the commit; the rename to
`step-N/` only tidies up. Removal begins with a rename to `step-N.trash/`. So whatever moment a
process dies at, each directory is a whole checkpoint, or visibly none.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, NamedTuple

MANIFEST = "manifest.json"
FORMAT = "shoal checkpoint"
VERSION = 1

_DIRECTORY = re.compile(r"step-(0|[1-9]\d*)(\.partial|\.trash)?", re.ASCII)
# Names that lie in a checkpoint's own directory, on every file system, and that any terminal shows.
_FILE = re.compile(r"\w[\w.+-]*", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST_MANIFEST = 1 << 28
# Some network file systems refuse to sync a directory; they have nothing to sync there.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)


# What the system says of file systems that can't reserve, and the C library where it would emulate.
_NO_RESERVATION = (errno.EBADF, errno.EINVAL, errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP)


class Room(NamedTuple):
    """How many bytes and how many files more a file system takes; None where it doesn't say."""

    bytes: int | None
    files: int | None


class Files:
    """Every operation by which a checkpoint changes the disk.

    Nothing else in this package does, so that a subclass can count, refuse or cut short each one.
    `room` only looks; it is here so that a subclass can pretend.
    """

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents; one that exists is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file; one that exists belongs to another writer and is an error."""
        return path.open("xb", buffering=1 << 20)

    def reserve(self, file: BinaryIO, size: int) -> None:
        """Take `size` bytes of the disk for a new file, so that a full one or a quota shows at once.

        Nothing happens on file systems that can't do it themselves. For those the C library would
        write into each block, but not to a file that is open to append (posix_fallocate(3)).
        """
        descriptor = file.fileno()
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _NO_RESERVATION:
                raise
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)

    def room(self, path: Path) -> Room:
        """What is free for this user on the file system of a path, which need not exist yet."""
        while not path.exists():
            path = path.parent
        found = os.statvfs(path)
        root = os.geteuid() == 0  # may use what is kept for it
        blocks, files = (found.f_bfree, found.f_ffree) if root else (found.f_bavail, found.f_favail)
        # Some file systems count neither, and say that they have none.
        return Room(
            blocks * found.f_frsize if found.f_blocks else None, files if found.f_files else None
        )

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append to an open file."""
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Bring a file's content to the disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Bring a directory's entries to the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                error.filename = str(path)
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a directory."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()


@dataclass(frozen=True)
class Record:
    """What a file must be: its size in bytes and the SHA-256 of its content."""

    bytes: int
    sha256: str

    def difference(self, path: Path, *, read: bool = True) -> str | None:
        """Why the file at `path` is not this one; None if it is. Only its size, unless `read`."""
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != self.bytes:
                    return f"has {size:,} bytes, should have {self.bytes:,}"
                if read and hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                    return "is altered (its SHA-256 differs)"
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"can't be read: {error}"
        return None


class DamageError(Exception):
    """A directory that is no whole checkpoint; its text is the reason."""


class NewerError(DamageError):
    """A checkpoint in a format that this version of Shoal does not know."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of; `info` is JSON of the caller's."""

    step: int
    world_size: int
    info: Any
    files: Mapping[str, Record]

    def render(self) -> bytes:
        """The one text of this manifest: a reader accepts it byte for byte or not at all."""
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
        """The manifest that renders as `raw`; raises DamageError if there is none."""
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            raise DamageError(f"{MANIFEST} is torn or altered (not JSON)") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DamageError(f"{MANIFEST} is not one of a Shoal checkpoint")
        if content.get("version") != VERSION:
            found = repr(content.get("version"))[:20]
            raise NewerError(f"{MANIFEST} has format version {found}, this Shoal reads {VERSION}")
        try:
            body = content["manifest"]
            files = {name: Record(**record) for name, record in body["files"].items()}
            manifest = Manifest(body["step"], body["world_size"], body["info"], files)
            whole = manifest.render() == raw
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            whole = False
        if not whole:
            raise DamageError(f"{MANIFEST} is altered (its own SHA-256 differs)")
        if not manifest.is_possible():
            raise DamageError(f"{MANIFEST} says what no checkpoint can be")
        return manifest

    def is_possible(self) -> bool:
        """Whether its values are of the types and in the ranges that a reader relies on.

        Anybody can write a manifest with the right SHA-256, so this is no matter of damage alone.
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
    """Hashes on a core of its own what is written meanwhile: one takes as long as the other."""

    def __init__(self, blocks: Sequence[bytes | memoryview]) -> None:
        super().__init__(name="shoal digest", daemon=True)
        self.sha256 = hashlib.sha256()
        self._blocks = blocks
        self.start()

    def run(self) -> None:
        for block in self._blocks:
            self.sha256.update(block)


class Store:
    """The checkpoints below one directory.

    Any rank may call `write`, `damage` and `probe`; what moves or removes directories is for one
    rank only, and only while no other rank writes.
    """

    def __init__(self, directory: Path, files: Files) -> None:
        self.directory = directory
        self._files = files

    def candidates(self) -> list[Path]:
        """What may be a checkpoint, newest first.

        At the same step the partial one comes first: its manifest was written later. A partial one
        without a valid manifest was never committed and is not listed.
        """
        found = [
            (step, suffix == ".partial", path)
            for step, suffix, path in self._directories()
            if suffix == "" or (suffix == ".partial" and self._is_committed(path))
        ]
        return [path for _, _, path in sorted(found, reverse=True)]

    def manifest(self, path: Path) -> Manifest:
        """The manifest of a candidate; raises DamageError."""
        try:
            manifest = read_manifest(path)
        except FileNotFoundError:
            raise DamageError(f"{MANIFEST} is missing") from None
        except OSError as error:
            raise DamageError(f"{MANIFEST} can't be read: {error}") from None
        if manifest.step != step_of(path):
            raise DamageError(f"its {MANIFEST} is of step {manifest.step}")
        return manifest

    def damage(self, path: Path, manifest: Manifest, *, share: int = 0, of: int = 1) -> str | None:
        """Why the files of a checkpoint are not what its manifest says; None if they are.

        Reads every `of`-th file, beginning with number `share`, so that ranks divide the work.
        """
        for name in sorted(manifest.files)[share::of]:
            reason = manifest.files[name].difference(path / name)
            if reason is not None:
                return f"{name} {reason}"
        return None

    def is_complete(self, path: Path) -> bool:
        """Whether a candidate has a manifest and all files in their sizes."""
        try:
            records = self.manifest(path).files
        except DamageError:
            return False
        return not any(record.difference(path / name, read=False) for name, record in records.items())

    def leftovers(self) -> list[Path]:
        """What is named like a checkpoint under way or being removed and is none, in order of steps."""
        whole = set(self.candidates())
        return [path for _, suffix, path in sorted(self._directories()) if suffix and path not in whole]

    def tidy(self) -> None:
        """Finish what a killed save or removal began, without losing a checkpoint."""
        leftovers = [entry for entry in self._directories() if entry[1]]
        for step, suffix, path in leftovers:
            if suffix == ".partial":
                self._settle(step, path)
        for _, suffix, path in leftovers:
            if suffix == ".trash" and os.path.lexists(path):
                # What somebody has open, network file systems don't remove: that harms nothing.
                with suppress(OSError):
                    self._remove_tree(path)

    def begin(self, step: int, size: int = 0, files: int = 0) -> None:
        """Make room for a checkpoint; before any rank writes to it.

        Raises OSError (ENOSPC) where `size` bytes in `files` files are more than the disk takes.
        """
        self.tidy()
        self._check_room(size, files)
        partial = self._partial(step)
        if partial.exists():
            raise FileExistsError(
                errno.EEXIST, "a whole checkpoint that can't be renamed is there", str(partial)
            )

    def write(self, step: int, name: str, blocks: Sequence[bytes | memoryview]) -> Record:
        """Write and sync one file of a checkpoint under way; hashed meanwhile, read by nobody.

        Its bytes are reserved first, where that tells at once that they do not fit.
        """
        partial = self._partial(step)
        self._files.make_directory(partial)
        return self._write(partial / name, blocks, sum(map(len, blocks)))

    def seal(self, step: int, manifest: Manifest) -> None:
        """Commit: from the moment the manifest is on the disk the checkpoint exists."""
        partial = self._partial(step)
        self._write(partial / MANIFEST, [manifest.render()])
        self._files.sync_directory(partial)
        self._files.sync_directory(self.directory)

    def publish(self, step: int) -> Path:
        """Give a sealed checkpoint its final name, replacing one of the same step.

        Where that fails it stays where it is, and is as good there. Nothing needs to be synced: a
        rename that a power cut undoes leaves it there too.
        """
        partial, final = self._partial(step), self._final(step)
        with suppress(OSError):
            replaced = self._to_trash(final) if final.exists() else None
            self._files.rename(partial, final)
            if replaced is not None:
                self._remove_tree(replaced)
        return partial if partial.exists() else final

    def discard(self, step: int) -> None:
        """Free what a failed save has taken, as far as possible; before it is published."""
        with suppress(OSError):
            self._remove_tree(self._partial(step))

    def remove(self, path: Path) -> None:
        """Remove a checkpoint so that no moment shows half of it."""
        self._remove_tree(self._to_trash(path))

    def probe(self, rank: int) -> None:
        """Write, sync and remove a small file; raises OSError where that is not possible."""
        self._files.make_directory(self.directory)
        path = self.directory / f".probe-{rank}"
        if path.exists():
            self._files.unlink(path)
        self._write(path, [b"?"])
        self._files.unlink(path)

    def _settle(self, step: int, partial: Path) -> None:
        if not self._is_committed(partial):
            self._remove_tree(partial)
        elif self._final(step).exists() and self.damage(partial, self.manifest(partial)):
            # The older one of the same step must not give way to a damaged newer one.
            self.remove(partial)
        else:
            self.publish(step)

    def _to_trash(self, path: Path) -> Path:
        trash = self.directory / f"step-{step_of(path)}.trash"
        if os.path.lexists(trash):
            self._remove_tree(trash)
        self._files.rename(path, trash)
        return trash

    def _check_room(self, size: int, files: int) -> None:
        room = self._files.room(self.directory)
        for needed, free, what, show in (
            (size, room.bytes, "bytes", "df -h"),
            # The directory, the state and the manifest.
            (files + 3 if files else 0, room.files, "files", "df -i"),
        ):
            if free is not None and needed > free:
                said = f"{os.strerror(errno.ENOSPC)}: {needed:,} {what} are needed, {free:,} are free"
                raise OSError(errno.ENOSPC, f"{said} ({show})", str(self.directory))

    def _reserve(self, file: BinaryIO, path: Path, size: int) -> None:
        try:
            self._files.reserve(file, size)
        except OSError as error:
            free = self._files.room(path).bytes
            known = "" if free is None else f", {free:,} are free on the disk"
            said = f"{os.strerror(error.errno or 0)}: {size:,} bytes are needed{known}"
            raise OSError(error.errno, said, str(path)) from None

    def _write(self, path: Path, blocks: Sequence[bytes | memoryview], reserved: int = 0) -> Record:
        digest = _Digest(blocks)
        try:
            with self._files.create(path) as file:
                if reserved:
                    self._reserve(file, path, reserved)
                for block in blocks:
                    self._files.write(file, block)
                self._files.sync(file)
        except OSError as error:
            # Errors of write and fsync name no file.
            error.filename = error.filename or str(path)
            raise
        finally:
            digest.join()  # else it would read what may be overwritten
        return Record(sum(map(len, blocks)), digest.sha256.hexdigest())

    def _remove_tree(self, path: Path) -> None:
        if path.is_symlink():
            self._files.unlink(path)  # what it leads to is somebody else's
            return
        # The manifest goes first: what is half removed is visibly no checkpoint.
        for child in sorted(path.iterdir(), key=lambda child: child.name != MANIFEST):
            if child.is_dir() or child.is_symlink():
                self._remove_tree(child)
            else:
                self._files.unlink(child)
        self._files.remove_directory(path)

    def _is_committed(self, path: Path) -> bool:
        # A manifest that can't be read just now may be a valid one: that raises, and is no "no".
        try:
            return read_manifest(path).step == step_of(path)
        except (FileNotFoundError, DamageError):
            return False

    def _directories(self) -> list[tuple[int, str, Path]]:
        if not self.directory.is_dir():
            return []
        matches = [(_DIRECTORY.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return [(int(match[1]), match[2] or "", path) for match, path in matches if match]

    def _partial(self, step: int) -> Path:
        return self.directory / f"step-{step}.partial"

    def _final(self, step: int) -> Path:
        return self.directory / f"step-{step}"


def is_named(path: Path) -> bool:
    """Whether a path has the name of a checkpoint, or of what a save or a removal left."""
    return _DIRECTORY.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    match = _DIRECTORY.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    return int(match[1])


def read_manifest(path: Path) -> Manifest:
    """The manifest in a directory, whatever its name; raises OSError or DamageError."""
    with open_file(path / MANIFEST) as file:
        return Manifest.parse(file.read(_LARGEST_MANIFEST))


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read. Raises OSError for what is none: a pipe would make readers wait
    for ever, and a link may lead anywhere."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, f"{os.strerror(code)}: it is no regular file", str(path))
    return open(descriptor, "rb")

"""A disk that loses, at a power failure, what was not synced.

`RecordedFiles` notes the operations of real saves. `crash_states` yields every directory tree that a
power failure may leave after any of them. Each change of a directory that no later sync of it covers
may be lost, whatever happened to changes of other names. A file that was not synced may be empty, cut
or complete. A rename that was not synced may leave both names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shoal.checkpoint import AnyPath, Files

MOST_PENDING = 8
"""The number of pending changes of which all subsets are explored: the newest ones."""


@dataclass(frozen=True)
class Change:
    """One operation: `link` and `unlink` of a name in a directory, `data` of a file, or a sync.

    A rename is both: it links the new name and unlinks the old one.
    """

    kind: str
    node: int
    name: str = ""
    child: int = -1
    old: tuple[int, str] = (-1, "")
    data: bytes = b""


class RecordedFiles(Files):
    """Does and notes each operation below `root`, which exists on the disk."""

    def __init__(self, root: Path) -> None:
        self.log: list[Change] = []
        self.folders = {0}
        self._nodes: dict[Path, int] = {root: 0}
        self._open: dict[int, int] = {}
        self._count = 0

    def _new(self, path: Path) -> int:
        self._count += 1
        self._nodes[path] = self._count
        self.log.append(Change("link", self._nodes[path.parent], path.name, self._count))
        return self._count

    def create_directory(self, path: Path) -> None:
        """See Files."""
        super().create_directory(path)
        self.folders.add(self._new(path))

    def create(self, path: AnyPath) -> BinaryIO:
        """See Files."""
        assert isinstance(path, Path)
        file = super().create(path)
        self._open[id(file)] = self._new(path)
        return file

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """See Files."""
        super().write(file, data)
        self.log.append(Change("data", self._open[id(file)], data=bytes(data)))

    def sync(self, file: BinaryIO) -> None:
        """See Files."""
        super().sync(file)
        self.log.append(Change("sync", self._open[id(file)]))

    def sync_directory(self, path: AnyPath) -> None:
        """See Files."""
        assert isinstance(path, Path)
        super().sync_directory(path)
        self.log.append(Change("sync", self._nodes[path]))

    def rename(self, source: Path, target: Path) -> None:
        """See Files."""
        super().rename(source, target)
        node = self._nodes[source]
        for path in [path for path in self._nodes if path == source or source in path.parents]:
            self._nodes[target / path.relative_to(source)] = self._nodes.pop(path)
        parents = self._nodes[source.parent], self._nodes[target.parent]
        old = (parents[0], source.name)
        self.log.append(Change("link", parents[1], target.name, node, old))

    def unlink(self, path: AnyPath) -> None:
        """See Files."""
        assert isinstance(path, Path)
        super().unlink(path)
        self._remove(path)

    def remove_directory(self, path: AnyPath) -> None:
        """See Files."""
        assert isinstance(path, Path)
        super().remove_directory(path)
        self._remove(path)

    def _remove(self, path: Path) -> None:
        del self._nodes[path]
        self.log.append(Change("unlink", self._nodes[path.parent], path.name))


Tree = tuple[tuple[str, bytes | None], ...]
"""The paths below the root with their contents; None for a directory."""


def crash_states(log: list[Change], folders: set[int]) -> Iterator[tuple[int, Tree]]:
    """Yield each tree once per number of operations done, with that number."""
    for done in range(len(log) + 1):
        seen: set[Tree] = set()
        for changes, cut in _outcomes(log[:done]):
            found = _tree(changes, cut, folders)
            tree = tuple(sorted(found or []))
            if found is not None and tree not in seen:
                seen.add(tree)
                yield done, tree


def write_tree(tree: Tree, root: Path) -> None:
    """Make the tree below an empty directory."""
    for name, data in tree:
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)


Cut = Callable[[bytes], bytes]


def _outcomes(log: list[Change]) -> Iterator[tuple[list[Change], dict[int, Cut]]]:
    synced = {change.node: number for number, change in enumerate(log) if change.kind == "sync"}
    names = [n for n, change in enumerate(log) if change.kind in ("link", "unlink")]
    pending = [n for n in names if n > synced.get(log[n].node, -1)][-MOST_PENDING:]
    files = sorted(
        {c.node for n, c in enumerate(log) if c.kind == "data" and n > synced.get(c.node, -1)}
    )
    cuts: list[Cut] = [lambda data: data, lambda data: data[: len(data) // 2], lambda data: b""]
    fates = [("done", "lost", "torn") if log[n].old[0] >= 0 else ("done", "lost") for n in pending]
    for fate in itertools.product(*fates):
        by_number = dict(zip(pending, fate, strict=True))
        kept: list[Change] = []
        for number, change in enumerate(log):
            how = by_number.get(number, "done")
            if how == "torn":
                kept.append(Change("link", change.node, change.name, change.child))
            elif how == "done":
                kept.append(change)
        for choice in itertools.product(cuts, repeat=len(files)):
            yield kept, dict(zip(files, choice, strict=True))


def _tree(
    changes: list[Change], cut: dict[int, Cut], folders: set[int]
) -> list[tuple[str, bytes | None]] | None:
    """Return the files after some changes; None if one of them needs a change that was lost.

    Changes of the same name reach the disk in their order.
    """
    names: dict[int, dict[str, int]] = {node: {} for node in folders}
    data: dict[int, bytes] = {}
    for change in changes:
        if change.kind == "link":
            if change.name in names[change.node]:
                return None
            names[change.node][change.name] = change.child
            if change.old[0] >= 0 and names[change.old[0]].pop(change.old[1], None) is None:
                return None
        elif change.kind == "unlink":
            if names[change.node].pop(change.name, None) is None:
                return None
        elif change.kind == "data":
            data[change.node] = data.get(change.node, b"") + change.data
    found: list[tuple[str, bytes | None]] = []

    def walk(node: int, path: str) -> None:
        for name, child in names[node].items():
            if child in folders:
                found.append((f"{path}{name}", None))
                walk(child, f"{path}{name}/")
            else:
                content = data.get(child, b"")
                found.append((f"{path}{name}", cut[child](content) if child in cut else content))

    walk(0, "")
    return found

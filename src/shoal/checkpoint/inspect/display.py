"""The output of `shoal checkpoint`, readable at any width and without markup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from shoal.checkpoint.inspect.listing import CheckpointEntry, Leftover, moment
from shoal.checkpoint.inspect.manifest import CheckpointManifest, Reference, leaves
from shoal.checkpoint.paths import AnyPath
from shoal.checkpoint.tensor_index import TensorEntry
from shoal.util.clock import CLOCK, local_time
from shoal.util.tables import (
    add_row,
    make_table,
    print_line,
    print_pairs,
    print_path,
    print_table,
)
from shoal.util.units import age, size

if TYPE_CHECKING:
    from shoal.checkpoint.inspect.diff import Comparison
    from shoal.checkpoint.inspect.extract import ExtractedModel
    from shoal.checkpoint.inspect.locate import Examined

_USUAL, _WIDE = 80, 100
_LONGEST = 200


def listing(
    console: Console,
    folder: AnyPath,
    found: Sequence[CheckpointEntry],
    left: Sequence[Leftover],
    *,
    verified: bool,
) -> None:
    """Print the checkpoints in one directory, their problems, and the leftovers of saves."""
    columns = _columns(found, width=console.width, verified=verified)
    table = make_table(*columns, right=("position", "epoch", "ranks", "files", "size"))
    for entry in found:
        add_row(table, *(cell(entry) for cell in columns.values()))
    if found:
        print_table(console, str(folder), table)
    else:
        print_path(console, f"{folder}: no checkpoint")
    wrong = [f"{entry.path.name} {each}" for entry in found for each in entry.problems]
    print_line(console, *wrong, *(f"{one.path.name}, {size(one.bytes)}: {one.what}" for one in left))
    if wrong or left:
        console.print()


def _columns(found: Sequence[CheckpointEntry], *, width: int, verified: bool) -> dict[str, Any]:
    """Return a function for each column that returns its text; narrow screens get fewer columns."""
    now, wide = CLOCK.wall(), width >= _WIDE
    said = {name for entry in found for name in entry.info} if width >= _USUAL else set()
    good = "verified" if verified else "complete"
    columns: dict[str, tuple[bool, Any]] = {
        "checkpoint": (True, lambda entry: entry.path.name),
        "position": (True, lambda entry: _number(entry.info.get("position"))),
        "epoch": ("epoch" in said, lambda entry: _number(entry.info.get("epoch"))),
        "saved": (wide, lambda entry: _when(entry.saved)),
        "age": (True, lambda entry: "" if entry.saved is None else age(now - entry.saved)),
        "ranks": (True, lambda entry: _number(entry.ranks)),
        "layout": ("layout" in said, lambda entry: str(entry.info.get("layout", ""))),
        "files": (wide, lambda entry: _number(entry.files)),
        "size": (True, lambda entry: size(entry.bytes)),
        "state": (True, lambda entry: "damaged" if entry.problems else good),
    }
    return {name: cell for name, (shown, cell) in columns.items() if shown}


def contents(console: Console, found: CheckpointManifest) -> None:
    """Print one checkpoint: its origin and its contents."""
    saved = moment(found.path, found.info)
    records = found.manifest.files
    rest = {name: value for name, value in found.info.items() if name != "time"}
    said = [(_joined(at), _value(value)) for at, value in leaves(rest) if at and value != {}]
    print_pairs(
        console,
        str(found.path),
        [
            ("step", f"{found.manifest.step:,}"),
            ("saved", "" if saved is None else f"{_when(saved)}, {age(CLOCK.wall() - saved)} ago"),
            ("ranks", f"{found.manifest.world_size:,}"),
            ("files", f"{len(records):,}, {size(found.bytes)}"),
            *said,
        ],
    )
    state = found.state if isinstance(found.state, dict) else {"state": found.state}
    for name, step in _parts(state, "steps"):
        for part, tree in _parts(step, None):
            if part == "optimizer" and isinstance(tree, dict):
                _optimizer(console, f"{name}: optimizer", tree, found.tensors)
            else:
                _tree(console, f"{name}: {part}", tree, found.tensors)
        _tree(console, f"{name}: more", _flat(step), found.tensors)
    for name, item in _parts(state, "state"):
        _tree(console, f"state: {name}", item, found.tensors)
    rest = {name: item for name, item in state.items() if name not in ("steps", "state")}
    _tree(console, "more", rest, found.tensors)
    _ranks(console, found)


def _parts(tree: Any, key: str | None) -> Iterator[tuple[str, Any]]:
    inside = tree if key is None else tree.get(key)
    for name, item in inside.items() if isinstance(inside, dict) else ():
        if key is not None or isinstance(item, dict):
            yield str(name), item


def _flat(tree: Any) -> dict[Any, Any]:
    items = tree.items() if isinstance(tree, dict) else ()
    return {name: item for name, item in items if not isinstance(item, dict)}


def _tree(console: Console, title: str, tree: Any, tensors: Mapping[str, TensorEntry]) -> None:
    """Print tensors as a table, and all other values below it."""
    found = list(leaves(tree))
    named = [(_joined(at), tensors[item.name]) for at, item in found if isinstance(item, Reference)]
    plain = [(_joined(at), _value(item)) for at, item in found if not isinstance(item, Reference)]
    if named:
        total = sum(row.bytes for _, row in named)
        _tensors(console, f"{title}, {_many(len(named), 'tensor')}, {size(total)}", named)
    if any(at for at, _ in plain):
        print_pairs(console, title, plain)


def _tensors(console: Console, title: str, named: Iterable[tuple[str, TensorEntry]]) -> None:
    named = list(named)
    divided = any(len(row.chunks) > 1 for _, row in named)
    headers = ("tensor", "dtype", "shape", "size", *(["pieces"] if divided else []))
    table = make_table(*headers, right=("size", "pieces"))
    for name, row in named:
        cells = (name, row.dtype, _shape(row), size(row.bytes), str(len(row.chunks)))
        add_row(table, *cells[: len(headers)])
    print_table(console, title, table)


def _optimizer(
    console: Console, title: str, tree: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> None:
    """Print the kinds of an optimizer's tensors with their sums, and its parameter groups."""
    kinds: dict[tuple[str, str], list[TensorEntry]] = {}
    for _, item in _parts(tree, "state"):
        for at, leaf in leaves(item):
            if isinstance(leaf, Reference):
                row = tensors[leaf.name]
                kinds.setdefault((_joined(at), row.dtype), []).append(row)
    table = make_table("kind", "tensors", "dtype", "size", right=("tensors", "size"))
    for (kind, dtype), rows in kinds.items():
        add_row(table, kind, f"{len(rows):,}", dtype, size(sum(row.bytes for row in rows)))
    if kinds:
        print_table(console, f"{title}, {tree.get('type', '')}", table)
    groups = tree.get("groups")
    for number, group in enumerate(groups if isinstance(groups, list) else []):
        pairs = [(_joined(at), _value(value)) for at, value in leaves(group) if at]
        print_pairs(console, f"{title}, group {number}", pairs)


def _ranks(console: Console, found: CheckpointManifest) -> None:
    names: dict[str, None] = {}
    total = 0
    for at, item in (leaf for rank in found.rank_state for leaf in leaves(rank)):
        names.update(dict.fromkeys(at[:1]))
        total += found.tensors[item.name].bytes if isinstance(item, Reference) else 0
    if names:
        whose = _many(len(found.rank_state), "rank")
        print_line(console, f"State of each of {whose}: {', '.join(names)}; {size(total)}")


def verdict(console: Console, found: Examined) -> None:
    """Print whether a checkpoint is complete, and if not, each damaged file."""
    for each in found.problems:
        print_path(console, f"{found.path}: damaged: {each}")
    if found.manifest is not None and not found.problems:
        print_path(console, f"{found.path}: complete (step {found.manifest.step:,})")


def differences(console: Console, first: AnyPath, second: AnyPath, found: Comparison) -> None:
    """Print the differences between two checkpoints."""
    for path, names in ((first, found.only_first), (second, found.only_second)):
        if names:
            print_path(console, f"Only in {path}:")
            print_line(console, *(f"  {_inner(name)}" for name in names), "")
    if found.reformed:
        table = make_table("tensor", "first", "second")
        for name, one, other in found.reformed:
            add_row(table, _inner(name), f"{one.dtype} {_shape(one)}", f"{other.dtype} {_shape(other)}")
        print_table(console, "Tensors of another dtype or shape", table)
    if found.changed:
        right = ("elements", "largest", "relative")
        table = make_table("tensor", "elements", "largest", "relative", right=right)
        for each in found.changed:
            counts = f"{each.elements:,} of {each.of:,}"
            add_row(table, _inner(each.name), counts, f"{each.absolute:.3g}", f"{each.relative:.3g}")
        print_table(console, "Tensors with other values, and the largest differences", table)
    for title, rows in (("Other plain values", found.plain), ("Other info of the save", found.info)):
        if rows:
            table = make_table("value", "first", "second")
            for where, *values in rows:
                add_row(table, _inner(where), *map(_shorter, values))
            print_table(console, title, table)
    apart = len(found.only_first) + len(found.only_second) + len(found.reformed) + len(found.changed)
    print_line(
        console,
        f"The same state: {found.tensors:,} tensors, all equal."
        if found.same
        else f"{apart:,} of {found.tensors:,} tensors and {len(found.plain):,} plain values differ.",
    )


def extracted(console: Console, source: AnyPath, found: ExtractedModel) -> None:
    """Print the file that was written, and its checkpoint."""
    averaged = "" if found.ema is None else f", averaged by {found.ema}"
    what = (
        f"{found.path}: {_many(found.tensors, 'tensor')}, {size(found.bytes)}, of the Step {found.step}"
    )
    print_path(console, f"{what}{averaged}, from {source}")
    if found.left:
        print_line(console, f"Not written, because they are not tensors: {', '.join(found.left)}")


def _inner(name: str) -> str:
    """Return a name without the prefix of nearly all names."""
    return name.removeprefix("state/")


def _joined(at: Sequence[str]) -> str:
    return "/".join(at)


def _value(value: Any) -> str:
    return _shorter(value if isinstance(value, str) else repr(value))


def _shorter(text: str | None) -> str:
    if text is None:
        return "(none)"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else ""


def _when(moment: float | None) -> str:
    return "" if moment is None else local_time(moment)


def _shape(row: TensorEntry) -> str:
    return " x ".join(map(str, row.shape)) or "scalar"

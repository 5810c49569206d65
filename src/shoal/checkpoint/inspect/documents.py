"""The results of `shoal checkpoint` as documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.inspect.listing import files_and_bytes, info_of, moment
from shoal.checkpoint.inspect.manifest import CheckpointManifest, Reference, leaves
from shoal.checkpoint.paths import AnyPath
from shoal.checkpoint.tensor_index import TensorEntry
from shoal.util.clock import CLOCK, local_time
from shoal.util.document import Document, DocumentBlock, KeyNumbers, Section, Table, Text
from shoal.util.units import age, counted, size

if TYPE_CHECKING:
    from shoal.checkpoint.importing.first_checkpoint import ImportedCheckpoint
    from shoal.checkpoint.inspect.dcp_export import DCPExport
    from shoal.checkpoint.inspect.diff import Comparison
    from shoal.checkpoint.inspect.extract import ExtractedModel
    from shoal.checkpoint.inspect.locate import Examined

_LONGEST = 200


def listing_document(
    folder: AnyPath, found: Sequence[Examined], left: Sequence[str], *, verified: bool
) -> Document:
    """Return the checkpoints in one directory, their problems, and the leftovers of saves."""
    table = Table(
        caption=str(folder),
        head=(
            *("checkpoint", "position", "epoch", "saved", "age"),
            *("ranks", "layout", "files", "size", "state"),
        ),
        rows=[_row(each, verified=verified) for each in found],
        right=("position", "epoch", "ranks", "files", "size"),
        wide=("layout", "epoch", "saved", "files"),
    )
    nothing = [] if found else [Text(text=f"{folder}: no checkpoint", whole=True)]
    wrong = [f"{each.path.name} {problem}" for each in found for problem in each.problems]
    return _document("ls", folder, table, *nothing, *(Text(text=line) for line in (*wrong, *left)))


def _row(found: Examined, *, verified: bool) -> tuple[str, ...]:
    said, info = found.manifest, info_of(found.manifest)
    saved = None if said is None else moment(found.path, info)
    files, length = files_and_bytes(found)
    return (
        found.path.name,
        _number(info.get("position")),
        _number(info.get("epoch")),
        _when(saved),
        "" if saved is None else age(CLOCK.wall() - saved),
        "" if said is None else f"{said.world_size:,}",
        str(info.get("layout", "")),
        f"{files:,}",
        size(length),
        "damaged" if found.problems else "verified" if verified else "complete",
    )


def contents_document(found: CheckpointManifest) -> Document:
    """Return the origin and the contents of one checkpoint."""
    saved = moment(found.path, found.info)
    rest = {name: value for name, value in found.info.items() if name != "time"}
    origin = [
        ("step", f"{found.manifest.step:,}"),
        ("saved", "" if saved is None else f"{_when(saved)}, {age(CLOCK.wall() - saved)} ago"),
        ("ranks", f"{found.manifest.world_size:,}"),
        ("files", f"{len(found.manifest.files):,}, {size(found.bytes)}"),
        *_pairs((at, value) for at, value in leaves(rest) if value != {}),
    ]
    blocks: list[DocumentBlock] = [KeyNumbers(caption=str(found.path), pairs=origin)]
    state = found.state if isinstance(found.state, dict) else {"state": found.state}
    for name, step in _items(state.get("steps")):
        for part, tree in _items(step):
            if part == "optimizer" and isinstance(tree, dict):
                blocks += _optimizer(f"{name}: optimizer", tree, found.tensors)
            elif isinstance(tree, dict):
                blocks += _tree(f"{name}: {part}", tree, found.tensors)
        plain = {part: item for part, item in _items(step) if not isinstance(item, dict)}
        blocks += _tree(f"{name}: more", plain, found.tensors)
    for name, item in _items(state.get("state")):
        blocks += _tree(f"state: {name}", item, found.tensors)
    rest = {name: item for name, item in state.items() if name not in ("steps", "state")}
    blocks += [*_tree("more", rest, found.tensors), *_ranks(found)]
    return _document("show", found.path, *blocks)


def _items(tree: Any) -> Iterator[tuple[str, Any]]:
    for name, item in tree.items() if isinstance(tree, dict) else ():
        yield str(name), item


def _tree(title: str, tree: Any, tensors: Mapping[str, TensorEntry]) -> Iterator[DocumentBlock]:
    """Yield tensors as a table, and all other values below it."""
    found = list(leaves(tree))
    named = [(_joined(at), tensors[item.name]) for at, item in found if isinstance(item, Reference)]
    if named:
        total = sum(row.bytes for _, row in named)
        divided = any(len(row.chunks) > 1 for _, row in named)
        yield Table(
            caption=f"{title}, {counted(len(named), 'tensor')}, {size(total)}",
            head=("tensor", "dtype", "shape", "size", "pieces"),
            rows=[
                (name, row.dtype, _shape(row), size(row.bytes), f"{len(row.chunks)}" if divided else "")
                for name, row in named
            ],
            right=("size", "pieces"),
        )
    plain = _pairs((at, item) for at, item in found if not isinstance(item, Reference))
    if plain:
        yield KeyNumbers(caption=title, pairs=plain)


def _optimizer(
    title: str, tree: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> Iterator[DocumentBlock]:
    """Yield the kinds of an optimizer's tensors with their sums, and its parameter groups."""
    kinds: dict[tuple[str, str], list[TensorEntry]] = {}
    for _, item in _items(tree.get("state")):
        for at, leaf in leaves(item):
            if isinstance(leaf, Reference):
                row = tensors[leaf.name]
                kinds.setdefault((_joined(at), row.dtype), []).append(row)
    yield Table(
        caption=f"{title}, {tree.get('type', '')}",
        head=("kind", "tensors", "dtype", "size"),
        rows=[
            (kind, f"{len(rows):,}", dtype, size(sum(row.bytes for row in rows)))
            for (kind, dtype), rows in kinds.items()
        ],
        right=("tensors", "size"),
    )
    groups = tree.get("groups")
    for number, group in enumerate(groups if isinstance(groups, list) else []):
        yield KeyNumbers(caption=f"{title}, group {number}", pairs=_pairs(leaves(group)))


def _ranks(found: CheckpointManifest) -> list[Text]:
    names: dict[str, None] = {}
    total = 0
    for at, item in (leaf for rank in found.rank_state for leaf in leaves(rank)):
        names.update(dict.fromkeys(at[:1]))
        total += found.tensors[item.name].bytes if isinstance(item, Reference) else 0
    whose = counted(len(found.rank_state), "rank")
    text = f"State of each of {whose}: {', '.join(names)}; {size(total)}"
    return [Text(text=text)] if names else []


def verdict_document(found: Examined) -> Document:
    """Return whether a checkpoint is complete, and if not, each damaged file."""
    said = [f"damaged: {each}" for each in found.problems]
    if found.manifest is not None and not said:
        said = [f"complete (step {found.manifest.step:,})"]
    lines = [Text(text=f"{found.path}: {each}", whole=True) for each in said]
    return _document("verify", found.path, *lines)


def difference_document(first: AnyPath, second: AnyPath, found: Comparison) -> Document:
    """Return the differences between two checkpoints."""
    blocks: list[DocumentBlock] = [
        Table(caption=f"Only in {path}", head=("tensor",), rows=[(_inner(name),) for name in names])
        for path, names in ((first, found.only_first), (second, found.only_second))
    ]
    forms = [
        (_inner(name), *(f"{each.dtype} {_shape(each)}" for each in both))
        for name, *both in found.reformed
    ]
    blocks.append(
        Table(
            caption="Tensors of another dtype or shape", head=("tensor", "first", "second"), rows=forms
        )
    )
    changes = [
        (
            _inner(each.name),
            f"{each.elements:,} of {each.of:,}",
            f"{each.absolute:.3g}",
            f"{each.relative:.3g}",
        )
        for each in found.changed
    ]
    numbers = ("elements", "largest", "relative")
    blocks.append(
        Table(
            caption="Tensors with other values, and the largest differences",
            head=("tensor", *numbers),
            rows=changes,
            right=numbers,
        )
    )
    for title, rows in (("Other plain values", found.plain), ("Other info of the save", found.info)):
        cells = [(_inner(where), *map(_shorter, values)) for where, *values in rows]
        blocks.append(Table(caption=title, head=("value", "first", "second"), rows=cells))
    apart = len(found.only_first) + len(found.only_second) + len(found.reformed) + len(found.changed)
    end = (
        f"The same state: {found.tensors:,} tensors, all equal."
        if found.same
        else f"{apart:,} of {found.tensors:,} tensors and {len(found.plain):,} plain values differ."
    )
    return _document("diff", f"{first} {second}", *blocks, Text(text=end))


def extracted_document(source: AnyPath, found: ExtractedModel) -> Document:
    """Return the file that was written, and its checkpoint."""
    averaged = "" if found.ema is None else f", averaged by {found.ema}"
    what = f"{found.path}: {counted(found.tensors, 'tensor')}, {size(found.bytes)}"
    lines = [Text(text=f"{what}, of the Step {found.step}{averaged}, from {source}", whole=True)]
    if found.left:
        lines.append(Text(text=f"Not written, because they are not tensors: {', '.join(found.left)}"))
    return _document("export", source, *lines)


def dcp_document(source: AnyPath, found: DCPExport) -> Document:
    """Return the directory of DCP that was written, and what it lacks."""
    what = f"{found.path}: {counted(found.tensors, 'tensor')}, {size(found.bytes)}"
    lines = (
        f"{what}, of the Step {found.step}, from {source}; entries: {', '.join(found.entries)}",
        f"Not written: {', '.join(found.left)}",
        "DCP has no checksums, no mark of a complete save and no protection from an earlier attempt; "
        "its readers unpickle. Keep the checkpoint of Shoal to resume from.",
    )
    return _document("export", source, *(Text(text=line, whole=True) for line in lines))


def imported_document(source: object, found: ImportedCheckpoint) -> Document:
    """Return the checkpoint that was written from another tool's, and what it lacks."""
    what = f"{found.path}: {counted(found.tensors, 'tensor')}, {size(found.bytes)}"
    optimizer = f"optimizer state of {found.optimizer}" if found.optimizer else "no optimizer state"
    carried = ", ".join((f"step {found.step:,}", optimizer, *found.carried))
    lines = [Text(text=f"{what}, from {found.tool} ({carried})", whole=True)]
    lines += [Text(text=f"Not carried over: {each}", whole=True) for each in found.left]
    return _document("import", source, *lines)


def _document(command: str, path: object, *blocks: DocumentBlock) -> Document:
    return Document(title=f"shoal checkpoint {command} {path}", sections=[Section(blocks=blocks)])


def _inner(name: str) -> str:
    """Return a name without the prefix of nearly all names."""
    return name.removeprefix("state/")


def _joined(at: Sequence[str]) -> str:
    return "/".join(at)


def _pairs(found: Iterable[tuple[Sequence[str], Any]]) -> list[tuple[str, str]]:
    """Return named values as strings."""
    return [
        (_joined(at), _shorter(value if isinstance(value, str) else repr(value)))
        for at, value in found
        if at
    ]


def _shorter(text: str | None) -> str:
    if text is None:
        return "(none)"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else ""


def _when(moment: float | None) -> str:
    return "" if moment is None else local_time(moment)


def _shape(row: TensorEntry) -> str:
    return " x ".join(map(str, row.shape)) or "scalar"

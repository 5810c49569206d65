"""The table of layers in docs/architecture.md, and what breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "shoal"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Where a unit stands: its row, its place in the table, and whether it is yet to come."""

    row: int
    place: int
    planned: bool


def table(document: str) -> dict[str, Layer]:
    """Read the rows `| 1 | `world` | what it holds |` of a document."""
    rows = re.findall(r"^\| *(\d+) *\| *`(\w+)` *\|(.*)$", document, re.MULTILINE)
    return {
        unit: Layer(row=int(row), place=place, planned="planned" in words)
        for place, (row, unit, words) in enumerate(rows)
    }


def units(package: Path) -> set[str]:
    """The top-level modules and packages, but for the public API and `python -m`."""
    found = {path.stem for path in package.glob("*.py")}
    found |= {path.parent.name for path in package.glob("*/__init__.py")}
    return found - {"__init__", "__main__"}


def violations(package: Path, layers: Mapping[str, Layer]) -> Iterator[str]:
    """Units that the table does not know, and imports that do not go down."""
    known = units(package)
    for unit in sorted(known):
        if unit not in layers:
            yield f"{unit}: not in the table of layers"
        elif layers[unit].planned:
            yield f"{unit}: exists, but the table calls it planned"
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        unit = inside.parts[0].removesuffix(".py")
        if unit not in layers:
            continue
        for line, target in imported_units(path, package):
            if target != unit and not _below(layers, target, unit):
                yield f"{inside}:{line}: {unit} imports {target}"


def _below(layers: Mapping[str, Layer], lower: str, upper: str) -> bool:
    if lower not in layers:
        return False
    if layers[lower].row == layers[upper].row == 0:
        return layers[lower].place < layers[upper].place
    return layers[lower].row < layers[upper].row


def imported_units(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """The units that a file imports at run time, functions included, with their lines.

    An import of the package itself, or of a public name from it, gives the package's name.
    """
    names = units(package)
    where = (PACKAGE, *path.relative_to(package).parts[:-1])
    for node in _runtime_nodes(ast.parse(path.read_text())):
        for module in _modules(node, where):
            parts = module.split(".")
            if parts[0] == PACKAGE and isinstance(node, ast.stmt | ast.expr):
                inner = parts[1] if len(parts) > 1 else ""
                yield node.lineno, inner if inner in names else PACKAGE


def _modules(node: ast.AST, where: tuple[str, ...]) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            base = where[: len(where) - level + 1] if level else ()
            source = ".".join([*base, *([module] if module else [])])
            return [f"{source}.{name.name}" for name in names] if source == PACKAGE else [source]
        case ast.Call(
            func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            return [module]
    return []


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but the bodies of `if TYPE_CHECKING:`, which import types only."""
    yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
        children = list(node.orelse)
    for child in children:
        yield from _runtime_nodes(child)

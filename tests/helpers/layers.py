"""The table of layers in docs/contributing/architecture.md, and the imports that break it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from helpers.rules import nodes_of

PACKAGE = "shoal"
ROOT = {"__init__.py", "__main__.py"}
"""The modules directly below the package: the public names, and `python -m`."""


def table(document: str) -> list[str]:
    """Return the packages that a document lists as `| `util` | what it is for |`, lowest first."""
    return re.findall(r"^\| *`(\w+)` *\|", document, re.MULTILINE)


def violations(package: Path, layers: Sequence[str]) -> Iterator[str]:
    """Yield what lies beside the packages of the table, and imports that do not go down.

    Imports of types only count, and so do imports within functions.
    """
    found = {path.parent.name for path in package.glob("*/__init__.py")}
    yield from (f"{name}: not in the table of layers" for name in sorted(found - {*layers}))
    yield from (f"{name}: in the table of layers, but absent" for name in layers if name not in found)
    loose = {path.name for path in package.glob("*.py")} - ROOT
    yield from (f"{name}: a module outside the packages" for name in sorted(loose))
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if len(inside.parts) == 1 or inside.parts[0] not in layers:
            continue
        own = inside.parts[0]
        for line, target in imported(path, package):
            if target != own and target not in layers[: layers.index(own)]:
                yield f"{inside}:{line}: {own} imports {target}"


def imported(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield the packages that a file imports, with their lines; "shoal" for a public name."""
    where = (PACKAGE, *path.relative_to(package).parts[:-1])
    for node in nodes_of(path.read_text()):
        for module in _modules(node, where):
            parts = module.split(".")
            if parts[0] == PACKAGE and isinstance(node, ast.stmt | ast.expr):
                inner = parts[1] if len(parts) > 1 else ""
                yield (
                    node.lineno,
                    inner if (package / inner / "__init__.py").is_file() and inner else PACKAGE,
                )


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

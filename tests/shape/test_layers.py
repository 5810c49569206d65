"""The table of layers in docs/contributing/architecture.md, and the imports that break it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from helpers.rules import nodes_of

PACKAGE = "shoal"
ROOT = {"__init__.py", "__main__.py"}
"""The modules directly below the package: the public names, and `python -m`."""
SHELF = "tools"
"""A package whose packages are layers of their own, such as `tools.plan`."""
WHOLE = {PACKAGE, f"{PACKAGE}.{SHELF}"}


def layers_of(document: str) -> list[str]:
    """Return the packages that a document lists as `| `util` | what it is for |`, lowest first."""
    return re.findall(r"^\| *`((?:tools\.)?\w+)` *\|", document, re.MULTILINE)


def layer_of(parts: Sequence[str]) -> str:
    """Return the layer of a module with these parts of a name or of a path below the package."""
    return ".".join(parts[: 2 if parts[0] == SHELF else 1])


def violations(package: Path, layers: Sequence[str]) -> Iterator[str]:
    """Yield what lies beside the packages of the table, and imports that do not go down.

    Imports of types only count, and so do imports within functions.
    """
    inits = (*package.glob("*/__init__.py"), *package.glob(f"{SHELF}/*/__init__.py"))
    found = {layer_of(init.relative_to(package).parts[:-1]) for init in inits} - {SHELF}
    yield from (f"{name}: not in the table of layers" for name in sorted(found - {*layers}))
    yield from (f"{name}: in the table of layers, but absent" for name in layers if name not in found)
    loose = {path.name for path in package.glob("*.py")} - ROOT
    yield from (f"{name}: a module outside the packages" for name in sorted(loose))
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        own = layer_of(inside.parts)
        if len(inside.parts) == 1 or own not in layers:
            continue
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
                layer = layer_of(parts[1:]) if len(parts) > 1 else ""
                inside = layer and (package / layer.replace(".", "/") / "__init__.py").is_file()
                yield node.lineno, layer if inside else PACKAGE


def _modules(node: ast.AST, where: tuple[str, ...]) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            base = where[: len(where) - level + 1] if level else ()
            source = ".".join([*base, *([module] if module else [])])
            return [f"{source}.{name.name}" for name in names] if source in WHOLE else [source]
        case ast.Call(
            func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            return [module]
    return []


TABLE = """
| package | what it is for |
|---|---|
| `util` | errors |
| `distributed` | processes |
| `data` | batches |
"""


def test_the_code_keeps_to_the_table(repository: Path) -> None:
    layers = layers_of((repository / "docs/contributing/architecture.md").read_text())
    assert list(violations(repository / "src/shoal", layers)) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("util", "distributed", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "__init__.py").write_text("from shoal.data import loader\n")
    return tmp_path


def check(package: Path) -> list[str]:
    return list(violations(package, layers_of(TABLE)))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("distributed/world.py", "from shoal.util.errors import ShoalError"),
        ("data/loader.py", "from shoal import util, distributed\nfrom ..distributed import world"),
        ("data/loader.py", "from . import order\nfrom shoal.data import order"),
        ("distributed/world.py", "import torch.distributed\nfrom shoalish import data"),
    ],
)
def test_imports_that_go_down_are_allowed(package: Path, file: str, text: str) -> None:
    (package / file).write_text(text)
    assert check(package) == []


@pytest.mark.parametrize(
    "text",
    [
        "from shoal.data.order import Order",
        "import shoal.data.order",
        "from ..data import order",
        "from shoal import data",
        "from .. import data",
        "def f(): import shoal.data",
        "import_module('shoal.data')",
        "if TYPE_CHECKING: from shoal.data import Batch",
    ],
)
def test_imports_that_go_up_are_named(package: Path, text: str) -> None:
    (package / "distributed/world.py").write_text(text)
    assert check(package) == ["distributed/world.py:1: distributed imports data"]


def test_tools_are_layers(package: Path) -> None:
    for name in ("report", "plan"):
        (package / "tools" / name).mkdir(parents=True)
        (package / "tools" / name / "__init__.py").write_text("from shoal.data import order")
    (package / "tools/__init__.py").write_text("")
    table = layers_of(f"{TABLE}| `tools.report` | runs |\n| `tools.plan` | predictions |\n")
    (package / "tools/plan/page.py").write_text("from shoal.tools import report")
    assert list(violations(package, table)) == []
    (package / "tools/report/page.py").write_text("from shoal.tools.plan import page")
    (package / "data/loader.py").write_text("from shoal.tools import plan")
    assert list(violations(package, table)) == [
        "data/loader.py:1: data imports tools.plan",
        "tools/report/page.py:1: tools.report imports tools.plan",
    ]


@pytest.mark.parametrize("text", ["from shoal import Step", "import shoal"])
def test_no_package_imports_the_public_names(package: Path, text: str) -> None:
    (package / "data/loader.py").write_text(text)
    assert check(package) == ["data/loader.py:1: data imports shoal"]


def test_what_the_table_lacks_is_named(package: Path) -> None:
    (package / "extra").mkdir()
    (package / "extra/__init__.py").write_text("")
    (package / "loose.py").write_text("")
    faults = ["extra: not in the table of layers", "loose.py: a module outside the packages"]
    assert check(package) == faults
    (package / "util/__init__.py").unlink()
    assert "util: in the table of layers, but absent" in check(package)

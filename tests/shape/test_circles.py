"""No two modules import each other, also not within functions or for types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from helpers.rules import nodes_of, python_files


def modules_of(package: Path) -> dict[str, Path]:
    """The modules of a package by their names; a folder's `__init__` by the name of the folder."""
    return {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in python_files(package)
    }


def imports_of(code: str, modules: dict[str, Path]) -> Iterator[str]:
    for node in nodes_of(code):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name in modules)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                inner = [f"{module}.{name.name}" for name in names]
                yield from (each if each in modules else module for each in inner)


def circle(package: Path) -> list[str]:
    """The modules of a circle; empty without one. The public names, in `__init__`, are left out."""
    modules = modules_of(package)
    graph = {
        name: {*imports_of(path.read_text(), modules)} & {*modules} - {name, package.name}
        for name, path in modules.items()
        if name != package.name
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_of_the_library_import_each_other(repository: Path) -> None:
    assert circle(repository / "src/shoal") == []


@pytest.mark.parametrize(
    "text",
    [
        "import shoal.data.order",
        "from shoal.data import order",
        "def f():\n    from shoal.data.order import Order",
        "if TYPE_CHECKING:\n    from shoal.data.order import Order",
    ],
)
def test_modules_that_import_each_other_are_named(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "shoal/data"
    folder.mkdir(parents=True)
    (folder / "order.py").write_text("from shoal.data.loader import Loader")
    (folder / "loader.py").write_text(text)
    assert {*circle(tmp_path / "shoal")} == {"shoal.data.order", "shoal.data.loader"}
    (folder / "order.py").write_text("from shoal import Loader")
    assert circle(tmp_path / "shoal") == []

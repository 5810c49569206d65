"""No two modules or folders import each other, also not within functions or for types."""

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


def graph_of(package: Path) -> dict[str, set[str]]:
    """The imports of each module. The public names, in `__init__` of the package, are left out."""
    modules = modules_of(package)
    return {
        name: {*imports_of(path.read_text(), modules)} & {*modules} - {name, package.name}
        for name, path in modules.items()
        if name != package.name
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of a circle; empty without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def inside(graph: dict[str, set[str]], folder: str) -> dict[str, set[str]]:
    """The imports between the modules and folders in a folder, whose modules count as one."""

    def child(name: str) -> str:
        return name.removeprefix(f"{folder}.").partition(".")[0]

    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        if name.startswith(f"{folder}."):
            within = {child(other) for other in others if other.startswith(f"{folder}.")}
            found.setdefault(child(name), set()).update(within - {child(name)})
    return found


def test_no_modules_of_the_library_import_each_other(repository: Path) -> None:
    assert circle(graph_of(repository / "src/shoal")) == []


def test_no_folders_of_the_library_import_each_other(repository: Path) -> None:
    graph = graph_of(repository / "src/shoal")
    folders = {name.rpartition(".")[0] for name in graph}
    assert len(folders) > 20
    assert {folder: found for folder in folders if (found := circle(inside(graph, folder)))} == {}


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
    assert {*circle(graph_of(tmp_path / "shoal"))} == {"shoal.data.order", "shoal.data.loader"}
    (folder / "order.py").write_text("from shoal import Loader")
    assert circle(graph_of(tmp_path / "shoal")) == []


def test_folders_that_import_each_other_are_named() -> None:
    graph = {"shoal.a.x": {"shoal.b.x"}, "shoal.b.x": {"shoal.c"}, "shoal.b.y": {"shoal.a.y"}}
    assert circle(graph) == []
    assert {*circle(inside(graph, "shoal"))} == {"a", "b"}

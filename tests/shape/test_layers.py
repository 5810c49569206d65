from __future__ import annotations

from pathlib import Path

import pytest

from shape import layers

TABLE = """
| row | unit | what it holds |
|---|---|---|
| 0 | `errors` | one hierarchy |
| 0 | `layout` | arithmetic |
| 1 | `world` | processes |
| 1 | `report` | planned: pages |
| 2 | `data` | batches |
"""


def test_the_code_keeps_to_the_table(repository: Path) -> None:
    table = layers.table((repository / "docs/architecture.md").read_text())
    assert list(layers.violations(repository / "src/shoal", table)) == []


def test_the_table_is_in_the_order_of_its_rows(repository: Path) -> None:
    table = layers.table((repository / "docs/architecture.md").read_text())
    rows = [layer.row for layer in table.values()]
    assert rows == sorted(rows)
    assert "errors" in table


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for unit in ("errors", "layout", "world"):
        (tmp_path / f"{unit}.py").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("")
    (tmp_path / "data" / "order.py").write_text("")
    (tmp_path / "__init__.py").write_text("from shoal.data import order\n")
    return tmp_path


def check(package: Path) -> list[str]:
    return list(layers.violations(package, layers.table(TABLE)))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("layout.py", "from shoal.errors import ShoalError"),
        ("data/order.py", "from shoal import errors, layout\nfrom ..world import World"),
        ("data/order.py", "from . import loader\nfrom shoal.data import loader"),
        ("world.py", "import torch.distributed\nfrom shoalish import data"),
        ("world.py", "if TYPE_CHECKING:\n    from shoal.data import Batch"),
        ("world.py", "if typing.TYPE_CHECKING:\n    from .data import Batch"),
    ],
)
def test_imports_that_go_down_are_allowed(package: Path, file: str, text: str) -> None:
    (package / file).write_text(text)
    assert check(package) == []


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("world.py", "from shoal.data.order import Order", "world.py:1: world imports data"),
        ("world.py", "import shoal.data.order", "world.py:1: world imports data"),
        ("world.py", "from .data import order", "world.py:1: world imports data"),
        ("errors.py", "from shoal import layout", "errors.py:1: errors imports layout"),
        ("errors.py", "from . import layout", "errors.py:1: errors imports layout"),
        ("world.py", "def f():\n    import shoal.data", "world.py:2: world imports data"),
        ("world.py", "import_module('shoal.data')", "world.py:1: world imports data"),
        ("data/order.py", "from shoal import Step", "data/order.py:1: data imports shoal"),
        ("data/order.py", "import shoal", "data/order.py:1: data imports shoal"),
        (
            "world.py",
            "if TYPE_CHECKING:\n    pass\nelse:\n    import shoal.data",
            "world.py:4: world imports data",
        ),
        ("extra.py", "", "extra: not in the table of layers"),
        ("report.py", "", "report: exists, but the table calls it planned"),
    ],
)
def test_other_imports_are_named(package: Path, file: str, text: str, fault: str) -> None:
    (package / file).write_text(text)
    assert check(package) == [fault]


def test_units_of_one_row_do_not_import_each_other(package: Path) -> None:
    (package / "launch.py").write_text("import shoal.world")
    table = layers.table(TABLE + "| 1 | `launch` | processes |\n")
    assert list(layers.violations(package, table)) == ["launch.py:1: launch imports world"]

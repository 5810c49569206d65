from __future__ import annotations

from pathlib import Path

import pytest

from helpers import layers

TABLE = """
| package | what it is for |
|---|---|
| `util` | errors |
| `distributed` | processes |
| `data` | batches |
"""


def test_the_code_keeps_to_the_table(repository: Path) -> None:
    table = layers.table((repository / "docs/contributing/architecture.md").read_text())
    assert list(layers.violations(repository / "src/shoal", table)) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("util", "distributed", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "__init__.py").write_text("from shoal.data import loader\n")
    return tmp_path


def check(package: Path) -> list[str]:
    return list(layers.violations(package, layers.table(TABLE)))


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

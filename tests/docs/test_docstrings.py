"""The examples in docstrings are run."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import shoal

PACKAGE = Path(shoal.__file__).parent
MODULES = [
    ".".join(("shoal", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text()
]


def test_there_are_examples() -> None:
    assert {"shoal.distributed.layout", "shoal.data.loader", "shoal.training.schedule"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name: str) -> None:
    failed, tried = doctest.testmod(import_module(name), extraglobs={"shoal": shoal})
    assert tried > 0
    assert failed == 0

"""A world of one for tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shoal


@pytest.fixture
def world() -> Iterator[shoal.World]:
    with shoal.init(device="cpu") as alone:
        yield alone

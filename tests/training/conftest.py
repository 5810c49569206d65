from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.ranks import Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """What was there before a test is not looked through each time a trace collects garbage."""
    gc.freeze()
    yield
    gc.unfreeze()

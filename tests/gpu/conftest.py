"""Devices of these tests: the accelerator (`make test-gpu`), and the CPU.

On the CPU, `make test-rest` runs the first row of each test, `make test-long` the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from helpers.accelerators import accelerator_type, why_skipped
from helpers.ranks import Ranks
from helpers.reference import SEED

Start = Callable[..., Ranks]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.full),
        pytest.param("accelerator", marks=pytest.mark.gpu),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    """The type of the device. A test that passes on the CPU is right but for the device."""
    if request.param == "cpu":
        return "cpu"
    if reason := why_skipped():
        pytest.skip(reason)
    return accelerator_type()


@pytest.fixture(scope="module")
def two(device: str) -> Iterator[Start]:
    """Two ranks of a layout on the device; those of another layout end when they are asked for.

    With `own`, the test skips where the ranks would share an accelerator, and so use Gloo.
    """
    with contextlib.ExitStack() as stack:
        running: dict[str, Ranks] = {}

        def start(layout: str, *, own: bool = False) -> Ranks:
            if own and device != "cpu" and (reason := why_skipped(count=2)):
                pytest.skip(reason)
            if layout not in running:
                stack.close()
                running.clear()
                ranks = Ranks(2, layout=layout, seed=SEED, device=device)
                running[layout] = stack.enter_context(ranks)
            return running[layout]

        yield start

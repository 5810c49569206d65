"""Every way to spread a model trains like one process: strategies x worlds x batches x precision."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shoal
from helpers.pairwise import cover
from helpers.ranks import Ranks
from helpers.reference import (
    SEED,
    UNITS,
    Row,
    distance,
    specification,
    train,
)
from helpers.strategy_table import CASES, STEPS, Case, check
from shoal._torch.pipelining import splits_backward

pytestmark = pytest.mark.processes


def _parameters() -> list[Any]:
    """All cases; `make test` tries each way on two processes, CI the ways that need more."""
    small = [case for case in CASES if case.size <= 2]
    covered = cover(small, lambda case: ((case.way, case.layout), case.precision))
    mixed = random.Random(0).sample(CASES, len(CASES))  # so that batches take turns
    first = {case.way: case for case in reversed(small)}
    wider = {case.way: case for case in mixed if case.way not in first}.values()

    def marks(case: Case) -> list[pytest.MarkDecorator]:
        split = case.way.split(",")[0] in ("Zero bubble", "ZBV", "DualPipeV")
        runs = splits_backward() or not split
        chosen = [pytest.mark.compat] if runs and case == first.get(case.way) else []
        if case in covered:
            return chosen
        return [*chosen, pytest.mark.full if case in wider else pytest.mark.long]

    return [
        pytest.param(
            case,
            id="-".join(
                map(str, (case.way, case.layout, case.batch, case.micro_batches, case.precision))
            ),
            marks=marks(case),
        )
        for case in CASES
    ]


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[str, int], Ranks]]:
    """Ranks by layout, started when first asked for; those of another layout end then."""
    with contextlib.ExitStack() as stack:
        running: dict[str, Ranks] = {}

        def ranks(layout: str, size: int) -> Ranks:
            if layout not in running:
                stack.close()
                running.clear()
                running[layout] = stack.enter_context(Ranks(size, layout=layout, seed=SEED))
            return running[layout]

        yield ranks


@pytest.mark.parametrize("case", _parameters())
def test_every_strategy_trains_like_one_process(
    started: Callable[[str, int], Ranks], case: Case
) -> None:
    check(started(case.layout, case.size), case)


@pytest.mark.full
@pytest.mark.parametrize(
    "mutation",
    [
        "stand-in counts",
        *(pytest.param(m, marks=pytest.mark.long) for m in ("no count correction", "one rank silent")),
    ],
)
def test_the_comparison_notices_mutations(mutation: str) -> None:
    rows = {
        "no count correction": Row("transformer", 101, True, 2, False, 0.5),
        "stand-in counts": Row("convolutional", 3, False, 1, False, None),
        "one rank silent": Row("convolutional", 96, False, 1, True, None),
    }
    row = rows[mutation]
    strategy = shoal.FSDP(modules=UNITS[row.model])
    with Ranks(4, layout="shard=4", seed=SEED) as ranks:
        mutated = ranks.call(train, row, mutation, strategy, STEPS)[0]
        assert distance(mutated, specification(row, STEPS)) > 1e-4

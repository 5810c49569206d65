"""BatchNorm trains as in one process: its samples are those of a group, whichever ranks hold them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from helpers.batch_norms import STEPS, Case, resumed, specification, train
from helpers.pairwise import cover
from helpers.ranks import Ranks
from helpers.reference import SEED, TOLERANCE, Trained, distance, together

pytestmark = pytest.mark.processes

LAYOUTS = {
    "Single": (("replicate=1", 1),),
    "Compiled": (("replicate=1", 1), ("replicate=2", 2)),
    "DDP": (("replicate=2", 2), ("replicate=3", 3), ("replicate=4", 4)),
    "FSDP": (("shard=2", 2), ("shard=3", 3), ("replicate=2,shard=2", 4)),
    "Tensor": (("tensor=2", 2), ("replicate=2,tensor=2", 4)),
    "Pipeline": (("pipeline=2", 2), ("replicate=2,pipeline=2", 4)),
    "Recomputed, DDP": (("replicate=2", 2), ("replicate=3", 3)),
    "Recomputed, FSDP": (("shard=2", 2), ("shard=3", 3)),
    "Recomputed, Pipeline": (("replicate=2,pipeline=2", 4),),
}
CASES = [
    Case(way, layout, statistics, micro_batches, samples, own)
    for way, layouts in LAYOUTS.items()
    for layout, _ in layouts
    for statistics, micro_batches in (("batch", 1), (4, 1), (4, 3), (16, 3))
    for samples in (42, 48)
    for own in (False, True)
    if not (own and "Pipeline" in way) and not ("Pipeline" in way and micro_batches == 1)
]
FEW = [
    ("DDP", 4, 3),
    ("Pipeline", 4, 3),
]
SIZES = {layout: size for layouts in LAYOUTS.values() for layout, size in layouts}


def _parameters() -> list[object]:
    """All cases; `make test` has a few of them, and CI a cover."""
    few = [
        next(c for c in CASES if (c.way, c.statistics, c.micro_batches) == one and SIZES[c.layout] <= 2)
        for one in FEW
    ]
    mixed = [case for case in CASES if case.way != "Compiled" and SIZES[case.layout] <= 2]
    random.Random(0).shuffle(mixed)
    more = cover(mixed, lambda c: (c.way, c.statistics))
    more.update({case.layout: case for case in mixed}.values())
    return [
        pytest.param(
            case,
            id="-".join(map(str, case)),
            marks=() if case in few else pytest.mark.full if case in more else pytest.mark.long,
        )
        for case in CASES
    ]


expected = cache(specification)


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[str], Ranks]]:
    """Ranks by layout; those of another layout end when they are first asked for."""
    with contextlib.ExitStack() as stack:
        running: dict[str, Ranks] = {}

        def ranks(layout: str) -> Ranks:
            if layout not in running:
                stack.close()
                running.clear()
                running[layout] = stack.enter_context(Ranks(SIZES[layout], layout=layout, seed=SEED))
            return running[layout]

        yield ranks


@pytest.mark.parametrize("case", _parameters())
def test_training_equals_one_process(started: Callable[[str], Ranks], case: Case) -> None:
    size = case.statistics if isinstance(case.statistics, int) else "batch"
    for result in together(started(case.layout).call(train, case)):
        assert distance(result, expected(size, case.samples)) < TOLERANCE


RESUMED = [
    (Case("DDP", "replicate=2", 4, 3), Case("FSDP", "shard=3", 4)),
    (Case("FSDP", "replicate=2,shard=2", "batch"), Case("DDP", "replicate=2", "batch")),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*RESUMED[0], id="2 to 3"),
        pytest.param(*RESUMED[1], id="4 to 2", marks=pytest.mark.long),
    ],
)
def test_a_killed_run_continues_on_another_number_of_ranks(
    tmp_path: Path, before: Case, after: Case
) -> None:
    with Ranks(SIZES[before.layout], layout=before.layout, seed=SEED) as ranks:
        ranks.call(resumed, before, str(tmp_path), 7)
    with Ranks(SIZES[after.layout], layout=after.layout, seed=SEED) as ranks:
        found = ranks.call(resumed, after, str(tmp_path), STEPS)
    wanted = expected(before.statistics)
    for result in found:
        assert distance(Trained(result.parameters, wanted.norms, wanted.losses), wanted) < TOLERANCE

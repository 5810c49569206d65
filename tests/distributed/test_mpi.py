"""backend="mpi" under Open MPI and MPICH: right in every call, and as exact as one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers import collectives_check as collectives
from helpers import mpi_trainings as trainings
from helpers import mpirun
from helpers.reference import CUT, PLAN, TOLERANCE, UNITS, Row, distance, specification

pytestmark = [pytest.mark.processes, pytest.mark.system]

STEPS = 5
WAYS: list[tuple[str, Row, Any]] = [
    ("replicate=2", Row("transformer", 101, True, 2, True, 0.5), shoal.DDP(bucket_cap_mb=0.001)),
    ("shard=2", Row("transformer", 101, True, 2, False, 0.5), shoal.FSDP(modules=UNITS["transformer"])),
    ("tensor=2", Row("transformer", 96, False, 1, False, 0.5), shoal.TensorParallel(plan=PLAN)),
    (
        "context=2",
        Row("transformer", 96, False, 1, False, None),
        shoal.ContextParallel(modules=UNITS["transformer"]),
    ),
    (
        "pipeline=2",
        Row("convolutional", 101, False, 4, False, 0.5),
        shoal.Pipeline(split_points=CUT["convolutional"], schedule="interleaved"),
    ),
]
FOUR: list[tuple[str, Row, Any]] = [
    (
        "replicate=2,shard=2",
        Row("convolutional", 101, False, 1, False, 0.5),
        shoal.FSDP(modules=UNITS["convolutional"]),
    ),
    (
        "shard=2,tensor=2",
        Row("transformer", 101, True, 1, False, 0.5),
        [shoal.TensorParallel(plan=PLAN), shoal.FSDP(modules=("block",))],
    ),
]


@pytest.mark.parametrize("program", mpirun.PROGRAMS)
def test_every_call(program: str, tmp_path: Path) -> None:
    found = mpirun.call(program, 3, tmp_path, collectives.check_all, "mpi")
    assert found == [[]] * 3


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "program", [mpirun.PROGRAMS[0], pytest.param(mpirun.PROGRAMS[1], marks=pytest.mark.long)]
)
def test_strategies_over_mpi_train_like_one_process(program: str, size: int, tmp_path: Path) -> None:
    ways = WAYS if size == 2 else FOUR
    ranks = mpirun.call(program, size, tmp_path, trainings.train_all, "mpi", ways, STEPS)
    for way, (layout, row, _) in enumerate(ways):
        together = {name: value for rank in ranks for name, value in rank[way].parameters.items()}
        for rank in ranks:
            trained = rank[way]
            trained.parameters = together | trained.parameters  # of a pipeline a rank has its stages
            one = dataclasses.replace(row, micro_batches=1, raw=False)
            assert distance(trained, specification(one, STEPS)) < TOLERANCE, layout

"""A cluster for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.slurm import Cluster, missing


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing():
        pytest.skip(missing())
    # Slurm shall not be the first to notice what is cut.
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", silence=60) as running:
        yield running

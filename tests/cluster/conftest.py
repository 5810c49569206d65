"""A cluster for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.slurm import Cluster, missing


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing():
        pytest.skip(missing())
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running

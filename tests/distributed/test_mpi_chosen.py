"""backend="mpi" where it can't be had: said before anything is started."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from shoal.distributed import env_vars
from shoal.distributed.device import choose_backend
from shoal.distributed.mpi import require, serve
from shoal.util.errors import LaunchError

CPU = torch.device("cpu")


def test_it_is_chosen_by_name_where_its_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.distributed.mpi.library.find_spec", lambda name: object())
    assert choose_backend("mpi", CPU).value == "mpi"
    with pytest.raises(LaunchError, match="tensors in host memory"):
        choose_backend("mpi", torch.device("cuda", 1))
    monkeypatch.setattr("shoal.distributed.mpi.library.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="the package mpi4py is not installed"):
        require(CPU)


@pytest.mark.parametrize("variable", ["", "PMI_RANK", "PMIX_RANK"])
def test_srun_alone_starts_no_ranks_of_mpi(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI would end the process itself, with half a page about how Slurm was built."""
    monkeypatch.setattr("shoal.distributed.mpi.library._load", lambda *_: pytest.fail("loaded"))
    for name in [name for name in os.environ if name.startswith("PMI")]:
        monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, "0")
    here = dataclasses.replace(env_vars.placement({}, cpus=2), launcher="srun", size=2)
    if variable:
        with pytest.raises(pytest.fail.Exception, match="loaded"):
            serve(here)
    else:
        with pytest.raises(LaunchError, match="srun has started its tasks without MPI") as error:
            serve(here)
        assert "srun --mpi=pmix" in error.value.fix


def test_torchrun_starts_no_ranks_of_mpi() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(LaunchError, match="starts processes that are not MPI ranks"):
        serve(env_vars.placement(variables, cpus=2))

"""The warning that a launcher kills ranks before they have saved."""

from __future__ import annotations

import pytest

from shoal.distributed.cluster_env.kill_times import warn_of_kill

TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SIGKILL = "OMPI_MCA_odls_base_sigkill_timeout"
PRRTE = {"PMIX_NAMESPACE": "prterun-node01-4711@1"}  # of Open MPI 5


@pytest.mark.parametrize(
    ("launcher", "seconds", "env", "command", "limit", "advice"),
    [
        ("torchrun", 31, {}, "torchrun train.py", "30 s", "--shutdown-timeout 62"),
        ("torchrun", 30, {}, "torchrun train.py", "", ""),
        ("torchrun", 31, {TIMEOUT: "60"}, "torchrun train.py", "", ""),
        ("torchrun", 61, {TIMEOUT: "60"}, "torchrun train.py", "60 s", "--shutdown-timeout 122"),
        ("torchrun", 61, {TIMEOUT: "60"}, "torchrun --shutdown_timeout=90 train.py", "", ""),
        ("torchrun", 0.5, {TIMEOUT: "x"}, "torchrun train.py", "", ""),
        ("shoal run", 2.1, {}, "shoal run --grace 2 -n 2 train.py", "2 s", "--grace 5"),
        ("shoal run", 599, {}, "shoal run -n 2 train.py", "", ""),
        ("shoal run", 599, {}, "shoal run -n 2 ./train.py --grace 2", "", ""),
        ("shoal run", 3, {}, "shoal run --grace=2 -n 2 -m train --grace 9", "2 s", "--grace 6"),
        ("Open MPI", 1.5, {}, "mpirun train.py", "1 s", "--mca odls_base_sigkill_timeout 3"),
        ("Open MPI", 1.5, {SIGKILL: "12"}, "mpirun train.py", "", ""),
        ("Open MPI", 0.5, {}, "mpirun train.py", "", ""),
        ("Open MPI", 0.5, {**PRRTE, SIGKILL: "12"}, "mpirun train.py", "0.2 s", "have SIGUSR1 sent"),
        ("Hydra", 1e6, {}, "mpiexec train.py", "", ""),
        ("none", 1e6, {}, "", "", ""),
    ],
)
def test_the_seconds_of_a_save_and_the_time_of_the_launcher(
    launcher: str, seconds: float, env: dict[str, str], command: str, limit: str, advice: str
) -> None:
    warning = warn_of_kill(launcher, seconds, env, lambda: ["python train.py", command], "train.py")
    assert (limit in warning, advice in warning, bool(warning)) == (True, True, bool(limit))

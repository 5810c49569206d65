"""Runs of servers: each process is as new, and all that is known is reported when runs are stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import wait_for
from shoal.tools.verify.observations import ObserverOptions
from shoal.tools.verify.run_servers import RunServers, observed_script

pytestmark = pytest.mark.processes

NEW = """
import atexit, json, multiprocessing, os, random, sys

import numpy as np
import torch


def tell(queue):
    queue.put(os.getcwd())


if __name__ == "__main__":
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    process = multiprocessing.get_context("spawn").Process(target=tell, args=(queue,))
    process.start()
    state = {
        "argv": sys.argv,
        "path": sys.path[0],
        "folder": os.getcwd(),
        "spawned": queue.get(),
        "rank": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "PYTHONHASHSEED")],
        "threads": [int(os.environ["OMP_NUM_THREADS"]), torch.get_num_threads()],
        "leftovers": hasattr(sys, "leftover") or "LEFTOVER" in os.environ,
        "hash": hash("a"),
        "draws": [random.random(), np.random.rand(), torch.rand(()).item()],
    }
    process.join()
    sys.leftover = os.environ["LEFTOVER"] = "1"
    atexit.register(lambda: json.dump(state, open("state.json", "w")))
    sys.stdout.write("not flushed")
    sys.exit(3)
"""


def run_new(servers: RunServers, tmp_path: Path, name: str, *, processes: int) -> dict[str, Any]:
    """Run NEW in its directory and return the state that it has seen."""
    home, folder = tmp_path / name, tmp_path / f"{name} records"
    home.mkdir()
    folder.mkdir()
    (home / "new.py").write_text(NEW)
    observer = ObserverOptions(folder=str(folder), root=str(home), stop_after=1)
    script = observed_script("new.py", ("--a", "b"), observer, processes=processes, reverse_files=False)
    assert servers.run(script, processes, hash_seed=1, limit=300.0) == 3
    assert "not flushed" in (folder / "output.txt").read_text()
    found: dict[str, Any] = json.loads((home / "state.json").read_text())
    assert found["path"] == found["folder"] == found["spawned"] == str(home)
    return found


def test_each_run_is_as_in_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with RunServers(tmp_path, processes=64) as servers:
        first, second = (run_new(servers, tmp_path, name, processes=1) for name in ("a", "b"))
    for state in (first, second):
        assert state["argv"] == ["new.py", "--a", "b"]
        assert state["rank"] == ["0", "1", "1"]
        assert not state["leftovers"]
        threads, used = state["threads"]
        assert threads == used
    assert first["hash"] == second["hash"]
    draws = zip(first["draws"], second["draws"], strict=True)
    assert all(one != other for one, other in draws)


STUCK = """
import os, pathlib, signal, sys
import torch

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for _ in range(2):
    optimizer.step()
    schedule.step()
    schedule.step()
if os.environ["WORLD_SIZE"] == "2":
    pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
    signal.pause()
"""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "SIGTERM"),
        pytest.param(("--time-limit", "1", "--ranks", "2"), "time limit", marks=pytest.mark.full),
    ],
)
def test_all_that_is_known_is_reported_when_runs_are_stopped(
    tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    home, stuck = tmp_path / "home", tmp_path / "stuck"
    home.mkdir()
    stuck.mkdir()
    (home / "stuck.py").write_text(STUCK)
    command = [sys.executable, "-m", "shoal", "verify", "--json", *options, "stuck.py", str(stuck)]
    with subprocess.Popen(
        command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = []
        if reason == "SIGTERM":
            for line in process.stderr:
                lines.append(line)
                if line == "running: 2 ranks\n":
                    break
            wait_for(lambda: len(list(stuck.iterdir())) == 2)
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    found = json.loads(output)
    verdicts = {finding["name"]: finding["verdict"] for finding in found["findings"]}
    schedule = verdicts.pop("one scheduler step per optimizer step at most")
    assert found["stopped"] == reason
    assert set(verdicts.values()) == {"not decided"}
    if reason == "SIGTERM":
        assert (process.returncode, schedule) == (1, "refuted")
        assert any("one scheduler step" in line and "refuted" in line for line in lines)
    else:
        assert (process.returncode, schedule) == (124, "not decided")

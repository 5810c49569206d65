"""The same training function in Ray Train as on one process, also if workers or nodes die or come.

Ray's processes end with each test, and its files are in the test's folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import shoal

pytestmark = [
    pytest.mark.processes,
    pytest.mark.peers,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

SCRIPT = """
import json, os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import shoal

folder, case = Path(sys.argv[1]), sys.argv[2]


def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)


def once(folder, name):
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def train(config):
    folder, case = Path(config["folder"]), config["case"]
    with shoal.init(seed=1, device="cpu") as world:
        inputs = torch.randn(101, 5, dtype=torch.float64)
        data = (inputs, inputs.sum(1, keepdim=True))
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        model = shoal.parallelize(model, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
        loader = shoal.Loader(data, world, batch_size=8)
        with shoal.Run(folder / "run", step, loader, trackers=()) as run:
            run.restore()
            for batch in loader.epochs(2):
                result = step(batch)
                run.tick(every=3)
                if case != "alone" and run.step % 10 == 0:
                    from shoal.ray import report
                    report(run, {"loss": float(result.loss)})
                if run.step == 11 and world.rank == 1:
                    if case == "worker" and once(folder, "killed"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    if case == "node" and once(folder, "there"):
                        (folder / "node").write_text(os.environ["RAY_RAYLET_PID"])
                        threading.Event().wait()  # until its node has gone
                if run.step == 11 and case == "more" and world.size == 1:
                    (folder / "alone").touch()
                    threading.Event().wait()  # until Ray starts more workers instead
            run.save()
        if world.rank == 0:
            values = [p.flatten().tolist() for p in model.parameters()]
            facts = {"parameters": sum(values, []), "size": world.size, "nodes": world.placement.nodes}
            (folder / "end.json").write_text(json.dumps(facts))
    if case != "alone":
        total = torch.ones(1)
        torch.distributed.all_reduce(total)  # Ray's group is left
        assert total.item() == torch.distributed.get_world_size()


def cut(cluster, nodes):
    while not (folder / "node").exists():
        threading.Event().wait(0.1)
    pid = int((folder / "node").read_text())
    for node in nodes:
        if pid in [each.process.pid for each in node.all_processes["raylet"]]:
            cluster.remove_node(node, allow_graceful=False)


def grow(cluster, small):
    while not (folder / "alone").exists():
        threading.Event().wait(0.1)
    known = len(cluster.list_all_nodes())
    while len(cluster.list_all_nodes()) == known:
        with suppress(Exception):  # a raylet has 30 s to start, which a busy machine may exceed
            cluster.add_node(**small)


def main():
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    Path(os.environ["RAY_TMPDIR"], "ray").mkdir()
    head = {**small, "num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**small) for _ in range(1 if case == "more" else 2)]
    ray.init(address=cluster.address, log_to_driver=True)
    try:
        if case == "node":
            threading.Thread(target=cut, args=(cluster, nodes), daemon=True).start()
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": str(folder), "case": case},
            scaling_config=ScalingConfig(
                num_workers=(1, 2) if case in ("node", "more") else 2,
                elastic_resize_monitor_interval_s=1.0,
            ),
            run_config=RunConfig(
                name="a",
                storage_path=str(folder / "storage"),
                failure_config=FailureConfig(max_failures=1),
            ),
        )
        with ThreadPoolExecutor(1) as pool:
            fitted = pool.submit(trainer.fit)
            if case == "more":
                grow(cluster, small)  # which works in the main thread only
            result = fitted.result()
        facts = {
            "checkpoint": result.checkpoint.path,
            "all": [Path(each.path).name for each, _ in result.best_checkpoints],
            "metrics": result.metrics,
        }
        (folder / "result.json").write_text(json.dumps(facts))
    finally:
        ray.shutdown()
        cluster.shutdown()


if case == "alone":
    train({"folder": folder, "case": case})
else:
    main()
"""


def ended(folder: Path, case: str) -> dict[str, Any]:
    """Run the script, and return how its training ended."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    options = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.urandom(20).hex(),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    command = [sys.executable, str(script), str(folder), case]
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # the paths of Ray's sockets must be short
        env = {**os.environ, **options, "RAY_TMPDIR": place}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    found: dict[str, Any] = json.loads((folder / "end.json").read_text())
    return found


@pytest.mark.parametrize("case", ["plain", "worker", "node", "more"])
def test_ray_train_ends_as_one_process(case: str, tmp_path: Path) -> None:
    expected = ended(tmp_path / "alone", "alone")["parameters"]
    found = ended(tmp_path / "ray", case)
    assert found["parameters"] == pytest.approx(expected, rel=0, abs=1e-12)
    assert found["size"] == (1 if case == "node" else 2)
    covered = shoal.coverage(tmp_path / "ray" / "run")
    assert (covered.end, covered.missed, covered.repeated) == (202, [], [])
    result = json.loads((tmp_path / "ray" / "result.json").read_text())
    reported = set(result["all"])
    # Ray forgets a report that its controller has not read when a worker dies.
    assert {"step-20"} <= reported <= {"step-10", "step-20"}
    assert case != "plain" or reported == {"step-10", "step-20"}
    assert Path(result["checkpoint"]).parent.parent == tmp_path / "ray" / "storage"
    assert (Path(result["checkpoint"]) / "manifest.json").is_file()

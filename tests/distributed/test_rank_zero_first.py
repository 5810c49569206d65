"""Global rank 0 alone decides, prints and commits, where every rank is the first of its machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.ranks import free_port

pytestmark = pytest.mark.processes

SCRIPT = """
import json, sys
import torch, shoal

with shoal.init(device="cpu") as world:
    model = shoal.parallelize(torch.nn.Linear(2, 1), world)
    task = shoal.Task(lambda output, batch: (output.sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    data = shoal.Loader((torch.ones(8, 2),), world, batch_size=4)
    with shoal.Run("run", step, data) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick()
        run.save()
    world.print("said once")
    print(json.dumps([world.is_rank_zero, world.rank, world.placement.local_rank]))
"""


@pytest.mark.full
def test_only_global_rank_0_is_first(tmp_path: Path) -> None:
    """FAILURES 26: two tasks that see one GPU each, both of local rank 0."""
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    started = []
    for rank in range(2):
        variables = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": rank, "GROUP_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": rank,
        }  # fmt: skip
        started.append(
            subprocess.Popen(
                [sys.executable, "train.py"],
                cwd=tmp_path,
                env=os.environ | {name: str(value) for name, value in variables.items()},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    ends = [json.loads(text.splitlines()[-1]) for text in said]
    assert ends == [[True, 0, 0], [False, 1, 0]]
    assert ["said once" in text for text in said] == [True, False]
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step-*")
    assert checkpoint.name == "step-2"

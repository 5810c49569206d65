"""The search of the built site leads from the field's terms to the page about each."""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import browser, program

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

FIRST = {
    "gradient accumulation": "guides/gradient-accumulation/",
    "activation checkpointing": "parallelism/activation-checkpointing/",
    "gradient checkpointing": "parallelism/activation-checkpointing/",
    "mixed precision": "guides/mixed-precision/",
    "data parallel": "parallelism/data-parallel/",
    "DDP": "parallelism/data-parallel/",
    "FSDP": "parallelism/fsdp/",
    "ZeRO": "parallelism/fsdp/",
    "tensor parallel": "parallelism/tensor-parallel/",
    "sequence parallel": "parallelism/context-parallel/",
    "context parallel": "parallelism/context-parallel/",
    "pipeline parallel": "parallelism/pipeline-parallel/",
    "multi-node": "clusters/multi-node/",
    "Slurm": "clusters/slurm/",
    "elastic": "clusters/elastic/",
    "rendezvous": "clusters/multi-node/",
    "preemption": "clusters/preemption/",
    "fault tolerance": "clusters/fault-tolerance/",
    "checkpoint": "guides/checkpoints/",
    "resume": "guides/checkpoints/",
    "early stopping": "guides/early-stopping/",
    "learning rate schedule": "guides/learning-rate-schedules/",
    "warm-up": "guides/learning-rate-schedules/",
    "EMA": "guides/ema/",
    "evaluation": "guides/evaluation/",
    "metrics": "guides/evaluation/",
    "torchmetrics": "guides/evaluation/",
    "TensorBoard": "guides/experiment-tracking/",
    "W&B": "guides/experiment-tracking/",
    "profiling": "monitoring/profiling/",
    "straggler": "monitoring/step-times/",
    "hang": "troubleshooting/hangs/",
    "timeout": "troubleshooting/hangs/",
    "DeepSpeed": "migration/deepspeed/",
    "Accelerate": "migration/accelerate/",
    "Lightning": "migration/lightning/",
    "HF Trainer": "migration/hf-trainer/",
    "torchrun": "clusters/launchers/",
    "MPI": "clusters/launchers/",
    "parameter server": "parallelism/asynchronous/",
}
AMONG_THREE = {
    "LBFGS": "guides/custom-loop/",
    "closure": "guides/custom-loop/",
    "LoRA": "migration/hf-trainer/",
    "peft": "migration/hf-trainer/",
    "fine-tuning": "migration/hf-trainer/",
    "find_unused_parameters": "parallelism/data-parallel/",
    "out of memory": "troubleshooting/",
    "CUDA out of memory": "troubleshooting/",
    "save_pretrained": "migration/hf-trainer/",
    "from_pretrained": "migration/hf-trainer/",
    "plain pytorch": "migration/plain-pytorch/",
    "single GPU to multi GPU": "migration/plain-pytorch/",
    "convert existing script": "migration/plain-pytorch/",
    "single process": "migration/plain-pytorch/",
    "compare losses": "migration/plain-pytorch/",
    "argparse": "migration/plain-pytorch/",
    "jupyter notebook": "clusters/launchers/",
    "jupyter": "migration/plain-pytorch/",
    "offline install": "getting-started/installation/",
    "no internet": "getting-started/installation/",
    "install CPU": "getting-started/installation/",
    "dependencies": "getting-started/installation/",
    "Muon": "guides/several-optimizers/",
    "Muon FSDP": "guides/several-optimizers/",
    "custom optimizer": "guides/several-optimizers/",
    "epoch mean": "guides/experiment-tracking/",
    "MASTER_ADDR": "clusters/launchers/",
    "map_location": "migration/plain-pytorch/",
    "idr_torch": "migration/idr-torch/",
    "Jean Zay": "clusters/slurm-reference/",
    "DistributedSampler": "guides/data/",
    "DataLoader": "guides/data/",
    "num_workers": "guides/data/",
    "drop_last": "guides/data/",
    "shuffle": "guides/sampling/",
    "WeightedRandomSampler": "guides/sampling/",
    "IterableDataset": "guides/data/",
    "torch.save": "guides/checkpoints/",
    "state_dict": "guides/export/",
    "best checkpoint": "guides/early-stopping/",
    "clip_grad_norm_": "guides/gradient-accumulation/",
    "no_sync": "guides/gradient-accumulation/",
    "GradScaler": "guides/mixed-precision/",
    "autocast": "guides/mixed-precision/",
    "bf16": "guides/mixed-precision/",
    "random seed": "explanation/determinism/",
    "reproducibility": "explanation/determinism/",
    "manual_seed": "migration/plain-pytorch/",
    "tqdm": "guides/training-loop/",
    "wandb": "guides/experiment-tracking/",
    "loss is nan": "guides/loss-spikes/",
    "NCCL timeout": "troubleshooting/hangs/",
    "sbatch": "clusters/slurm/",
    "requeue": "clusters/preemption/",
    "SIGTERM": "clusters/preemption/",
    "contrastive loss": "guides/losses/",
    "GAN": "guides/custom-loop/",
    "batch size": "guides/gradient-accumulation/",
    "SyncBatchNorm": "guides/batch-norm/",
    "container": "clusters/slurm-reference/",
    "device_map": "parallelism/device-placement/",
    "torch.compile": "guides/compile/",
    "local_rank": "clusters/launchers/",
    "multiple nodes": "clusters/multi-node/",
    "StepLR": "guides/learning-rate-schedules/",
    "warmup": "guides/learning-rate-schedules/",
    "rank 0 print": "migration/plain-pytorch/",
    "WebDataset": "guides/data/",
    "exit code 137": "reference/exit-codes/",
    "learning rate": "guides/learning-rate-schedules/",
    "GPU utilization": "monitoring/profiling/",
}

# The numbers of the messages are those of Material's search worker: set up, ask.
SEARCH = """
(async queries => {
    const config = JSON.parse(document.getElementById("__config").textContent);
    const worker = new Worker(config.search);
    const ask = (type, data) => new Promise(answer => {
        worker.onmessage = event => answer(event.data.data);
        worker.postMessage({type, data});
    });
    const index = await (await fetch("search/search_index.json")).json();
    await ask(0, {...index, options: {suggest: true}});
    const found = {};
    for (const query of queries) {
        const {items} = await ask(2, query);
        found[query] = items.slice(0, 3).map(parts => parts[0].location.split("#")[0]);
    }
    return found;
})
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the built site, served on 127.0.0.1."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=repository,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def search(site: str, queries: Iterable[str], folder: Path) -> dict[str, list[str]]:
    """Return the first three pages that the search of the site finds for each query."""
    with browser(folder) as chromium:
        chromium.call("Page.navigate", url=site)
        while not chromium.evaluate("document.readyState == 'complete' && location.port != ''"):
            time.sleep(0.1)  # polls
        answer = chromium.call(
            "Runtime.evaluate",
            expression=f"{SEARCH}({json.dumps(list(queries))})",
            awaitPromise=True,
            returnByValue=True,
        )
        found: dict[str, list[str]] = answer["result"]["value"]
        return found


@pytest.mark.skipif(program() is None, reason="no chromium")
def test_the_search_finds_the_page_with_the_answer(site: str, tmp_path: Path) -> None:
    assert len(AMONG_THREE) >= 60
    found = search(site, [*FIRST, *AMONG_THREE], tmp_path / "profile")
    wrong = {term: found[term] for term, page in FIRST.items() if found[term][:1] != [page]}
    missed = {term: found[term] for term, page in AMONG_THREE.items() if page not in found[term]}
    assert (wrong, missed) == ({}, {})

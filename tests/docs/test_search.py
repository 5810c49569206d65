"""The search of the built site leads from the field's terms to the page about each."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from helpers.browser import Browser, browser, program

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
RESULTS = """
[...document.querySelectorAll('.md-search-result__item a.md-search-result__link')]
    .slice(0, 3).map(link => new URL(link.href).pathname.slice(1))
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


def first_hits(chromium: Browser, site: str, term: str) -> list[str]:
    """Open the page with a search for a term; return the pages of the first hits."""
    chromium.call("Page.navigate", url=f"{site}?q={quote(term)}")
    deadline = time.monotonic() + 20
    before: list[str] = []
    while time.monotonic() < deadline:
        found: list[str] = chromium.evaluate(RESULTS)
        if found and found == before:
            return found
        before = found
        time.sleep(0.2)  # polls: the search runs in a worker of the browser
    return ["nothing"]


@pytest.mark.long
@pytest.mark.skipif(program() is None, reason="no chromium")
def test_the_first_hit_is_the_page_about_the_term(site: str, tmp_path: Path) -> None:
    found = {}
    with browser(tmp_path / "profile") as chromium:
        for term in FIRST:
            found[term] = first_hits(chromium, site, term)
    wrong = {term: hits for term, hits in found.items() if hits[0] != FIRST[term]}
    assert wrong == {}

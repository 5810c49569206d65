"""Metrics of a run in the text format of Prometheus, for node_exporter's textfile collector."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from shoal.tools.report.bottleneck import find_bottleneck
from shoal.tools.report.dashboard.snapshot_builder import SnapshotBuilder
from shoal.tools.report.experts import expert_loads
from shoal.tools.report.reader import read_history


def prometheus_text(run: str) -> str:
    """Return the metrics of a run, one a line after its help; those that are not known are left out."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = []
    for name, kind, description, value in _metrics(run):
        if value is not None and math.isfinite(value):
            lines += [f"# HELP shoal_{name} {description}", f"# TYPE shoal_{name} {kind}"]
            lines.append(f'shoal_{name}{{run="{label}"}} {value!r}')
    return "\n".join(lines)


def _metrics(run: str) -> Iterator[tuple[str, str, str, float | None]]:
    """Yield name, type, description and value of each metric."""
    history = read_history(run)
    now = SnapshotBuilder(Path(run), wait=False).look()
    step = None if now.progress is None else now.progress.step
    yield "step", "gauge", "Optimizer steps since the start of training.", step
    loss = None if now.loss is None else now.loss.now
    yield "loss", "gauge", "Mean loss over the last global batch.", loss
    seconds = max((rank.seconds for rank in now.ranks), default=None)
    yield "step_seconds", "gauge", "Mean time of the latest steps on the slowest rank.", seconds
    rate = None if now.throughput is None else now.throughput.now
    yield "samples_per_second", "gauge", "Samples per second of the latest steps.", rate
    efficient = find_bottleneck(history).efficient if history.attempts else None
    yield "goodput_ratio", "gauge", "Part of the time that ranks spent computing.", efficient
    used = min((each.used for each in expert_loads(history)), default=None)
    yield (
        "experts_used_ratio",
        "gauge",
        "Effective number of experts of the worst router, as a part of all.",
        used,
    )
    yield "restarts_total", "counter", "Restarts of the run.", now.restarts.count
    yield "ranks", "gauge", "Ranks of the latest attempt.", now.size
    running = float(now.state.kind == "running")
    yield "running", "gauge", "Whether the run records steps: 1 or 0.", running

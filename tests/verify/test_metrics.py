"""Metrics that an evaluation reduces over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.tools.verify.hooks import Observer
from shoal.tools.verify.metric_hooks import MetricObserver
from shoal.tools.verify.metrics import first_metric
from shoal.tools.verify.observations import (
    ObserverOptions,
    RankRecord,
    ReducedMetric,
    RunRecord,
    read_run,
)


def run(*values: float, total: float = 6.0) -> RunRecord:
    """Return a run whose ranks reduce one value each, after outputs with a sum of `total`."""
    share = tuple(each / len(values) for each in (8.0, total, 36.0, 8.0, 4.0))
    parts = [ReducedMetric(step=3, line="train.py:7", values=(v,), outputs=share) for v in values]
    ranks = tuple(RankRecord(rank=rank, metrics=(part,)) for rank, part in enumerate(parts))
    return RunRecord(name=f"{len(values)} ranks", size=len(values), ranks=ranks)


@pytest.mark.parametrize(
    ("one", "two", "again", "found"),
    [
        (run(0.6), run(0.7, 0.4), run(0.7, 0.4), True),
        (run(0.55), run(0.7, 0.4), run(0.7, 0.4), False),  # a mean
        (run(1.1), run(0.7, 0.4), run(0.7, 0.4), False),  # a sum
        (run(7.0), run(4.0, 4.0), run(4.0, 4.0), False),  # a count of batches
        (run(0.6), run(0.7, 0.4), run(0.7, 0.3), False),  # the time
        (run(0.6), run(0.7, 0.4, total=7.0), run(0.7, 0.4, total=7.0), False),  # other outputs
        (run(float("nan")), run(0.7, 0.4), run(0.7, 0.4), False),
    ],
)
def test_a_metric_differs_if_its_parts_neither_add_up_nor_average(
    one: RunRecord, two: RunRecord, again: RunRecord, found: bool
) -> None:
    metric = first_metric(one, two, again)
    assert (metric is not None and metric.line == "train.py:7" and metric.step == 3) == found


def test_what_is_summed_after_an_evaluation_is_recorded_with_the_outputs_before(tmp_path: Path) -> None:
    options = ObserverOptions(folder=str(tmp_path), root=str(Path(__file__).parent), stop_after=9)
    metrics = MetricObserver(Observer(options, 0))
    model, value = nn.Linear(1, 1), torch.tensor(0.5)
    batch = torch.tensor([[2.0], [-1.0]])
    metrics.forward_ends(model, None, batch)
    metrics.reduced(value)  # in the training
    metrics.stepped()
    with torch.no_grad():
        metrics.forward_ends(model, None, batch)
        metrics.forward_ends(nn.MSELoss(), None, batch)
        metrics.forward_ends(model, None, {"loss": value, "logits": batch})
    metrics.reduced(value, op=dist.ReduceOp.MAX)
    metrics.reduced(value, dist.ReduceOp.SUM)
    metrics.reduced(torch.tensor(1))
    metrics.forward_ends(model, None, batch)
    metrics.reduced(value)
    (found,) = read_run(tmp_path, name="", size=1, code=0).ranks[0].metrics
    assert (found.step, found.values) == (0, (0.5,))
    assert found.outputs == (4.0, 2.0, 10.0, 2.0, 0.0)

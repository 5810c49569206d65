"""Observation of the metrics that an evaluation sums or averages over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal._torch.dispatch import tree_leaves
from shoal.tools.verify.hooks import Observer
from shoal.tools.verify.observed_calls import call_before

MOST = 1 << 10
"""Largest number of elements of a reduced metric."""
ADDS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class MetricObserver:
    """The sums of a model's outputs in the evaluation after a step, and the metrics reduced after them.

    An evaluation ends with the next forward pass of the training.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._outputs: list[float] = []
        self._trains = False

    def forward_ends(self, module: Any, _inputs: Any, output: Any) -> None:
        """Add the outputs of a whole model."""
        if self._observer.depth or not any(True for _ in module.parameters()):
            return
        if torch.is_grad_enabled() and module.training:
            self.training_begins()
        elif not self._trains:
            with self._observer.trace.paused(), torch.no_grad():
                sums = [_sums(leaf) for leaf in tree_leaves(output) if _is_plain(leaf) and leaf.dim()]
            if sums:
                self._outputs = [
                    sum(each) for each in zip(*sums, self._outputs or [0.0] * 5, strict=True)
                ]

    def training_begins(self, *_: Any, **__: Any) -> None:
        """End an evaluation."""
        self._trains, self._outputs = True, []

    def stepped(self, *_: Any) -> None:
        """End the training of a step."""
        self._trains, self._outputs = False, []

    def reduced(self, tensor: Any, *rest: Any, **named: Any) -> None:
        """Record a tensor before it is summed or averaged over all ranks in an evaluation."""
        if not self._outputs or not _is_plain(tensor) or tensor.numel() > MOST:
            return
        for option in (*rest, *named.values()):
            part = isinstance(option, ProcessGroup) and option.size() < dist.get_world_size()
            if part or (isinstance(option, dist.ReduceOp.RedOpType) and option not in ADDS):
                return
        with self._observer.trace.paused():
            values = tensor.detach().reshape(-1).tolist()
        self._observer.write_event(
            "metric",
            step=self._observer.step,
            line=self._observer.user_line(),
            values=values,
            outputs=self._outputs,
        )


def _is_plain(value: Any) -> bool:
    tensor = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return tensor and value.is_floating_point()


def _sums(output: Tensor) -> tuple[float, ...]:
    """Return the sums of ones, values, squares, positive values, and places of the largest values.

    A metric may depend on the last two discontinuously.
    """
    largest = output.argmax(-1) if output.dim() > 1 and output.numel() else output.new_zeros(1)
    return (
        float(output.numel()),
        float(output.sum(dtype=torch.float64)),
        float(output.square().sum(dtype=torch.float64)),
        float((output > 0).sum()),
        float(largest.sum(dtype=torch.float64)),
    )


def observe_metrics(observer: Observer) -> None:
    """Observe the metrics of this process until it ends."""
    metrics = MetricObserver(observer)
    register_module_forward_hook(metrics.forward_ends)
    register_optimizer_step_post_hook(metrics.stepped)
    call_before(torch.autograd, "backward", metrics.training_begins)
    for name in ("all_reduce", "reduce"):
        call_before(dist, name, metrics.reduced)

"""Early stopping: end training when evaluations no longer improve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from shoal.util.arguments import check_choice
from shoal.util.errors import StepError


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Evaluation during `shoal.train`, with best checkpoint and early stopping.

    The best checkpoint by `monitor` is kept in `best/` of the run directory.

    Args:
        dataset: Dataset to evaluate; all kinds that a Loader takes.
        every: Number of optimizer steps between evaluations, 1 or more. `None` evaluates at the end of
            each epoch. Default: None.
        metrics: Metrics by name, as in `shoal.evaluate`. Default: {}.
        targets: Function of a batch that returns the target of the metrics. `None` takes the second
            element of a tuple or "labels" of a mapping. Default: None.
        outputs: Function of the model's output that returns the tensor for the metrics. `None` passes
            the complete output. Default: None.
        batch_size: Number of samples in a global batch. `None` takes 256 per data-parallel rank.
            Default: None.
        collate_fn: Function that makes a micro-batch from a list of samples. `None` takes the function
            of `shoal.train`; pass `torch.utils.data.default_collate` for torch's. Default: None.
        num_workers: Worker processes of each rank that load samples. Default: 0.
        monitor: Metric by which evaluations are compared: "loss" or a name in `metrics`. Default:
            "loss".
        mode: "min" if lower is better, "max" if higher is better. Default: "min".
        patience: End training after this number of evaluations without a better one, 1 or more. `None`
            does not stop early. Default: None.

    Raises:
        StepError: If `monitor`, `mode`, `every` or `patience` has no valid value.

    Examples:
        >>> data = [(1.0, 0), (2.0, 1)]
        >>> validation = shoal.Validation(
        ...     dataset=data, metrics={"accuracy": shoal.Accuracy()}, monitor="accuracy", mode="max",
        ...     patience=3,
        ... )
    """

    dataset: Any
    every: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    targets: Callable[[Any], Any] | None = None
    outputs: Callable[[Any], Any] | None = None
    batch_size: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    monitor: str = "loss"
    mode: str = "min"
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.monitor != "loss" and self.monitor not in self.metrics:
            raise StepError(
                given=f"Validation(monitor={self.monitor!r})",
                found=f"the metrics are {', '.join(('loss', *self.metrics))}",
                fix="pass monitor='loss', or the name of a metric, with mode='max' if a higher "
                "value is better",
            )
        check_choice(StepError, "shoal.Validation", "mode", self.mode, ("min", "max"))
        for name, value in (("every", self.every), ("patience", self.patience)):
            if value is not None and value < 1:
                raise StepError(
                    given=f"Validation({name}={value})",
                    found="it must be an integer, 1 or more",
                    fix=f"leave {name} out, or pass a positive number",
                )

    def collating(self, collate_fn: Callable[[list[Any]], Any] | None) -> Validation:
        """Return this Validation, with `collate_fn` if it has none."""
        return self if self.collate_fn is not None else replace(self, collate_fn=collate_fn)

    def compared(self, metrics: Mapping[str, Any]) -> float:
        """Return the monitored number of `metrics`. Raises StepError if it is not one number."""
        try:
            return float(metrics[self.monitor])
        except (TypeError, ValueError, RuntimeError):
            raise StepError(
                given=f"Validation(monitor={self.monitor!r})",
                found=f"its value is not one number: {metrics[self.monitor]!r:.60}",
                fix="use a metric of one number, such as the mean over the classes",
            ) from None


def numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that a checkpoint can keep: numbers and tensors."""
    return {name: value for name, value in metrics.items() if isinstance(value, float | int | Tensor)}


class EarlyStoppingState:
    """The best evaluation so far, the number of evaluations since, and the last `metrics`."""

    def __init__(self, evaluation: Validation | None) -> None:
        self.evaluation = evaluation
        self.best: float | None = None
        self.since = 0
        self.metrics: Mapping[str, Any] = {}
        self._kept: Mapping[str, Any] = {}

    def add(self, value: float, metrics: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
        """Take the next evaluation; return whether it is the best, which NaN never is.

        `value` is what is compared and `kept` what a checkpoint keeps of the metrics, both rank 0's on
        all ranks; `metrics` are this rank's.
        """
        self.metrics, self._kept = metrics, dict(kept)
        better = not math.isnan(value) and (
            self.best is None or (value > self.best if self._higher else value < self.best)
        )
        self.since = 0 if better else self.since + 1
        if better:
            self.best = value
        return better

    @property
    def _higher(self) -> bool:
        return self.evaluation is not None and self.evaluation.mode == "max"

    @property
    def _by(self) -> str:
        """The criterion by which evaluations are compared."""
        way = "higher" if self._higher else "lower"
        return "" if self.evaluation is None else f"{way} {self.evaluation.monitor}"

    @property
    def impatient(self) -> bool:
        """True if training should stop because no evaluation was better for too long."""
        patience = None if self.evaluation is None else self.evaluation.patience
        return patience is not None and self.since >= patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the number of evaluations since, and the last metrics."""
        return {"best": self.best, "since": self.since, "metrics": self._kept, "by": self._by}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned; drop the best value of another metric."""
        self.metrics = self._kept = state["metrics"]
        if state["by"] == self._by:
            self.best, self.since = state["best"], state["since"]

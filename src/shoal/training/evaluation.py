"""Exact evaluation: each sample counts once, on any number of ranks. Ranks reduce sums, not means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shoal._torch.metrics import mark_updated, reductions
from shoal.data import Loader
from shoal.data.batch import Count
from shoal.data.coupling.step import CoupledStep
from shoal.data.map_dataset import Collate
from shoal.data.micro import MicroBatch
from shoal.distributed.to_device import move
from shoal.distributed.world import World
from shoal.strategies import engine_of
from shoal.strategies.contracts import Engine
from shoal.strategies.eval_mode import evaluation
from shoal.strategies.held_parameters import as_scalar
from shoal.strategies.other_tools import reading_engine
from shoal.strategies.task import Task
from shoal.telemetry.step_timer import EVALUATION
from shoal.training.step import Step
from shoal.util.errors import DataError, StepError

BATCH = 256


class Metric(Protocol):
    """A metric that is a mean: a function of (output, target) that returns (sum, count)."""

    def __call__(self, output: Any, target: Any, /) -> tuple[Tensor, Count]:
        """Return (sum over the samples, count)."""
        ...


class Accuracy:
    """The fraction of correct classes, as a metric of `shoal.evaluate` and `Validation`.

    Called with scores of shape (…, classes) and targets of shape (…), it returns (correct, counted).

    Args:
        ignore_index: Targets with this value are not counted, as in torch. Default: -100.

    Raises:
        DataError: When called, if the output is not a tensor or the targets have another shape.

    Examples:
        >>> Accuracy()(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), torch.tensor([1, 0, -100]))
        (tensor(2), tensor(2))
    """

    def __init__(self, *, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def __call__(self, output: Tensor, target: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return (correct, counted)."""
        if not isinstance(output, Tensor):
            raise DataError(
                given=f"shoal.Accuracy of an output of type {type(output).__name__}",
                found="it takes the scores as one tensor of shape (…, classes)",
                fix=_choice_of(output),
            )
        if output.shape[:-1] != target.shape:
            raise DataError(
                given=f"Accuracy with scores of shape {tuple(output.shape)}",
                found=f"targets of shape {tuple(target.shape)}, not {tuple(output.shape[:-1])}",
                fix="put the classes in the last dimension of the output, or pass a custom metric: "
                "metrics={'accuracy': lambda output, target: (correct, counted)}",
            )
        counted = target != self.ignore_index
        return ((output.argmax(-1) == target) & counted).sum(), counted.sum()


def evaluate(
    model: Step | nn.Module,
    dataset: Any,
    *,
    task: Task | None = None,
    metrics: Mapping[str, Metric | Any] | None = None,
    targets: Callable[[Any], Any] | None = None,
    outputs: Callable[[Any], Any] | None = None,
    batch_size: int | None = None,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    batches: int | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Return the loss and the metrics of a model over a dataset. Collective.

    Every sample is visited once, in eval mode and without gradients; the modes of all modules are
    restored afterwards. Means are sums over all samples divided by counts, at any number of ranks.

    Args:
        model: A Step, evaluated in its own precision; or, in a custom training loop, a
            parallelized model, evaluated in the precision of a `torch.autocast` around the call.
        dataset: Dataset to visit; all kinds that a Loader takes.
        task: Task with the loss function, required for a model; None for a Step. Default: None.
        metrics: Metrics by name: functions `(output, target) -> (sum, count)`, such as
            `shoal.Accuracy()`, or torchmetrics Metrics. Default: None.
        targets: Function of a batch that returns the target of the metrics. `None` takes the second
            element of a tuple or "labels" of a mapping. Default: None.
        outputs: Function of the model's output that returns the tensor for the metrics, such as `lambda
            output: output.logits`; the loss gets the complete output. Default: None.
        batch_size: Number of samples in a global batch. `None` takes 256 per data-parallel rank.
            Default: None.
        collate_fn: Function that makes a micro-batch from a list of samples. `None` takes torch's
            `default_collate`. Default: None.
        num_workers: Worker processes of this rank that load samples. Default: 0.
        batches: Number of global batches to visit. `None` visits all. Default: None.
        world: World of a model that another tool trains, such as Accelerate or DDP. `None` for a
            parallelized model, which has its own. Default: None.

    Returns:
        The mean "loss", the number of "samples" visited, and each metric by name; the same on all
        ranks.

    Raises:
        StepError: If `model` and `task` do not fit, or a metric is not a function or does not return
            (sum, count).
        DataError: If the dataset has no samples, or `targets` is required.

    Examples:
        >>> def loss(output, batch):
        ...     return torch.nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(output)
        >>> data = torch.eye(4), torch.arange(4)
        >>> model = torch.nn.Linear(4, 4, bias=False)
        >>> _ = torch.nn.init.eye_(model.weight)
        >>> with shoal.init() as world:
        ...     model = shoal.parallelize(model, world)
        ...     metrics = {"accuracy": shoal.Accuracy()}
        ...     result = shoal.evaluate(model, data, task=shoal.Task(loss), metrics=metrics)
        >>> result["samples"], result["accuracy"]
        (4, 1.0)
    """
    subject = _subject(model, task, world)
    engine, task = subject.engine, subject.task
    world = engine.world
    metrics = _checked({} if metrics is None else metrics)
    with world.timeline.during(EVALUATION):
        # First, since fewer ranks may be left afterwards, and the dataset is split over them.
        engine.synchronize(subject.optimizer)
        parts = world.data_size if world.virtual_ranks is None else world.virtual_ranks.total
        loader = Loader(
            dataset,
            world,
            batch_size=BATCH * parts if batch_size is None else batch_size,
            shuffle=False,
            collate_fn=collate_fn,
            num_workers=num_workers,
        )
        kinds = _Metrics(metrics, world)
        sums = MetricSums(["loss", *kinds.own], parts if world.virtual_ranks else 1)
        samples = 0
        with evaluation(engine.module), torch.no_grad():
            for batch in islice(loader.epochs(1), batches):
                for micro in batch.micros:
                    if micro.place is not None and micro.place.whole:
                        sums.row = micro.place.number
                    with world.service(CoupledStep).processing(micro):
                        output = subject.infer(micro, batch.seed)
                    samples += micro.samples if micro.weight else 0
                    if output is None and not engine.reports_loss:
                        continue
                    # Padding samples and repeated outputs are evaluated too, so that an error occurs
                    # on all ranks, and because a loss that runs another model is collective.
                    weight = micro.weight if engine.reports_loss else 0.0
                    moved = engine.move_targets(output, micro)
                    sums.add("loss", task.reduce(output, moved, batch.seed), weight)
                    if metrics:
                        target = (targets or default_targets)(moved.value)
                        kinds.add(sums, (outputs or _same)(output), target, weight)
        result: dict[str, Any] = sums.means(world)
        visits = int(world.all_reduce(torch.full((), samples, device=world.device)))
        # All ranks of one data-parallel rank visit the same samples.
        result["samples"] = visits * world.data_size // world.size
        return result | {name: _merged(metric, world) for name, metric in kinds.foreign.items()}


def _same(output: Any) -> Any:
    return output


class _Metrics:
    """The metrics of one evaluation: functions, whose sums are reduced, and torchmetrics' objects."""

    def __init__(self, metrics: Mapping[str, Any], world: World) -> None:
        self.foreign = {
            n: _local(n, metric, world) for n, metric in metrics.items() if _foreign(metric)
        }
        self.own = {n: each for n, each in metrics.items() if n not in self.foreign}
        self._device = world.device

    def add(self, sums: MetricSums, output: Any, target: Any, weight: float) -> None:
        """Add one micro-batch, to `sums` or to the objects."""
        for name, metric in self.own.items():
            sums.add(name, metric(output, target), weight)
        for name, metric in self.foreign.items() if weight else ():
            _update(name, metric, *move((output, target), self._device))


class _Subject(NamedTuple):
    """The model to evaluate, its task and its inference function."""

    engine: Engine
    task: Task
    infer: Callable[[MicroBatch, int], Any]
    optimizer: torch.optim.Optimizer | None


def _subject(model: Step | nn.Module, task: Task | None, world: World | None) -> _Subject:
    if isinstance(model, Step) and task is None:
        return _Subject(model.engine, model.task, model.infer, model.optimizer)
    if isinstance(model, nn.Module) and isinstance(task, Task):
        engine = engine_of(model) if world is None else reading_engine(model, world)
        return _Subject(engine, task, partial(engine.infer, task, autocast=None), None)
    raise StepError(
        given=f"shoal.evaluate({type(model).__name__}, …"
        + (")" if task is None else f", task={type(task).__name__})"),
        found="a Step, which has its own Task"
        if isinstance(model, Step)
        else "neither a Step nor a model with a Task, so the loss function is unknown",
        fix="shoal.evaluate(step, data), or in a custom training loop "
        "shoal.evaluate(model, data, task=shoal.Task(loss))",
    )


class MetricSums:
    """Sums and counts, keyed by name, in float64, reduced over ranks once at the end.

    `add` adds to the current `row`. Each virtual rank has one, so that their order is fixed.
    """

    def __init__(self, names: list[str], rows: int = 1) -> None:
        self.row = 0
        self._names = names
        self._rows: list[dict[str, list[Tensor | float]]] = [
            {name: [0.0, 0.0] for name in names} for _ in range(rows)
        ]

    def add(self, name: str, result: tuple[Tensor, Count], weight: float = 1.0) -> None:
        """Add one (sum, count), or nothing for a weight of 0."""
        try:
            value, count = map(_number, result)
        except (TypeError, ValueError, RuntimeError):
            shown = repr(result) if not isinstance(result, Tensor) else f"shape {tuple(result.shape)}"
            raise StepError(
                given=f"metrics={{{name!r}: …}}",
                found=f"it returned a {type(result).__name__}, not two numbers: {shown:.60}",
                fix="return (sum over the samples, count), as in "
                "lambda output, target: ((output - target).abs().sum(), len(target))",
            ) from None
        if weight:
            total = self._rows[self.row][name]
            total[0] += value
            total[1] += count

    def means(self, world: World) -> dict[str, float]:
        """Return Σ sum / Σ count over all ranks; NaN if the count is 0."""
        zero = torch.zeros((), dtype=torch.float64, device=world.device)
        numbers = [n for row in self._rows for each in row.values() for n in each]
        table = torch.stack([as_scalar(n, zero) for n in numbers]).view(len(self._rows), -1)
        world.all_reduce(table)  # exact with virtual ranks: all but one of the addends are 0
        sums = [sum(column) for column in zip(*table.tolist(), strict=True)]
        return {
            name: total / count if count else float("nan")
            for name, total, count in zip(self._names, sums[::2], sums[1::2], strict=True)
        }


def _number(value: Tensor | float) -> Tensor | float:
    """Return a number in float64, a tensor's on its device: reading it would wait for the forward."""
    if not isinstance(value, Tensor):
        return float(value)
    return value.detach().reshape(()).double()


def default_targets(value: Any) -> Any:
    """Return the target of a batch for `evaluate` without `targets`."""
    if isinstance(value, Mapping) and "labels" in value:
        return value["labels"]
    if isinstance(value, tuple | list) and len(value) > 1:
        return value[1]
    if isinstance(value, Mapping):
        target = "batch['y']"
    else:
        target = "batch" if isinstance(value, Tensor) else "batch.y"
    raise DataError(
        given=f"metrics over batches of type {type(value).__name__}",
        found="the batch has neither a second element nor an entry 'labels'",
        fix=f"evaluate(step, data, metrics=…, targets=lambda batch: {target})",
    )


def _checked(metrics: object) -> dict[str, Any]:
    """Return `metrics` as a dict; raises StepError for anything but a mapping of metrics."""
    fix = "metrics={'accuracy': shoal.Accuracy()}"
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise StepError(given=f"metrics of type {kind}", found="metrics is a mapping of names", fix=fix)
    for name, metric in metrics.items():
        if name in ("loss", "samples"):
            found = f"evaluate itself returns {name!r} under this name"
        elif isinstance(metric, type):
            found = f"{metric.__name__} is a class; a metric is an object made from it"
        elif not callable(metric):
            found = f"{metric!r} can't be called with (output, target)"
        else:
            continue
        raise StepError(given=f"metrics={{{name!r}: …}}", found=found, fix=fix)
    return dict(metrics)


def _foreign(metric: Any) -> bool:
    return all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def _local(name: str, metric: Any, world: World) -> Any:
    """Return a reset copy of a torchmetrics Metric that does not synchronize with other ranks."""
    if reductions(metric) is None:
        raise StepError(
            given=f"metrics={{{name!r}: {type(metric).__name__}}}",
            found="a collection, whose states can't be merged over ranks",
            fix="pass its metrics one by one: metrics={'f1': F1Score(…), 'recall': Recall(…)}",
        )
    copy = metric.clone().to(world.device)
    copy.reset()
    copy.distributed_available_fn = lambda: False
    return copy


def _update(name: str, metric: Any, output: Any, target: Any) -> None:
    """Update a torchmetrics Metric; raises StepError for an output that it can't take."""
    try:
        metric.update(output, target)
    except Exception as error:
        if isinstance(output, Tensor):
            raise
        raise StepError(
            given=f"metrics={{{name!r}: {type(metric).__name__}}} of an output of type "
            f"{type(output).__name__}",
            found=f"its update raised {type(error).__name__}: {error}",
            fix=_choice_of(output),
        ) from error


def _choice_of(output: object) -> str:
    """Return the call that selects one tensor of an output for a metric."""
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        chosen = "output[0]"
    elif isinstance(output, Mapping):
        tensors = [name for name, value in output.items() if isinstance(value, Tensor) and value.dim()]
        name = tensors[0] if tensors else "logits"
        chosen = f"output.{name}" if hasattr(output, str(name)) else f"output[{name!r}]"
    else:
        chosen = "output.logits"
    return f"shoal.evaluate(step, data, metrics=…, outputs=lambda output: {chosen})"


def _merged(metric: Any, world: World) -> Any:
    """Return the value of a metric over all ranks, from the states of those that saw samples.

    Uses the metric's reductions. torchmetrics' synchronization would require that every rank has
    seen a sample, which is not so for a small or ragged dataset.
    """
    states = world.gather(_plain(metric.metric_state) if metric.update_count else None)
    seen = [state for state in states if state is not None]
    reduced_by = reductions(metric) or {}
    for name in metric.metric_state if seen else ():
        values = [state[name] for state in seen]
        if isinstance(values[0], list):
            merged: Any = [item.to(world.device) for value in values for item in value]
        else:
            reduce = reduced_by[name]
            stacked = torch.stack(values).to(world.device)
            merged = stacked if reduce is None else reduce(stacked)
        setattr(metric, name, merged)
    mark_updated(metric)
    value = metric.compute()
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [item.cpu() for item in value] if isinstance(value, list) else value.cpu()
        for name, value in state.items()
    }

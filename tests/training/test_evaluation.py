from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

import shoal
from helpers.small_training import cross_entropy
from shoal.training.evaluation import default_targets
from shoal.util.errors import DataError, StepError

SAMPLES, CLASSES = 101, 3


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(SAMPLES, 4, generator=generator)
    return values, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.layer = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, CLASSES)

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.layer(self.dropout(self.norm(values)))
        return output


def build(world: shoal.World, task: shoal.Task | None = None, **options: Any) -> shoal.Step:
    torch.manual_seed(2)
    model = shoal.parallelize(Network(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shoal.Step(model, optimizer, task or shoal.Task(cross_entropy), **options)


def outputs(step: shoal.Step) -> Tensor:
    with torch.no_grad():
        found: Tensor = copy.deepcopy(step.model).eval()(dataset()[0])
    return found


@pytest.mark.parametrize("batch_size", [None, 7, 101, 500])
def test_loss_and_accuracy_are_those_of_one_batch(world: shoal.World, batch_size: int | None) -> None:
    step = build(world)
    found = shoal.evaluate(
        step, dataset(), metrics={"accuracy": shoal.Accuracy()}, batch_size=batch_size
    )
    scores, labels = outputs(step), dataset()[1]
    assert found["samples"] == SAMPLES
    assert found["loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-6)
    assert found["accuracy"] == (scores.argmax(1) == labels).sum().item() / SAMPLES
    assert set(found) == {"loss", "samples", "accuracy"}


def test_accuracy_over_tokens_leaves_out_the_ignored() -> None:
    scores = torch.tensor([[[2.0, 1.0], [0.0, 1.0], [0.0, 1.0]]])
    correct, counted = shoal.Accuracy()(scores, torch.tensor([[0, 0, -100]]))
    assert (correct.item(), counted.item()) == (1, 2)
    correct, counted = shoal.Accuracy(ignore_index=0)(scores, torch.tensor([[0, 0, 1]]))
    assert (correct.item(), counted.item()) == (1, 1)
    with pytest.raises(DataError, match="classes in the last dimension"):
        shoal.Accuracy()(torch.zeros(2, 5, 3), torch.zeros(2, 3))


def test_nothing_of_the_model_changes(world: shoal.World) -> None:
    step = build(world)
    model = step.model
    assert isinstance(model, Network)
    model.norm.eval()  # frozen, as in fine-tuning
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    shoal.evaluate(step, dataset())
    assert [module.training for module in model.modules()] == [True, False, True, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_modes_come_back_after_an_error_too(world: shoal.World) -> None:
    def broken(output: Tensor, target: Tensor) -> Any:
        assert not output.requires_grad
        raise LookupError

    step = build(world)
    with pytest.raises(LookupError):
        shoal.evaluate(step, dataset(), metrics={"broken": broken})
    assert step.model.training


METRICS: dict[str, Any] = {
    "f1": torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro"),
    "auroc": torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),
}


def test_metrics_of_torchmetrics_are_those_of_one_batch(world: shoal.World) -> None:
    step = build(world)
    scores, labels = outputs(step), dataset()[1]
    for name, metric in METRICS.items():
        metric.update(torch.ones(1, CLASSES) / CLASSES, torch.zeros(1, dtype=torch.long))
        found = shoal.evaluate(step, dataset(), metrics={name: metric}, batch_size=10)
        fresh = metric.clone()
        fresh.reset()
        torch.testing.assert_close(found[name], fresh(scores, labels).item(), rtol=1e-6, atol=0)
        assert metric.update_count == 1  # the user's own object is left alone
        metric.reset()


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.layer(values)
        return output[:, 0]


def squares(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


@pytest.mark.parametrize(
    "metric",
    [
        torchmetrics.PearsonCorrCoef(),  # full_state_update, states of its own kind of merging
        torchmetrics.R2Score(),
        torchmetrics.MeanAbsoluteError(),
        torchmetrics.SpearmanCorrCoef(),  # keeps all samples
    ],
    ids=lambda metric: type(metric).__name__,
)
def test_metrics_of_numbers(world: shoal.World, metric: Any) -> None:
    model = shoal.parallelize(Regression(), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(squares))
    values = dataset()[0]
    targets = values.sum(1) + values[:, 0].square()
    found = shoal.evaluate(step, (values, targets), metrics={"it": metric}, batch_size=20)
    fresh = metric.clone()
    with torch.no_grad():
        fresh.update(model(values), targets)
    assert found["it"] == pytest.approx(fresh.compute().item(), rel=1e-4)


def test_a_metric_of_several_numbers_stays_a_tensor(world: shoal.World) -> None:
    metric = torchmetrics.Recall(task="multiclass", num_classes=CLASSES, average=None)
    step = build(world)
    found = shoal.evaluate(step, dataset(), metrics={"recall": metric}, batch_size=10)["recall"]
    torch.testing.assert_close(found, metric.clone()(outputs(step), dataset()[1]))


def test_a_collection_is_refused(world: shoal.World) -> None:
    collection = torchmetrics.MetricCollection([METRICS["f1"].clone()])
    with pytest.raises(StepError, match="one by one"):
        shoal.evaluate(build(world), dataset(), metrics={"all": collection})


def test_targets_may_be_named(world: shoal.World) -> None:
    task = shoal.Task(
        lambda output, batch: (F.cross_entropy(output, batch["y"], reduction="sum"), len(batch["y"])),
        inputs=lambda batch: batch["x"],
    )
    values, labels = dataset()
    step = build(world, task)
    data = {"x": values, "y": labels}
    with pytest.raises(DataError, match="neither a second element nor an entry 'labels'"):
        shoal.evaluate(step, data, metrics={"accuracy": shoal.Accuracy()})
    found = shoal.evaluate(
        step, data, metrics={"accuracy": shoal.Accuracy()}, targets=lambda batch: batch["y"]
    )
    assert found["accuracy"] == (outputs(step).argmax(1) == labels).sum().item() / SAMPLES
    assert "accuracy" not in shoal.evaluate(step, data)  # without metrics nobody asks for targets


@dataclass
class Scored(dict[str, Tensor]):
    """An output as a library of models returns it: an object that is a mapping too."""

    logits: Tensor

    def __post_init__(self) -> None:
        self["logits"] = self.logits


class Wrapped(Network):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, values: Tensor) -> Any:
        return self.kind(super().forward(values))


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], str]] = {
    "object": (lambda scores: SimpleNamespace(logits=scores), lambda o: o.logits, "output.logits"),
    "fields": (Scored, lambda output: output.logits, "output.logits"),
    "dict": (lambda scores: {"scores": scores}, lambda output: output["scores"], "output['scores']"),
    "tuple": (lambda scores: (scores, None), lambda output: output[0], "output[0]"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", [shoal.Accuracy(), METRICS["f1"]], ids=["accuracy", "f1"])
def test_metrics_of_outputs_that_are_objects(world: shoal.World, kind: str, metric: Any) -> None:
    wrap, choose, typed = KINDS[kind]
    task = shoal.Task(lambda output, batch: cross_entropy(choose(output), batch))
    torch.manual_seed(2)
    model = shoal.parallelize(Wrapped(wrap), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    with pytest.raises(shoal.ShoalError) as refused:
        shoal.evaluate(step, dataset(), metrics={"it": metric})
    assert f"outputs=lambda output: {typed})" in refused.value.fix
    found = shoal.evaluate(step, dataset(), metrics={"it": metric}, outputs=choose)
    plain = shoal.evaluate(build(world), dataset(), metrics={"it": metric})
    assert (found["it"], found["loss"]) == (plain["it"], plain["loss"])


def test_default_targets() -> None:
    assert default_targets((1, 2, 3)) == 2
    assert default_targets({"x": 1, "labels": 2}) == 2
    with pytest.raises(DataError):
        default_targets((1,))


def test_where_nothing_is_counted_there_is_no_mean(world: shoal.World) -> None:
    found = shoal.evaluate(
        build(world), dataset(), metrics={"none": lambda output, target: (output.sum() * 0, 0)}
    )
    assert found["none"] != found["none"]  # NaN


def test_no_warning(world: shoal.World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shoal.evaluate(build(world), dataset(), metrics={"f1": METRICS["f1"]})


def test_the_error_without_targets_shows_the_batch_of_an_autoencoder(world: shoal.World) -> None:
    model = shoal.parallelize(torch.nn.Linear(3, 3), world)
    task = shoal.Task(lambda output, x: ((output - x).square().sum(), x.numel()), inputs=lambda x: x)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    data = [torch.ones(3)] * 4
    with pytest.raises(DataError, match="neither a second element") as raised:
        shoal.evaluate(step, data, metrics={"mean": lambda output, x: (output.sum(), x.numel())})
    assert raised.value.fix.endswith("targets=lambda batch: batch)")

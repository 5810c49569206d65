"""Your own loop in one process: what it says of its loss, what it forgets, what a Run saves of it."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.small_training import backward, cross_entropy, mean_cross_entropy, take
from shoal.distributed import speed_hints
from shoal.util.errors import CheckpointError, StepError

SAMPLES, BATCH = 24, 8
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES) % 3


class Parts:
    """A model of three classes and what trains it."""

    def __init__(self, world: shoal.World, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = shoal.parallelize(nn.Linear(6, 3) if model is None else model, world)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.data = shoal.Loader((X, Y), world, batch_size=BATCH, micro_batches=2)

    @property
    def batch(self) -> Any:
        """The first one of an epoch."""
        return next(self.data.epochs(1))

    def step(self, loss: Callable[..., Any] = cross_entropy, **options: Any) -> shoal.Step:
        return shoal.Step(self.model, self.optimizer, shoal.Task(loss), **options)

    def run(self, directory: Path, **options: Any) -> shoal.Run:
        optimizer = self.optimizer
        return shoal.Run(directory, self.model, self.data, optimizer=optimizer, trackers=(), **options)

    def backward(self, batch: shoal.Batch) -> None:
        backward(batch, self.model, cross_entropy)

    def take(self, batch: shoal.Batch) -> None:
        take(batch, self.model, self.optimizer, cross_entropy)


@pytest.fixture
def parts(world: shoal.World) -> Parts:
    return Parts(world)


@pytest.mark.parametrize(
    "count", [len, lambda y: torch.tensor(len(y)), lambda y: torch.tensor([len(y)])]
)
def test_a_mean_and_a_total_give_the_same_gradients(world: shoal.World, count: Any) -> None:
    found = []
    for name, reduction, counted in (("total", "sum", len), ("mean", "mean", count)):
        parts = Parts(world)
        batch = parts.batch
        for x, y in batch:
            loss = F.cross_entropy(parts.model(x), y, reduction=reduction)
            batch.backward(**{name: loss}, count=counted(y), model=parts.model)
        result = batch.finish(parts.model)
        found.append((result, [p.grad for p in parts.model.parameters()]))
    (first, of_sum), (second, of_mean) = found
    torch.testing.assert_close(of_mean, of_sum)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert isinstance(first, shoal.StepResult)
    assert first._fields[:4] == ("loss", "norm", "counted", "skipped")
    assert (first.counted, first.skipped) == (BATCH, False)


ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("positional", "named", "given", "found"),
    [
        ((ONE, 4), {}, r"batch.backward\(…, …\)", "could be a sum or a mean"),
        ((ONE,), {"count": 4}, r"batch.backward\(…, count=…\)", "positional arguments"),
        ((), {"total": ONE, "mean": ONE, "count": 4}, "total=…, mean=…", "both a total and a mean"),
        ((), {"count": 4}, r"batch.backward\(count=…\)", "no loss"),
        ((), {"total": ONE}, r"batch.backward\(total=…\)", "no count"),
        ((), {"mean": torch.ones(2), "count": 4}, "mean=…, count=…", r"a loss of shape \(2,\)"),
    ],
)
def test_a_loss_that_does_not_say_what_it_is_raises(
    parts: Parts, positional: tuple[Any, ...], named: dict[str, Any], given: str, found: str
) -> None:
    batch = parts.batch
    next(iter(batch))
    with pytest.raises(StepError, match=found) as caught:
        batch.backward(*positional, **named)
    assert re.search(given, caught.value.given)
    assert "batch.backward(total=" in caught.value.fix


def test_the_loss_of_a_step_over_the_model_is_tried_in_its_loop(parts: Parts) -> None:
    step = parts.step(mean_cross_entropy)
    before = [p.detach().clone() for p in parts.model.parameters()]
    with pytest.raises(StepError, match="it is a mean, not a sum"):
        parts.take(parts.batch)
    assert step.number == 0
    assert all(map(torch.equal, before, parts.model.parameters()))
    assert all(p.grad is None for p in parts.model.parameters())


@pytest.mark.parametrize(
    ("option", "value", "fix"),
    [
        ("precision", "bf16", r"torch.autocast\('cpu', torch.bfloat16\)"),
        ("clip", 1.0, r"batch.finish\(model, clip=1.0\)"),
        ("compile", "inductor", r"model = torch.compile\(model\)"),
        ("schedule", None, "schedule=schedule"),
    ],
)
def test_options_of_a_step_that_a_loop_would_ignore_raise(
    parts: Parts, option: str, value: Any, fix: str
) -> None:
    if option == "schedule":
        value = torch.optim.lr_scheduler.ConstantLR(parts.optimizer)
    step = parts.step(**{option: value})
    with pytest.raises(StepError, match=f"no effect: {option}") as caught:
        parts.take(parts.batch)
    assert re.search(fix, caught.value.fix)
    assert "step(batch)" in caught.value.fix
    assert step.number == 0
    del step, caught
    gc.collect()
    parts.take(parts.batch)  # a Step that no longer exists has no say


def test_a_forgotten_finish_raises_at_the_step(parts: Parts) -> None:
    first, second, _ = parts.data.epochs(1)
    before = [p.detach().clone() for p in parts.model.parameters()]
    parts.backward(first)
    with pytest.raises(StepError, match=r"batch\.finish was not called") as caught:
        parts.optimizer.step()
    assert "call batch.finish(model) after the loop" in caught.value.fix
    assert all(map(torch.equal, before, parts.model.parameters()))
    parts.optimizer.zero_grad()
    parts.take(second)


def trained(world: shoal.World, directory: Path, form: str, epochs: int) -> tuple[int, list[Tensor]]:
    """Training to the end of an epoch, saved by a Run of a Step or of a model."""
    parts = Parts(world)
    of_step = form == "step"
    run = shoal.Run(directory, parts.step(), parts.data) if of_step else parts.run(directory)
    with run:
        run.restore()
        for batch in parts.data.epochs(epochs):
            parts.take(batch)
            run.tick()
        run.save()
    return run.step, [p.detach().clone() for p in parts.model.parameters()]


@pytest.mark.parametrize("forms", [("model", "model"), ("step", "model"), ("model", "step")])
def test_a_run_of_a_model_goes_on_as_one_of_a_step(
    world: shoal.World, tmp_path: Path, forms: tuple[str, str]
) -> None:
    number, whole = trained(world, tmp_path / "whole", "model", 2)
    assert number == 2 * SAMPLES // BATCH
    trained(world, tmp_path / "parts", forms[0], 1)
    again, resumed = trained(world, tmp_path / "parts", forms[1], 2)
    assert again == number
    assert all(map(torch.equal, resumed, whole))


def test_a_run_takes_several_models_by_name(world: shoal.World, tmp_path: Path) -> None:
    first, second = Parts(world), Parts(world)
    models = {"first": first.model, "second": second.model}
    optimizers = {"first": first.optimizer, "second": second.optimizer}
    schedule = torch.optim.lr_scheduler.StepLR(second.optimizer, 1, 0.5)
    options: dict[str, Any] = {"optimizer": optimizers, "schedule": {"second": schedule}}
    with shoal.Run(tmp_path, models, first.data, **options) as run:
        for batch in first.data.epochs(1):
            first.take(batch)
            second.take(batch)
            schedule.step()
            run.tick()
        run.save()
    names = {name: state.number for name, state in run.train_states.items()}
    assert names == {"first": 3, "second": 3}
    schedule.load_state_dict(torch.optim.lr_scheduler.StepLR(second.optimizer, 1, 0.5).state_dict())
    with shoal.Run(tmp_path, models, first.data, **options) as run:
        run.restore()
        assert schedule.last_epoch == 3


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (lambda p: ((p.model, p.data), {}), "without optimizer="),
        (lambda p: ((p.step(), p.data), {"optimizer": p.optimizer}), "'step', which is not a model"),
        (lambda p: (({"a": p.model}, p.data), {"optimizer": {"b": p.optimizer}}), "'b', which is no"),
        (lambda p: ((nn.Linear(1, 1), p.data), {"optimizer": p.optimizer}), "not the model's"),
        (lambda p: (("model", p.data), {}), "neither a Step nor a model"),
    ],
)
def test_what_a_run_cannot_save_raises(
    parts: Parts, tmp_path: Path, arguments: Callable[[Parts], Any], found: str
) -> None:
    positional, named = arguments(parts)
    with pytest.raises(StepError, match=found):
        shoal.Run(tmp_path, *positional, **named)


def scheduled(
    world: shoal.World, directory: Path, steps: Callable[[shoal.Batch], int], epochs: int = 2
) -> Any:
    """Train with a schedule that the loop steps `steps(batch)` times after each batch."""
    parts = Parts(world)
    schedule = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1, 0.5)
    with parts.run(directory, schedule=schedule) as run:
        run.restore()
        for batch in parts.data.epochs(epochs):
            parts.take(batch)
            for _ in range(steps(batch)):
                schedule.step()
            run.tick()
        run.save()
    return schedule


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_a_schedule_is_stepped_by_the_loop_and_saved_by_the_run(
    world: shoal.World, tmp_path: Path
) -> None:
    assert scheduled(world, tmp_path / "a", lambda batch: 1, 1).last_epoch == 3
    assert scheduled(world, tmp_path / "a", lambda batch: 1, 2).last_epoch == 6
    assert scheduled(world, tmp_path / "b", lambda batch: batch.ends_epoch).last_epoch == 2
    with pytest.raises(StepError, match="0 times in 4 optimizer steps, and an epoch has ended since"):
        scheduled(world, tmp_path / "forgotten", lambda batch: 0)
    with pytest.raises(StepError, match="2 times in 1 optimizer steps"):
        scheduled(world, tmp_path / "doubled", lambda batch: 2)
    with pytest.raises(CheckpointError, match="without a schedule"):
        trained(world, tmp_path / "a", "model", 3)


def test_a_model_is_evaluated_with_a_task(parts: Parts) -> None:
    task = shoal.Task(cross_entropy)
    found = shoal.evaluate(parts.model, (X, Y), task=task)
    assert found == shoal.evaluate(parts.step(), (X, Y))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = shoal.evaluate(parts.model, (X, Y), task=task)
    assert rounded["loss"] != found["loss"]
    assert rounded["loss"] == pytest.approx(found["loss"], rel=0.01)
    with pytest.raises(StepError, match="Task"):
        shoal.evaluate(parts.model, (X, Y))
    with pytest.raises(StepError, match="Task"):
        shoal.evaluate(parts.step(), (X, Y), task=task)


def compiled(module: nn.Module, seen: list[int]) -> Any:
    """The module compiled by a backend that counts the graphs that it compiles."""

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(len(inputs))
        return graph

    return torch.compile(module, backend=backend)


def test_a_model_compiled_before_keeps_its_names_and_runs_compiled(
    world: shoal.World, tmp_path: Path
) -> None:
    seen: list[int] = []
    net = nn.Linear(6, 3)
    parts = Parts(world, compiled(net, seen))
    assert parts.model is net
    assert list(parts.model.state_dict()) == ["weight", "bias"]
    step = parts.step()
    assert step.compiled
    first, second, _ = parts.data.epochs(1)
    step(first)
    assert seen
    seen.clear()
    torch.compiler.reset()
    parts.take(second)
    assert seen
    path = shoal.export(parts.model, tmp_path / "model.pt")
    assert list(torch.load(path)) == ["weight", "bias"]


def test_a_model_compiled_after_is_known_by_its_bare_model(parts: Parts, tmp_path: Path) -> None:
    whole = compiled(parts.model, [])
    take(parts.batch, whole, parts.optimizer, cross_entropy)
    seen: list[int] = []
    step = shoal.Step(compiled(parts.model, seen), parts.optimizer, shoal.Task(cross_entropy))
    assert step.model is parts.model
    step(parts.batch)
    assert seen
    assert list(shoal.EMA(whole).state_dict()["averages"]) == ["weight", "bias"]
    path = shoal.export(whole, tmp_path / "model.safetensors")
    shoal.load(whole, path)


def test_models_that_can_only_be_compiled_in_parts_raise(world: shoal.World) -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    with pytest.raises(StepError, match="if parts of it are recomputed in backward"):
        shoal.parallelize(compiled(net, []), world, shoal.ActivationCheckpointing(modules=("0", "1")))


def test_a_skipped_batch_leaves_the_parameters_to_other_code(parts: Parts) -> None:
    """Averages that are swapped in for an evaluation, or a state that is loaded, are no step."""
    ema = shoal.EMA(parts.model)
    first, second, _ = parts.data.epochs(1)
    parts.backward(first)
    parts.optimizer.zero_grad()
    with ema.applied():
        pass
    parts.model.load_state_dict(parts.model.state_dict())
    parts.take(second)


def test_a_schedule_may_be_loaded_after_the_run_was_opened(parts: Parts, tmp_path: Path) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(parts.optimizer, 100)
    state = {**schedule.state_dict(), "last_epoch": 40}
    with parts.run(tmp_path, schedule=schedule) as run:
        schedule.load_state_dict(state)
        for batch in parts.data.epochs(1):
            parts.take(batch)
            schedule.step()
            run.tick()
    assert schedule.last_epoch == 40 + SAMPLES // BATCH


def test_gradients_that_are_clipped_before_finish_raise(parts: Parts) -> None:
    batch = parts.batch
    parts.backward(batch)
    nn.utils.clip_grad_norm_(parts.model.parameters(), 0.01)
    with pytest.raises(StepError, match="the gradients were changed") as caught:
        batch.finish(parts.model)
    assert "batch.finish(model, clip=1.0)" in caught.value.fix


def test_a_mean_in_half_precision_is_multiplied_in_single_precision(parts: Parts) -> None:
    batch = parts.batch
    for x, _ in batch:
        loss = (parts.model(x).sum() * 0 + 60_000.0).half()
        batch.backward(mean=loss, count=4, model=parts.model)
    assert batch.finish(parts.model).loss == 60_000.0


def test_a_run_says_once_what_would_be_faster(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = SimpleNamespace(is_accelerator=lambda _: True, cuda_capability=lambda _: (9, 0))
    monkeypatch.setattr(speed_hints, "accelerator", gpu)
    monkeypatch.setattr("shoal.training.train_state.is_accelerator", lambda _: True)
    with parts.run(tmp_path) as run:
        for batch in parts.data.epochs(1):
            parts.take(batch)
            run.tick()
    printed = capsys.readouterr().out.splitlines()
    (line,) = [line for line in printed if "off and would make training faster" in line]
    assert "SGD(…, fused=True)" in line
    assert "set_float32_matmul_precision" in line
    assert "waits for the host" not in line  # as every loop does


@pytest.mark.parametrize(
    ("name", "loss", "count", "found"),
    [
        ("total", F.cross_entropy, 4, "it is a mean, not a sum"),
        ("total", lambda output, y: output.pow(2).mean(), torch.tensor(4), "it is a mean, not a sum"),
        (
            "mean",
            lambda output, y: F.cross_entropy(output, y, reduction="sum"),
            4,
            "it is a sum, not a mean",
        ),
    ],
)
def test_a_loss_whose_last_operation_is_the_other_reduction_raises(
    parts: Parts, name: str, loss: Callable[..., Tensor], count: Any, found: str
) -> None:
    batch = parts.batch
    x, y = next(iter(batch))
    with pytest.raises(StepError, match=found) as caught:
        batch.backward(**{name: loss(parts.model(x), y)}, count=count, model=parts.model)
    assert f"{'mean' if name == 'total' else 'total'}=loss" in caught.value.fix
    assert all(p.grad is None for p in parts.model.parameters())


@pytest.mark.parametrize(
    ("name", "loss", "count"),
    [
        ("total", F.cross_entropy, 1),  # the unit of the mean is the micro-batch
        ("total", lambda output, y: F.cross_entropy(output, y) * len(y), 4),
        ("total", lambda output, y: output[0, 0].mean(), 4),  # a mean over one element
        ("mean", lambda output, y: (output.pow(2) / output.numel()).sum(), 4),
        ("mean", lambda output, y: F.cross_entropy(output, y, reduction="sum") / len(y), 4),
    ],
)
def test_a_loss_that_may_be_what_it_is_named_is_accepted(
    parts: Parts, name: str, loss: Callable[..., Tensor], count: int
) -> None:
    batch = parts.batch
    for x, y in batch:
        batch.backward(**{name: loss(parts.model(x), y)}, count=count, model=parts.model)
    batch.finish(parts.model)


@pytest.mark.parametrize(("stepped", "clipped"), [(True, False), (False, False), (True, True)])
def test_gradients_that_were_not_cleared_raise_at_the_next_batch(
    parts: Parts, stepped: bool, clipped: bool
) -> None:
    first, second, third = parts.data.epochs(1)
    parts.backward(first)
    first.finish(parts.model)
    if clipped:
        torch.nn.utils.clip_grad_value_(parts.model.parameters(), 0.1)
    if stepped:
        parts.optimizer.step()
    with pytest.raises(StepError, match="would be added to those of this one: weight, bias") as caught:
        parts.take(second)
    assert "optimizer.step(), optimizer.zero_grad()" in caught.value.fix
    parts.take(third)


def test_gradients_of_parameters_that_no_optimizer_has_add_up_as_in_plain_torch(parts: Parts) -> None:
    weight, bias = parts.model.parameters()
    parts.optimizer = torch.optim.SGD([weight], lr=0.1)
    first, second, _ = parts.data.epochs(1)
    parts.take(first)
    assert bias.grad is not None
    before = bias.grad.clone()
    parts.take(second)
    assert weight.grad is None
    assert not torch.equal(bias.grad, before)


def test_gradients_cleared_before_the_optimizer_steps_raise_at_the_next_batch(parts: Parts) -> None:
    first, second, third = parts.data.epochs(1)
    parts.backward(first)
    first.finish(parts.model)
    parts.optimizer.zero_grad()
    parts.optimizer.step()
    with pytest.raises(StepError, match=r"cleared between batch\.finish and optimizer\.step"):
        parts.take(second)
    parts.take(third)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_finished_batch_may_be_skipped(parts: Parts, to_none: bool) -> None:
    first, second, third = parts.data.epochs(1)
    parts.backward(first)
    first.finish(parts.model)
    parts.optimizer.zero_grad(set_to_none=to_none)
    parts.take(second)
    parts.backward(third)
    third.finish(parts.model)
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=to_none)
    parts.optimizer.step()  # a second step without gradients takes nothing from the first
    parts.take(next(parts.data.epochs(2)))

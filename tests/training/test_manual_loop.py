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

    def step(self, loss: Callable[..., Any] | None = None, **options: Any) -> shoal.Step:
        return shoal.Step(self.model, self.optimizer, shoal.Task(loss or total), **options)

    def take(self, batch: shoal.Batch, *, finish: bool = True) -> None:
        for x, y in batch:
            loss = F.cross_entropy(self.model(x), y, reduction="sum")
            batch.backward(total=loss, count=len(y), model=self.model)
        if finish:
            batch.finish(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()


def total(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def mean(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1]), len(batch[1])


def gradients(world: shoal.World, reduction: str, count: Callable[[Tensor], Any]) -> tuple[Any, Tensor]:
    parts = Parts(world)
    batch = next(parts.data.epochs(1))
    for x, y in batch:
        loss = F.cross_entropy(parts.model(x), y, reduction=reduction)
        named = {"total" if reduction == "sum" else "mean": loss}
        batch.backward(**named, count=count(y), model=parts.model)
    result = batch.finish(parts.model)
    return result, torch.cat([p.grad.flatten() for p in parts.model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "count", [len, lambda y: torch.tensor(len(y)), lambda y: torch.tensor([len(y)])]
)
def test_a_mean_and_a_total_give_the_same_gradients(
    world: shoal.World, count: Callable[[Tensor], Any]
) -> None:
    first, of_sum = gradients(world, "sum", len)
    second, of_mean = gradients(world, "mean", count)
    torch.testing.assert_close(of_mean, of_sum)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert isinstance(first, shoal.StepResult)
    assert first._fields[:4] == ("loss", "norm", "counted", "skipped")
    assert first.counted == BATCH
    assert not first.skipped


@pytest.mark.parametrize(
    ("positional", "named", "given", "found"),
    [
        ((1.0, 4), {}, r"batch.backward\(…, …\)", "could be a sum or a mean"),
        ((1.0,), {"count": 4}, r"batch.backward\(…, count=…\)", "positional arguments"),
        ((), {"total": 1.0, "mean": 1.0, "count": 4}, "total=…, mean=…", "both a total and a mean"),
        ((), {"count": 4}, r"batch.backward\(count=…\)", "no loss"),
        ((), {"total": 1.0}, r"batch.backward\(total=…\)", "no count"),
        ((), {"mean": torch.ones(2), "count": 4}, "mean=…, count=…", r"a loss of shape \(2,\)"),
    ],
)
def test_a_loss_that_does_not_say_what_it_is_raises(
    world: shoal.World, positional: tuple[Any, ...], named: dict[str, Any], given: str, found: str
) -> None:
    parts = Parts(world)
    batch: Any = next(parts.data.epochs(1))
    next(iter(batch))
    tensors = [torch.tensor(each) if each == 1.0 else each for each in positional]
    if "mean" not in named or "total" in named:
        named = {name: torch.tensor(v) if v == 1.0 else v for name, v in named.items()}
    with pytest.raises(StepError, match=found) as caught:
        batch.backward(*tensors, **named)
    assert re.search(given, caught.value.given)
    assert "batch.backward(total=" in caught.value.fix


def test_the_loss_of_a_step_over_the_model_is_tried_in_its_loop(world: shoal.World) -> None:
    parts = Parts(world)
    step = parts.step(mean)
    before = [p.detach().clone() for p in parts.model.parameters()]
    with pytest.raises(StepError, match="it is a mean, not a sum"):
        parts.take(next(parts.data.epochs(1)))
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
    world: shoal.World, option: str, value: Any, fix: str
) -> None:
    parts = Parts(world)
    if option == "schedule":
        value = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1)
    step = parts.step(**{option: value})
    with pytest.raises(StepError, match=f"no effect: {option}") as caught:
        parts.take(next(parts.data.epochs(1)))
    assert re.search(fix, caught.value.fix)
    assert "step(batch)" in caught.value.fix
    assert step.number == 0
    del step, caught
    gc.collect()
    parts.take(next(parts.data.epochs(1)))  # a Step that no longer exists has no say


def test_a_forgotten_finish_raises_at_the_next_batch(world: shoal.World) -> None:
    parts = Parts(world)
    first, second, third = parts.data.epochs(1)
    parts.take(first, finish=False)
    with pytest.raises(
        StepError, match=r"stepped on the previous batch without batch\.finish"
    ) as caught:
        parts.take(second)
    assert caught.value.fix == "call batch.finish(model) before optimizer.step()"
    parts.take(third)


def test_a_batch_whose_gradients_were_cleared_without_a_step_is_skipped(world: shoal.World) -> None:
    parts = Parts(world)
    first, second, _ = parts.data.epochs(1)
    for x, y in first:
        first.backward(total=F.cross_entropy(parts.model(x), y, reduction="sum"), count=len(y))
    parts.optimizer.zero_grad()
    parts.take(second)


def trained(world: shoal.World, directory: Path, form: str, epochs: int) -> tuple[int, list[Tensor]]:
    """Training to the end of an epoch, saved by a Run of a Step or of a model."""
    parts = Parts(world)
    run = (
        shoal.Run(directory, parts.step(), parts.data, trackers=())
        if form == "step"
        else shoal.Run(directory, parts.model, parts.data, optimizer=parts.optimizer, trackers=())
    )
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
    with shoal.Run(
        tmp_path, models, first.data, optimizer=optimizers, schedule={"second": schedule}, trackers=()
    ) as run:
        for batch in first.data.epochs(1):
            first.take(batch)
            second.take(batch)
            schedule.step()
            run.tick()
        run.save()
    names = {name: state.number for name, state in run.train_states.items()}
    assert names == {"first": 3, "second": 3}
    schedule.load_state_dict(torch.optim.lr_scheduler.StepLR(second.optimizer, 1, 0.5).state_dict())
    with shoal.Run(
        tmp_path, models, first.data, optimizer=optimizers, schedule={"second": schedule}, trackers=()
    ) as run:
        run.restore()
        assert schedule.last_epoch == 3


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (lambda p: ((p.model, p.data), {}), "without optimizer="),
        (lambda p: ((p.step(), p.data), {"optimizer": p.optimizer}), "'step', which is not a model"),
        (lambda p: (({"a": p.model}, p.data), {"optimizer": {"b": p.optimizer}}), "'b', which is no"),
        (lambda p: ((nn.Linear(1, 1), p.data), {"optimizer": p.optimizer}), "no engine"),
        (lambda p: (("model", p.data), {}), "neither a Step nor a model"),
    ],
)
def test_what_a_run_cannot_save_raises(
    world: shoal.World, tmp_path: Path, arguments: Callable[[Parts], Any], found: str
) -> None:
    positional, named = arguments(Parts(world))
    with pytest.raises(StepError, match=found):
        shoal.Run(tmp_path, *positional, **named)


def scheduled(
    world: shoal.World, directory: Path, steps: Callable[[shoal.Batch], int], epochs: int = 2
) -> Any:
    """Train with a schedule that the loop steps `steps(batch)` times after each batch."""
    parts = Parts(world)
    schedule = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1, 0.5)
    with shoal.Run(
        directory, parts.model, parts.data, optimizer=parts.optimizer, schedule=schedule, trackers=()
    ) as run:
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


def test_a_model_is_evaluated_with_a_task(world: shoal.World) -> None:
    parts = Parts(world)
    found = shoal.evaluate(parts.model, (X, Y), task=shoal.Task(total))
    assert found == shoal.evaluate(parts.step(), (X, Y))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = shoal.evaluate(parts.model, (X, Y), task=shoal.Task(total))
    assert rounded["loss"] != found["loss"]
    assert rounded["loss"] == pytest.approx(found["loss"], rel=0.01)
    for wrong in (
        lambda: shoal.evaluate(parts.model, (X, Y)),
        lambda: shoal.evaluate(parts.step(), (X, Y), task=shoal.Task(total)),
    ):
        with pytest.raises(StepError, match="Task"):
            wrong()


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


def test_a_model_compiled_after_is_known_by_its_bare_model(world: shoal.World, tmp_path: Path) -> None:
    parts = Parts(world)
    whole: Any = compiled(parts.model, [])
    batch = next(parts.data.epochs(1))
    for x, y in batch:
        loss = F.cross_entropy(whole(x), y, reduction="sum")
        batch.backward(total=loss, count=len(y), model=whole)
    batch.finish(whole)
    parts.optimizer.step()
    seen: list[int] = []
    step = shoal.Step(compiled(parts.model, seen), parts.optimizer, shoal.Task(total))
    assert step.model is parts.model
    step(next(parts.data.epochs(1)))
    assert seen
    assert list(shoal.EMA(whole).state_dict()["averages"]) == ["weight", "bias"]
    path = shoal.export(whole, tmp_path / "model.safetensors")
    shoal.load(whole, path)


def test_models_that_can_only_be_compiled_in_parts_raise(world: shoal.World) -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    with pytest.raises(StepError, match="if parts of it are recomputed in backward"):
        shoal.parallelize(compiled(net, []), world, shoal.ActivationCheckpointing(modules=("0", "1")))


def test_a_skipped_batch_leaves_the_parameters_to_other_code(world: shoal.World) -> None:
    """Averages that are swapped in for an evaluation, or a state that is loaded, are no step."""
    parts = Parts(world)
    ema = shoal.EMA(parts.model)
    first, second, _ = parts.data.epochs(1)
    for x, y in first:
        first.backward(total=F.cross_entropy(parts.model(x), y, reduction="sum"), count=len(y))
    parts.optimizer.zero_grad()
    with ema.applied():
        pass
    parts.model.load_state_dict(parts.model.state_dict())
    parts.take(second)


def test_a_schedule_may_be_loaded_after_the_run_was_opened(world: shoal.World, tmp_path: Path) -> None:
    parts = Parts(world)
    schedule = torch.optim.lr_scheduler.StepLR(parts.optimizer, 100)
    state = {**schedule.state_dict(), "last_epoch": 40}
    with shoal.Run(
        tmp_path, parts.model, parts.data, optimizer=parts.optimizer, schedule=schedule, trackers=()
    ) as run:
        schedule.load_state_dict(state)
        for batch in parts.data.epochs(1):
            parts.take(batch)
            schedule.step()
            run.tick()
    assert schedule.last_epoch == 40 + SAMPLES // BATCH


def _clip(parts: Parts) -> None:
    nn.utils.clip_grad_norm_(parts.model.parameters(), 0.01)


@pytest.mark.parametrize(
    ("early", "found", "fix"),
    [
        (
            lambda parts: parts.optimizer.step(),
            "the optimizer stepped before it",
            "then optimizer.step",
        ),
        (_clip, "the gradients were changed", "batch.finish(model, clip=1.0)"),
    ],
    ids=["optimizer.step", "clip_grad_norm_"],
)
def test_what_belongs_after_finish_raises_before_it(
    world: shoal.World, early: Callable[[Parts], object], found: str, fix: str
) -> None:
    parts = Parts(world)
    batch = next(parts.data.epochs(1))
    for x, y in batch:
        loss = F.cross_entropy(parts.model(x), y, reduction="sum")
        batch.backward(total=loss, count=len(y), model=parts.model)
    early(parts)
    with pytest.raises(StepError, match=found) as caught:
        batch.finish(parts.model)
    assert fix in caught.value.fix


def test_a_mean_in_half_precision_is_multiplied_in_single_precision(world: shoal.World) -> None:
    parts = Parts(world)
    batch = next(parts.data.epochs(1))
    for x, _ in batch:
        loss = (parts.model(x).sum() * 0 + 60_000.0).half()
        batch.backward(mean=loss, count=4, model=parts.model)
    assert batch.finish(parts.model).loss == 60_000.0


def test_a_run_says_once_what_would_be_faster(
    world: shoal.World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu = SimpleNamespace(is_accelerator=lambda _: True, cuda_capability=lambda _: (9, 0))
    monkeypatch.setattr(speed_hints, "accelerator", gpu)
    monkeypatch.setattr("shoal.training.train_state.is_accelerator", lambda _: True)
    parts = Parts(world)
    with shoal.Run(
        tmp_path / "run", parts.model, parts.data, optimizer=parts.optimizer, trackers=()
    ) as run:
        for batch in parts.data.epochs(1):
            parts.take(batch)
            run.tick()
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "off and would make training faster" in line
    ]
    assert len(lines) == 1
    assert "SGD(…, fused=True)" in lines[0]
    assert "set_float32_matmul_precision" in lines[0]
    assert "waits for the host" not in lines[0]  # as every loop does

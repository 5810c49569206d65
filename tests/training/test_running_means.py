"""The means of `run.mean` are those of all steps of an epoch or a window, also over restarts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import sgd, squares, step_of, take
from shoal.util.errors import CheckpointError, StepError

pytestmark = pytest.mark.processes

EPOCHS, SIZES = 3, [4, 4, 2]
"""An epoch has three batches, of which the last is smaller."""


def data() -> tuple[Tensor]:
    return (torch.arange(10.0, dtype=torch.float64).reshape(10, 1) / 7,)


def run_in(world: shoal.World, directory: Path, **options: Any) -> tuple[shoal.Run, shoal.Step]:
    torch.manual_seed(0)
    step = step_of(world, nn.Linear(1, 1).double(), lr=0.001, **options)
    loader = shoal.Loader(data(), world, batch_size=4)
    return shoal.Run(directory, step, loader, trackers=()), step


def train(
    world: shoal.World, directory: Path, *, stop: int | None = None, save: int = 1, window: Any = None
) -> list[tuple[float, float, float]]:
    """Each step's loss, count and mean, up to the end or to step `stop`, as if killed there."""
    run, step = run_in(world, directory)
    run.restore()
    seen = []
    for batch in run.loader.epochs(EPOCHS):
        result = step(batch)
        means = run.mean(window=window, loss=result.loss)
        seen.append((result.loss, result.counted, means["loss"]))
        run.tick(every=save)
        assert run.mean(window=window) == means
        if step.number == stop:
            break
    run.files.checkpoints.background.wait()
    run.close()
    return seen


def means_of(seen: list[tuple[float, float, float]], window: int | None = None) -> list[float]:
    """The means, computed anew."""
    found = []
    for end in range(1, len(seen) + 1):
        begin = max(0, end - window) if window else (end - 1) // len(SIZES) * len(SIZES)
        used = seen[begin:end]
        found.append(sum(loss * n for loss, n, _ in used) / sum(n for _, n, _ in used))
    return found


@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
def test_the_mean_of_an_epoch_or_a_window(
    world: shoal.World, tmp_path: Path, window: int | None
) -> None:
    seen = train(world, tmp_path, window=window)
    assert [n for _, n, _ in seen] == SIZES * EPOCHS
    assert [mean for *_, mean in seen] == pytest.approx(means_of(seen, window), rel=1e-14)


@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("stop", range(1, len(SIZES) * EPOCHS))
def test_a_resumed_run_has_the_same_means(
    world: shoal.World, tmp_path: Path, stop: int, window: int | None
) -> None:
    whole = train(world, tmp_path / "whole", window=window)
    before = train(world, tmp_path / "parts", window=window, stop=stop)
    assert before + train(world, tmp_path / "parts", window=window) == whole


def test_steps_after_the_last_save_count_once(world: shoal.World, tmp_path: Path) -> None:
    whole = train(world, tmp_path / "whole", save=4)
    train(world, tmp_path / "parts", save=4, stop=5)
    assert train(world, tmp_path / "parts", save=4) == whole[4:]


def resumed(world: shoal.World, directory: Path, stop: int | None) -> list[float]:
    return [mean for *_, mean in train(world, directory, stop=stop)]


def test_they_resume_on_another_number_of_processes(
    ranks_of: Any, two: Ranks, world: shoal.World, tmp_path: Path
) -> None:
    whole = [mean for *_, mean in train(world, tmp_path / "whole")]
    first, same = two.call(resumed, tmp_path / "parts", 2)
    second = resumed(world, tmp_path / "parts", 5)
    third = ranks_of(3).call(resumed, tmp_path / "parts", None)
    assert first == same
    assert first + second + third[2] == pytest.approx(whole, rel=1e-12)


def test_the_means_of_an_ended_epoch_are_read_after_a_restart(
    world: shoal.World, tmp_path: Path
) -> None:
    *_, (*_, mean) = train(world, tmp_path, stop=3)
    with run_in(world, tmp_path)[0] as run:
        run.restore()
        assert run.mean() == {"loss": mean}


def test_numbers_of_all_kinds_and_pairs(world: shoal.World, tmp_path: Path) -> None:
    run, step = run_in(world, tmp_path)
    with run:
        assert run.mean() == {}
        for number, batch in enumerate(run.loader.epochs(1)):
            step(batch)
            means = run.mean(
                integer=number,
                tensor=torch.tensor([[float(number)]]),
                array=np.float32(number),
                pair=(torch.tensor(3), np.int64(number)),
            )
            run.tick()
    mean = (0 * 4 + 1 * 4 + 2 * 2) / 10
    assert means == {"integer": mean, "tensor": mean, "array": mean, "pair": 3.0}


def test_a_count_of_zero_has_no_mean_yet(world: shoal.World, tmp_path: Path) -> None:
    run, step = run_in(world, tmp_path)
    with run:
        step(next(run.loader.epochs(1)))
        assert math.isnan(run.mean(tokens=(0.0, 0))["tokens"])


def test_skipped_steps_do_not_count(world: shoal.World, tmp_path: Path) -> None:
    model = shoal.parallelize(nn.Linear(1, 1), world)
    step = shoal.Step(model, sgd(model), shoal.Task(squares), precision="fp16")
    loader = shoal.Loader((torch.ones(12, 1),), world, batch_size=4)
    assert step._scale is not None
    with shoal.Run(tmp_path, step, loader, trackers=()) as run:
        for number, batch in enumerate(loader.epochs(1)):
            step._scale.value = 2.0**127 if number == 1 else 1.0
            skipped = step(batch).skipped
            assert skipped is (number == 1)
            means = run.mean(number=math.nan if skipped else number)
            window = run.mean(number=number, window=2)
            run.tick()
    assert means == window == {"number": 1.0}


def test_steps_that_are_bad_or_rolled_back_do_not_count(world: shoal.World, tmp_path: Path) -> None:
    """Batches 6 to 8 are not finite: the third of them takes the run back to step 4."""
    values = torch.ones(48, 1)
    values[24:36] = math.nan
    step = step_of(world, nn.Linear(1, 1), lr=0.001)
    loader = shoal.Loader((values,), world, batch_size=4, shuffle=False)
    checks = {"continuity": False, "replicas": False, "gradients": False}
    guards = shoal.Guards(**checks, bad_steps=shoal.BadSteps())
    taken = []
    with shoal.Run(tmp_path, step, loader, trackers=(), guards=guards) as run:
        for batch in loader.epochs(1):
            result = step(batch)
            means = run.mean(loss=result.loss, first=batch.first)
            taken.append(batch.first // 4)
            run.tick(every=4)
    assert taken == [*range(9), 4, 5, 9, 10, 11]
    assert means["first"] == 4 * sum([*range(6), 9, 10, 11]) / 9
    assert math.isfinite(means["loss"])


def test_late_results(world: shoal.World, tmp_path: Path) -> None:
    def losses(result: str) -> list[float]:
        torch.manual_seed(0)
        model = shoal.parallelize(nn.Linear(1, 1).double(), world)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = shoal.Step(model, optimizer, shoal.Task(squares), result=result)
        loader, seen = shoal.Loader(data(), world, batch_size=4), []
        with shoal.Run(tmp_path / result, step, loader, trackers=()) as run:
            for batch in loader.epochs(2):
                seen.append(run.mean(loss=step(batch).loss)["loss"])
                run.tick(every=1)
        return seen

    assert losses("late") == losses("now")


def test_custom_loops_and_several_models(world: shoal.World, tmp_path: Path) -> None:
    """A value with the name of a model has the count of its loss."""
    models = {name: shoal.parallelize(nn.Linear(1, 1).double(), world) for name in ("a", "b")}
    optimizers = {name: sgd(model, 0.001) for name, model in models.items()}
    loader = shoal.Loader(data(), world, batch_size=4)
    totals = {"a": 0.0, "b": 0.0}

    def twice(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return output.square().sum(), 2 if len(output) == 2 else 12

    with shoal.Run(tmp_path, models, loader, optimizer=optimizers, trackers=()) as run:
        for batch in loader.epochs(1):
            results = {
                name: take(batch, models[name], optimizers[name], loss)
                for name, loss in (("a", squares), ("b", twice))
            }
            for name, result in results.items():
                totals[name] += result.loss * result.counted
            means = run.mean(a=results["a"].loss, b=results["b"].loss)
            run.tick()
    assert means == pytest.approx({"a": totals["a"] / 10, "b": totals["b"] / 26})


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"loss": "0.5"}, "'loss' is '0.5', not a number"),
        ({"loss": None}, "'loss' is None, not a number"),
        ({"loss": torch.ones(3)}, "a tensor of 3 elements, not a number"),
        ({"loss": (1.0, 2.0, 3.0)}, "not a number"),
        ({"loss": (1.0, "all")}, "'loss' is 'all', not a number"),
        ({"loss": math.nan}, "not a finite number"),
        ({"loss": torch.tensor(math.inf)}, "not a finite number"),
        ({"loss": (1.0, -1)}, "a count below 0"),
        ({"loss": (1.0, math.nan)}, "a count below 0"),
        ({"loss": 1.0, "window": 0}, "an integer, 1 or more"),
        ({"window": 2.5}, "an integer, 1 or more"),
        ({"window": "epoch"}, "an integer, 1 or more"),
    ],
)
def test_bad_values(world: shoal.World, tmp_path: Path, values: dict[str, Any], found: str) -> None:
    run, step = run_in(world, tmp_path)
    with run:
        step(next(run.loader.epochs(1)))
        with pytest.raises(StepError, match=found):
            run.mean(**values)


def test_a_step_has_one_value_before_the_tick(world: shoal.World, tmp_path: Path) -> None:
    run, step = run_in(world, tmp_path)
    with run:
        with pytest.raises(StepError, match="no step since the last"):
            run.mean(loss=1.0)
        batches = run.loader.epochs(1)
        step(next(batches))
        run.mean(loss=1.0)
        run.mean(loss=1.0, window=2)
        run.mean(other=1.0)
        with pytest.raises(StepError, match="has a value already"):
            run.mean(loss=1.0)
        run.tick()
        with pytest.raises(StepError, match=r"no step since the last run.tick") as caught:
            run.mean(loss=1.0)
        assert "before run.tick()" in caught.value.fix
        assert run.mean() == {"loss": 1.0, "other": 1.0}
    with pytest.raises(StepError, match="closed"):
        run.mean()


def test_a_save_before_the_value_is_replaced(world: shoal.World, tmp_path: Path) -> None:
    run, step = run_in(world, tmp_path)
    with run:
        step(next(run.loader.epochs(1)))
        run.save()
        run.mean(loss=1.5)
        run.save()
    with run_in(world, tmp_path)[0] as again:
        again.restore()
        assert again.mean() == {"loss": 1.5}


def test_a_checkpoint_without_means_is_restored(world: shoal.World, tmp_path: Path) -> None:
    """Those of 0.1.0 have none."""
    run, step = run_in(world, tmp_path)
    with run:
        take_state = run.contents.take
        run.contents.take = lambda position: without_means(take_state(position))  # type: ignore[method-assign]
        step(next(run.loader.epochs(1)))
        run.save()
    with run_in(world, tmp_path)[0] as again:
        assert again.restore() is not None
        assert again.mean() == {}


def without_means(taken: dict[str, Any]) -> dict[str, Any]:
    del taken["state"]["means"]
    return taken


def with_local_values(world: shoal.World, directory: Path) -> None:
    run, step = run_in(world, directory)
    with run:
        step(next(run.loader.epochs(1)))
        run.mean(rank=float(world.rank))
        run.save()


def test_values_that_differ_between_ranks_raise_at_the_save(two: Ranks, tmp_path: Path) -> None:
    for error in two.errors(CheckpointError, with_local_values, tmp_path):
        assert "run.mean(" in error.given
        assert "global batch" in error.fix


def test_the_progress_line_shows_them(
    world: shoal.World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, step = run_in(world, tmp_path)
    with run:
        for number, batch in enumerate(run.loader.epochs(1)):
            step(batch)
            run.mean(loss=number, accuracy=(number, 4))
            run.tick()
    assert "loss 0.8 · accuracy 0.25" in capsys.readouterr().out.splitlines()[-1]

"""Runs at the edges of what is usual: loops left early, directories of others, ranks' own state."""

from __future__ import annotations

import copy
import errno
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import RankError, Ranks
from shoal.util.errors import AgreementError, CheckpointError, DataError, LaunchError, StepError

pytestmark = pytest.mark.processes

SAMPLES, BATCH = 20, 5


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def parts(world: shoal.World) -> tuple[shoal.Step, shoal.Loader]:
    torch.manual_seed(0)
    model = shoal.parallelize(nn.Linear(2, 1), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    values = torch.arange(2.0 * SAMPLES).view(SAMPLES, 2) / SAMPLES
    return step, shoal.Loader((values,), world, batch_size=BATCH)


@pytest.mark.parametrize("raw", [False, True])
def test_a_batch_that_no_step_took_is_not_missed(world: shoal.World, tmp_path: Path, raw: bool) -> None:
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        for batch in data.epochs(1):
            if step.number == 2:
                break
            if raw:
                for micro in batch:
                    total, count = loss(step.model(micro[0]), micro)
                    batch.backward(total=total, count=count, model=step.model)
                batch.finish(step.model)
                step.optimizer.step()
                step.optimizer.zero_grad()
            else:
                step(batch)
            run.tick()
        run.save()
        restored = run.restore()
    assert restored is not None
    assert restored.position == 2 * BATCH
    assert next(data.epochs(1)).first == 2 * BATCH


@pytest.mark.parametrize("workers", [0, 1])
def test_a_restore_within_the_loop_goes_on_from_there(
    world: shoal.World, tmp_path: Path, workers: int
) -> None:
    step, data = parts(world)
    data = shoal.Loader((torch.ones(SAMPLES, 2),), world, batch_size=BATCH, num_workers=workers)
    seen: list[tuple[int, int]] = []
    with shoal.Run(tmp_path, step, data) as run:
        for batch in data.epochs(2):
            step(batch)
            run.tick(every=2)
            seen.append((step.number, batch.first))
            if len(seen) == 5:  # a loss that has gone wrong, perhaps
                restored = run.restore()
                assert restored is not None
                assert restored[:2] == (4, 20)
    assert seen == [(1, 0), (2, 5), (3, 10), (4, 15), (5, 20), (5, 20), (6, 25), (7, 30), (8, 35)]


def test_batches_finished_between_ticks_are_all_counted(world: shoal.World, tmp_path: Path) -> None:
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        for number, batch in enumerate(data.epochs(1)):
            for micro in batch:
                total, count = loss(step.model(micro[0]), micro)
                batch.backward(total=total, count=count, model=step.model)
            batch.finish(step.model)
            step.optimizer.step()
            step.optimizer.zero_grad()
            if number % 2:
                run.tick()
        assert step.number == SAMPLES // BATCH
        step(batch)
        for micro in batch:
            total, count = loss(step.model(micro[0]), micro)
            batch.backward(total=total, count=count, model=step.model)
        batch.finish(step.model)
        last = step(batch)
        assert step.last == last
        assert step.number == SAMPLES // BATCH + 3


def test_what_was_finished_after_a_save_is_not_counted_after_its_restore(
    world: shoal.World, tmp_path: Path
) -> None:
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        first, second, *_ = data.epochs(1)
        step(first)
        run.save()
        for micro in second:
            total, count = loss(step.model(micro[0]), micro)
            second.backward(total=total, count=count, model=step.model)
        second.finish(step.model)
        run.restore()
        run.tick()
    assert step.number == 1


def test_a_script_may_change_its_working_directory(
    world: shoal.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    step, data = parts(world)
    with shoal.Run("a", step, data) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick(every=1)
            monkeypatch.chdir(tmp_path / "elsewhere")
            world.log({"rate": 0.1})
        assert run.save() == Path("a/checkpoints/step-4")
        assert run.save(to="best") == Path("a/best/step-4")
        restored = run.restore()
    assert restored is not None
    assert restored.path == Path("a/checkpoints/step-4")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "a" / "checkpoints" / "step-4").is_dir()


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "3"},
        {"keep": 2.5},
        {"keep_every": 2.5},
        {"config": ["rate"]},
        {"config": {1: 2}},
        {"state": [1]},
        {"state": {1: nn.Linear(1, 1)}},
        {"state": {"a": object()}},
        {"state": {"a": nn.Linear}},
    ],
)
def test_options_that_can_not_be(world: shoal.World, tmp_path: Path, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(CheckpointError) as refused:
        shoal.Run(tmp_path, *parts(world), **options)
    assert f"{name}=" in refused.value.given
    assert not (tmp_path / "lock").exists()


class Settings(dict[str, Any]):
    """A configuration as a library has it: a class derived from dict."""


def test_a_config_of_a_class_derived_from_dict_is_kept_as_a_dict(
    world: shoal.World, tmp_path: Path
) -> None:
    config = Settings(
        model=Settings(width=8, layers=[Settings(rate=0.1)], token="a secret token"), data=tmp_path
    )
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data, config=config) as run:
        step(next(data.epochs(1)))
        run.tick()
        run.save()
    text = (tmp_path / "checkpoints/step-1/manifest.json").read_text().replace(" ", "")
    assert '"width":8' in text
    assert '"rate":0.1' in text
    assert f'"data":"{tmp_path}"' in text
    assert "a secret token" not in text
    assert "a secret token" not in (tmp_path / "events/rank-0.jsonl").read_text()


@pytest.mark.parametrize("name", ["checkpoints", "events", "", ".", "../b", "a/b", "/b", "a\nb", 3])
def test_where_a_run_keeps_nothing_apart(world: shoal.World, tmp_path: Path, name: Any) -> None:
    step, data = parts(world)
    with shoal.Run(tmp_path / "a", step, data) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick(every=1)
        with pytest.raises(CheckpointError, match="next to checkpoints/"):
            run.save(to=name)
    assert len(list((tmp_path / "a" / "checkpoints").iterdir())) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_directory_of_an_earlier_training_is_not_trained_in_from_the_start(
    world: shoal.World, tmp_path: Path
) -> None:
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        step(next(data.epochs(1)))
        run.tick(every=1)
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        step(next(data.epochs(1)))
        for use in (run.tick, run.save):
            with pytest.raises(CheckpointError, match=r"the latest: step-1(.|\n)*run.restore\(\)"):
                use()
        assert run.restore() is not None


def test_a_closed_run_says_so(world: shoal.World, tmp_path: Path) -> None:
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        pass
    for use in (run.tick, run.save, run.restore):
        with pytest.raises(StepError, match=r"inside `with shoal\.Run"):
            use()


def after_the_end(world: shoal.World) -> list[str]:
    """What a world of two says when it is used after its end; the test's own world goes on."""
    closed = copy.copy(world)
    closed.group = None
    step, _ = parts(world)
    step.engine.world = closed
    found = []
    for use in (
        lambda: shoal.evaluate(step, (torch.ones(3, 2),)),
        lambda: closed.gather(1),
        lambda: closed.broadcast(1),
        lambda: closed.all_reduce(torch.ones(1)),
        closed.barrier,
    ):
        try:
            use()
        except LaunchError as error:
            found.append(error.found)
    return found


@pytest.mark.full
def test_a_world_that_has_ended_gives_no_parts_for_the_whole(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.call(after_the_end)):
        assert found == [f"rank {rank} has left the group and would use its local batch only"] * 5


def other_data(world: shoal.World, samples: int, shift: float, directory: Path) -> None:
    model = shoal.parallelize(nn.Linear(2, 1), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    inputs = torch.ones(SAMPLES + world.rank * samples, 2)
    inputs[-1] += world.rank * shift
    shoal.Run(directory, step, shoal.Loader((inputs,), world, batch_size=BATCH))


@pytest.mark.parametrize(
    ("samples", "shift", "found"), [(1, 0.0, "the loader's "), (0, 0.5, "the loader's samples: ")]
)
def test_other_data_on_one_rank_is_named(
    samples: int, shift: float, found: str, ranks: Ranks, tmp_path: Path
) -> None:
    for result in ranks.attempt(other_data, samples, shift, tmp_path):
        assert isinstance(result, RankError)
        assert isinstance(result.error, AgreementError)
        assert result.error.given.startswith(found)
        assert "on rank 1 (" in result.error.found


def test_data_that_changed_since_are_noticed(world: shoal.World) -> None:
    inputs = torch.zeros(SAMPLES, 2, dtype=torch.bfloat16)
    state = shoal.Loader((inputs,), world, batch_size=BATCH).state_dict()
    shoal.Loader((inputs.clone(),), world, batch_size=BATCH).check_state(state)
    inputs[SAMPLES // 2, 1] = 1
    with pytest.raises(DataError, match="samples of checksum"):
        shoal.Loader((inputs,), world, batch_size=BATCH).check_state(state)


@pytest.mark.parametrize(
    ("samples", "shift", "found"),
    [(SAMPLES - 1, 0.0, "20 samples"), (SAMPLES + 1, 0.0, "20 samples"), (SAMPLES, 1.0, "checksum")],
)
def test_a_run_does_not_resume_on_other_data(
    samples: int, shift: float, found: str, world: shoal.World, tmp_path: Path
) -> None:
    """FAILURES 32: a dataset that shrank, grew or changed; model and optimizer stay as they were."""
    step, data = parts(world)
    with shoal.Run(tmp_path, step, data) as run:
        step(next(iter(data.epochs(1))))
        run.tick()
        run.save()
    again, _ = parts(world)
    before = copy.deepcopy(again.model.state_dict())
    values = torch.arange(2.0 * samples).view(samples, 2) / SAMPLES
    values[samples // 2] += shift
    other = shoal.Loader((values,), world, batch_size=BATCH)
    with shoal.Run(tmp_path, again, other) as run, pytest.raises(DataError, match=found):
        run.restore()
    assert (other.position, again.number) == (0, 0)
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, before[name])


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_on_a_full_disk_ends_no_training(
    world: shoal.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, data = parts(world)
    monkeypatch.setattr("sys.stdout", FullDisk())
    with shoal.Run(tmp_path, step, data) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick()
        world.print("trained")
        assert run.save().is_dir()


def train_where_the_directory_goes(world: shoal.World, directory: Path, every: int | None) -> None:
    step, data = parts(world)
    with shoal.Run(directory, step, data, trackers=()) as run:
        for batch in data.epochs(1):
            step(batch)
            if step.number == 2:
                world.barrier()
                if world.is_rank_zero:
                    shutil.rmtree(directory)
                world.barrier()
            run.tick(every=every)


@pytest.mark.parametrize("every", [3, None])
def test_a_run_whose_directory_is_removed_ends_with_an_error(
    ranks: Ranks, tmp_path: Path, every: int | None
) -> None:
    """At the next save, or when the Run is closed."""
    directory = tmp_path / "run"
    with pytest.raises(AssertionError, match=f"{directory} was removed while the run was open"):
        ranks.call(train_where_the_directory_goes, directory, every)
    assert not directory.exists()

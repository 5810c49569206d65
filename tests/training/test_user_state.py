"""State that goes along with a Run: the same on all ranks, or its entry is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import sgd, squares
from shoal.util.errors import CheckpointError

pytestmark = pytest.mark.processes


class Kept:
    """User state of any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class PerRank(Kept):
    """A value of each rank, as the message of the error says."""

    def __init__(self, world: shoal.World, value: Any) -> None:
        super().__init__(value)
        self.world = world

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": self.world.gather(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["ranks"][self.world.rank]


def built(
    world: shoal.World, model: nn.Module, strategy: Any = None
) -> tuple[shoal.Step, shoal.Loader]:
    model = shoal.parallelize(model, world, strategy)
    step = shoal.Step(model, sgd(model), shoal.Task(squares, inputs=lambda batch: (batch[0],)))
    return step, shoal.Loader((torch.ones(32, 8),), world, batch_size=8, micro_batches=2)


def saved(world: shoal.World, directory: Path, kind: str, strategy: Any = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    step, data = built(world, model, strategy)
    values: dict[str, Any] = {
        "same": torch.ones(2),
        "last bits": 1.0 + 1e-9 * world.rank,
        "tensor": torch.full((2,), float(world.rank)),
        "number": world.rank,
        "list": [0] * world.rank,
        "stages as a list": list(step.model.parameters()),
        "stages by name": dict(step.model.named_parameters()),
    }
    value = values.get(kind, f"of rank {world.rank}")
    state = PerRank(world, value) if kind == "every rank" else Kept(value)
    with shoal.Run(directory, step, data, state={"mine": state}) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick()
        run.save()
        state.value = None
        run.restore()
    return state.value


@pytest.mark.parametrize("kind", ["tensor", "number", "list"])
def test_state_that_differs_between_ranks_is_refused(kind: str, two: Ranks, tmp_path: Path) -> None:
    for refused in two.attempt(saved, tmp_path, kind):
        assert "CheckpointError" in str(refused)
        assert "state={'mine': Kept}), at mine/value" in str(refused)
        assert "rank 1 of 2 would save a different value" in str(refused)
        assert "world.gather(value)" in str(refused)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("kind", ["same", "last bits", "every rank"])
def test_state_that_is_the_same_on_all_ranks_is_kept(kind: str, two: Ranks, tmp_path: Path) -> None:
    first, second = two.call(saved, tmp_path, kind)
    if kind == "every rank":
        assert (first, second) == ("of rank 0", "of rank 1")
    else:
        assert first is not None
        assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))


def test_averages_of_ranks_that_step_alone_are_saved(two: Ranks, tmp_path: Path) -> None:
    first, second = two.call(saved, tmp_path, "tensor", shoal.LocalSGD(sync_every=100))
    assert torch.equal(first, second)  # those of rank 0


def test_state_of_stages_is_kept_by_name_and_refused_in_a_list(two: Ranks, tmp_path: Path) -> None:
    two.divide("pipeline=-1")
    split = shoal.Pipeline(split_points=("2",))
    for refused in two.attempt(saved, tmp_path / "list", "stages as a list", split):
        assert "at mine/value/0" in str(refused)
        assert "a dict keyed by parameter name" in str(refused)
    for found in two.call(saved, tmp_path / "dict", "stages by name", split):
        # Of an object that had nothing, and so left nothing to the others.
        assert {name.split(".")[0] for name in found} == {"0", "1", "2", "3"}


class Library(nn.Linear):
    """A model whose state_dict says how it was built, as that of a library does."""

    built: ClassVar[Any] = {
        "args": (8, 8),
        "layer": nn.Linear,
        "act": torch.relu,
        "dtype": torch.float32,
    }

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["_metadata"] = self.built
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        assert state_dict.pop("_metadata") == self.built
        return super().load_state_dict(state_dict, *args, **kwargs)


class Other(Library):
    built: ClassVar[Any] = {**Library.built, "layer": nn.Bilinear}


class Odd(Library):
    built: ClassVar[Any] = {"handle": object()}


def trained(world: shoal.World, model: nn.Module, directory: Path) -> Tensor:
    step, data = built(world, model)
    with shoal.Run(directory, step, data) as run:
        if run.restore() is None:
            for batch in data.epochs(1):
                step(batch)
                run.tick(every=1)
    weight = step.model.get_parameter("weight")
    return weight.detach().clone()


def test_a_run_keeps_a_model_whose_state_dict_holds_classes(world: shoal.World, tmp_path: Path) -> None:
    weight = trained(world, Library(8, 8), tmp_path)
    assert torch.equal(trained(world, Library(8, 8), tmp_path), weight)
    with pytest.raises(CheckpointError, match=r"has class torch.*Bilinear at _metadata\.layer"):
        trained(world, Other(8, 8), tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_an_entry_that_no_checkpoint_can_hold_is_refused_at_once(
    world: shoal.World, tmp_path: Path, nested: bool
) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"handle": object()}

    model = nn.Sequential(nn.ReLU(), Extra(8, 8)) if nested else Odd(8, 8)
    step, data = built(world, model)
    with pytest.raises(CheckpointError, match=r"a value of type builtins\.object") as refused:
        shoal.Run(tmp_path, step, data)
    entry, owner = ("'1._extra_state'", "a Extra at 1") if nested else ("'_metadata'", "a Odd")
    assert f"the entry {entry}, of {owner}" in refused.value.given
    assert not (tmp_path / "lock").exists()

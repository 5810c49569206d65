"""Parameter groups that change during training, and several optimizers: saved and resumed anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import shoal
from helpers.ranks import Ranks, several_ranks
from helpers.reference import SEED, TOLERANCE
from shoal.strategies.dtensor import whole

SAMPLES, BATCH, STEPS = 24, 8, 6


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers = (nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
        return nn.Sequential(*layers).double()


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(batch[1])


def initial(model: Any) -> list[Optimizer]:
    """The layers but the first; the optimizer state of each begins at a different step."""
    groups: list[dict[str, Any]] = [
        {"params": [*model[2].parameters()]},
        {"params": [*model[4].parameters()], "lr": 0.02},
    ]
    return [AdamW(groups, lr=0.01)]


def change(step: int, model: Any, optimizer: Optimizer) -> None:
    """What the script does before each step."""
    groups = optimizer.param_groups
    if step == 1:  # unfreeze
        optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.005})
    if step == 2:  # split
        bias = groups[1]["params"].pop()
        optimizer.add_param_group({"params": [bias], "lr": 0.04, "weight_decay": 0.0})
    if step == 3:  # freeze, with its state for later
        del groups[0]
    if step == 5:
        optimizer.add_param_group({"params": [*model[2].parameters()][::-1], "lr": 0.03})


def several(model: Any) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [torch.optim.Muon(matrices, lr=0.02), SGD(others, lr=0.01, momentum=0.9)]


Change = Callable[[int, Any, Optimizer], None]
CASES: dict[str, tuple[Callable[[Any], list[Optimizer]], Change]] = {
    "changed": (initial, change),
    "several": (several, lambda step, model, optimizer: None),
}
SCHEDULE = shoal.LRSchedule(decay="linear", warmup_steps=2, min_ratio=0.5)


@cache
def expected(case: str) -> dict[str, Tensor]:
    """In plain torch, on one process."""
    make, changed = CASES[case]
    model, (inputs, targets) = network(), samples()
    optimizers = make(model)
    rates = [SCHEDULE(each, STEPS) for each in optimizers]
    batches = (
        part
        for epoch in itertools.count()
        for part in torch.from_numpy(
            shoal.Permutation(SAMPLES, seed=SEED, epoch=epoch).indices(0, SAMPLES)
        ).split(BATCH)
    )
    for step, indices in zip(range(STEPS), batches, strict=False):
        changed(step, model, optimizers[0])
        total, count = loss(model(inputs[indices]), (None, targets[indices]))
        model.zero_grad()
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each, rate in zip(optimizers, rates, strict=True):
            each.step()
            rate.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(world: shoal.World, case: str, directory: Path, end: int) -> float:
    """Train, or continue, up to a step; how far the parameters then are from the end on one process."""
    make, changed = CASES[case]
    model = shoal.parallelize(network(), world)
    optimizers = make(model)
    rates = [SCHEDULE(each, STEPS) for each in optimizers]
    step = shoal.Step(model, optimizers, shoal.Task(loss), clip=0.5, schedule=rates)
    loader = shoal.Loader(samples(), world, batch_size=BATCH, seed=SEED)
    with shoal.Run(directory, step, loader, keep=1) as run:
        run.restore()
        for batch in loader.epochs(2):
            if step.number == end:
                break
            changed(step.number, model, optimizers[0])
            step(batch)
            run.tick()
        run.save()
    right = expected(case)
    ends = {n: whole(p.detach()) for n, p in model.named_parameters()}
    return max(float((value - right[n]).abs().max()) for n, value in ends.items())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int, str], Ranks]]:
    with several_ranks(seed=SEED) as started:
        yield started


@pytest.mark.parametrize(("case", "at"), [("several", 3), *(("changed", at) for at in range(1, STEPS))])
def test_one_process_resumes_from_any_step(case: str, at: int, tmp_path: Path) -> None:
    for end in (at, STEPS):
        with shoal.init(device="cpu", seed=SEED) as world:
            error = train(world, case, tmp_path, end)
    assert error < TOLERANCE


WAYS = [
    ((2, "shard=2"), (3, "replicate=3")),
    ((3, "shard=3"), (2, "shard=2")),
    ((2, "replicate=2"), (3, "shard=3")),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("before", "after", "at"),
    [
        pytest.param(*way, at, marks=[] if (number, at) == (0, 4) else pytest.mark.long)
        for number, way in enumerate(WAYS)
        for at in range(1, STEPS)
    ],
)
def test_other_ranks_resume(
    ranks: Callable[[int, str], Ranks],
    case: str,
    before: tuple[int, str],
    after: tuple[int, str],
    at: int,
    tmp_path: Path,
) -> None:
    ranks(*before).call(train, case, tmp_path, at)
    for error in ranks(*after).call(train, case, tmp_path, STEPS):
        assert error < TOLERANCE


def test_the_script_may_build_the_groups_of_the_checkpoint(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    (optimizer,) = initial(model)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    change(1, model, optimizer)
    state = step.state_dict()
    again = initial(model)[0]
    change(1, model, again)
    shoal.Step(model, again, shoal.Task(loss)).load_state_dict(state)
    assert [len(group["params"]) for group in again.param_groups] == [2, 2, 2]


def test_a_run_goes_back_to_former_groups(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    (optimizer,) = initial(model)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    state = step.state_dict()
    for number in (1, 2, 3):
        change(number, model, optimizer)
    step.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert optimizer.param_groups[0]["params"] == [*model.get_submodule("2").parameters()]


def test_groups_of_another_script_are_refused(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    step = shoal.Step(model, initial(model), shoal.Task(loss))
    other = AdamW([{"params": [*model[0].parameters()]}, {"params": [*model[4].parameters()]}])  # type: ignore[index]
    message = r"missing in it: 0\.weight, 0\.bias; unexpected: 2\.weight, 2\.bias"
    with pytest.raises(shoal.CheckpointError, match=message):
        shoal.Step(model, other, shoal.Task(loss)).load_state_dict(step.state_dict())


def test_a_parameter_in_two_optimizers_is_refused(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    both = [SGD(model.parameters(), lr=0.1), AdamW(model[4].parameters())]  # type: ignore[index]
    with pytest.raises(shoal.StepError, match=r"SGD and AdamW(.|\n)*4\.weight, 4\.bias"):
        shoal.Step(model, both, shoal.Task(loss))
    with pytest.raises(shoal.StepError, match="an empty list of optimizers"):
        shoal.Step(model, [], shoal.Task(loss))


def test_the_fix_for_other_optimizers_is_code(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    state = shoal.Step(model, several(model), shoal.Task(loss)).state_dict()
    with pytest.raises(shoal.CheckpointError) as caught:
        shoal.Step(model, AdamW(model.parameters()), shoal.Task(loss)).load_state_dict(state)
    assert caught.value.found == "the checkpoint has the state of Muon and SGD"
    assert caught.value.fix.startswith("use Muon and SGD, or start a new run")


def step_with(world: shoal.World, *schedules: int) -> shoal.Step:
    """A Step with schedules of these two optimizers."""
    model = shoal.parallelize(network(), world)
    optimizers = several(model)
    rates = [SCHEDULE(optimizers[number], STEPS) for number in schedules]
    return shoal.Step(model, optimizers, shoal.Task(loss), schedule=rates)


def test_no_schedule_is_one_of_them(world: shoal.World) -> None:
    step = step_with(world)
    step(next(shoal.Loader(samples(), world, batch_size=SAMPLES).epochs(1)))
    assert "schedule" not in step.state_dict()


@pytest.mark.parametrize(("saved", "resumed"), [((0, 1), (1,)), ((1,), (0, 1))])
def test_another_number_of_schedules_is_no_resume(
    saved: tuple[int, ...], resumed: tuple[int, ...], world: shoal.World
) -> None:
    state = step_with(world, *saved).state_dict()
    found = rf"a Step with {len(resumed)} schedule\(s\)(.|\n)*a checkpoint with {len(saved)}"
    with pytest.raises(shoal.CheckpointError, match=found):
        step_with(world, *resumed).load_state_dict(state)


def test_a_schedule_of_another_optimizer_has_the_users_name(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    optimizers, others = several(model), several(model)
    with pytest.raises(shoal.StepError) as caught:
        shoal.Step(model, optimizers, shoal.Task(loss), schedule=[SCHEDULE(others[0], STEPS)])
    assert caught.value.given == "schedule=LRScheduleRates"
    assert caught.value.found == "its Muon is not the one given: Muon and SGD"


def test_a_custom_loop_saves_several(world: shoal.World, tmp_path: Path) -> None:
    found = []
    for name in ("a", "b", "b"):  # at once, or in two runs
        model = shoal.parallelize(network(), world)
        optimizers = several(model)
        loader = shoal.Loader(samples(), world, batch_size=BATCH, seed=SEED)
        with shoal.Run(tmp_path / name, model, loader, optimizer=optimizers) as run:
            run.restore()
            for batch in loader.epochs(1):
                for micro in batch:
                    total, count = loss(model(micro[0]), micro)
                    batch.backward(total=total, count=count, model=model)
                batch.finish(model)
                for each in optimizers:
                    each.step()
                    each.zero_grad()
                run.tick(every=1)
                if name == "b" and run.step == 2:
                    break
        found.append(model.state_dict())
    assert all(torch.equal(found[0][name], value) for name, value in found[2].items())


def test_the_built_in_loop_takes_several(world: shoal.World, tmp_path: Path) -> None:
    done = shoal.train(
        network(),
        shoal.Task(loss),
        samples(),
        directory=tmp_path,
        optimizer=several,
        schedule=SCHEDULE,
        clip=0.5,
        batch_size=BATCH,
        steps=STEPS,
        world=world,
    )
    rates = [group["lr"] for group in done.step.optimizer.param_groups]
    assert rates == pytest.approx([0.01, 0.005])


SERIES = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def test_a_schedule_may_be_that_of_one_of_them(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    optimizers = several(model)
    rates = SERIES(optimizers[1])
    step = shoal.Step(model, optimizers, shoal.Task(loss), schedule=rates, schedule_interval="step")
    (batch, *_) = shoal.Loader(samples(), world, batch_size=SAMPLES).epochs(1)
    step(batch)
    assert [group["lr"] for group in step.optimizer.param_groups] == [0.02, 0.005]


def test_a_state_of_the_first_release_is_loaded(world: shoal.World) -> None:
    """It has one optimizer, whose groups never changed."""
    model = shoal.parallelize(network(), world)
    step = shoal.Step(model, initial(model), shoal.Task(loss))
    step(next(shoal.Loader(samples(), world, batch_size=BATCH).epochs(1)))
    state = step.state_dict()
    for key in ("optimizers", "others", "removed", "begun"):
        del state["optimizer"][key]
    resumed = shoal.Step(model, initial(model), shoal.Task(loss))
    resumed.load_state_dict(state)
    torch.testing.assert_close(
        resumed.optimizer.state_dict(), step.optimizer.state_dict(), rtol=0, atol=0
    )

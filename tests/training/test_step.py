from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.small_training import cross_entropy as loss
from helpers.small_training import sgd
from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.training.loss_scale import LossScale
from shoal.util.errors import CheckpointError, StepError

SAMPLES = 12


def samples(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(SAMPLES, 4, generator=generator).to(dtype),
        torch.randint(0, 3, (SAMPLES,), generator=generator),
    )


def batch_of(data: tuple[Tensor, Tensor], *, micro_batches: int = 1) -> Batch:
    size = len(data[0]) // micro_batches
    pieces = zip(*(tensor.split(size) for tensor in data), strict=True)
    micros = [MicroBatch(piece, number * size, size, 1.0) for number, piece in enumerate(pieces)]
    return Batch(0, len(data[0]), micros, seed=0)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def build(
    world: shoal.World, model: nn.Module | None = None, random: str = "samples", **options: Any
) -> shoal.Step:
    model = shoal.parallelize(network() if model is None else model, world, random=random)
    return shoal.Step(model, sgd(model), shoal.Task(loss), **options)


def assert_same(model: nn.Module, other: nn.Module, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    for ours, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def plain_step(
    model: nn.Module, data: tuple[Tensor, Tensor], dtype: torch.dtype | None = None
) -> float:
    """The same in plain torch, with a mean over the whole batch."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        mean = F.cross_entropy(model(data[0]), data[1])
    optimizer = sgd(model)
    mean.backward()
    optimizer.step()
    optimizer.zero_grad()
    return mean.item()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_is_that_of_torch(world: shoal.World, precision: str, micro_batches: int) -> None:
    step, reference = build(world, precision=precision), network()
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for _ in range(3):
        result = step(batch_of(samples(), micro_batches=micro_batches))
        mean = plain_step(reference, samples(), dtype)
        assert result.loss == pytest.approx(mean, rel=1e-6 if dtype is None else 1e-2)
        assert result.counted == SAMPLES
        assert not result.skipped
    assert step.number == 3
    assert all(p.dtype == torch.float32 for p in step.model.parameters())
    assert_same(step.model, reference, rtol=1e-5, atol=1e-6 if dtype is None else 3e-3)


class Seen(nn.Module):
    """Notes the dtype that its last layer computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.dtype: torch.dtype | None = None

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.layer(values)
        self.dtype = output.dtype
        return output


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_the_precision_is_that_of_training_and_inference(
    world: shoal.World, precision: str, dtype: torch.dtype
) -> None:
    model = Seen()
    step = build(world, model, precision=precision)
    step(batch_of(samples()))
    assert model.dtype == dtype
    model.dtype = None
    step.infer(MicroBatch(samples(), 0, SAMPLES, 1.0), 0)
    assert model.dtype == dtype


def test_the_loss_scale_follows_torch() -> None:
    finite = [True] * 5 + [False] + [True] * 3 + [False, False] + [True] * 9
    ours = LossScale(value=1024.0, interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    parameter = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for good in finite:
        theirs.scale(parameter * 1.0).backward()
        if not good:
            assert parameter.grad is not None
            parameter.grad.fill_(math.inf)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.adapt(finite=good)
        assert ours.value == theirs.get_scale()


class Overflowing(nn.Module):
    """A layer whose gradient overflows where `bad` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.bad = False

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.layer(values)
        if self.bad and output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.inf)
        return output


def test_an_overflow_of_fp16_skips_the_step_and_halves_the_scale(world: shoal.World) -> None:
    model = Overflowing()
    step = build(world, model, precision="fp16")
    step.schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 1, gamma=0.5)
    step(batch_of(samples()))
    before, scale = copy.deepcopy(model.state_dict()), step.state_dict()["scale"]["value"]
    model.bad = True
    result = step(batch_of(samples()))
    assert result.skipped
    assert not math.isfinite(result.norm)
    assert step.state_dict()["scale"] == {"value": scale / 2, "good": 0}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert step.schedule.last_epoch == 1
    model.bad = False
    assert not step(batch_of(samples())).skipped


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_is_not_a_number_touches_nothing(world: shoal.World, precision: str) -> None:
    step = build(world, precision=precision)
    before = copy.deepcopy(step.model.state_dict())
    bad = samples()
    bad[0][5] = math.nan
    with pytest.raises(StepError, match="a loss of nan"):
        step(batch_of(bad))
    assert all(torch.equal(before[name], value) for name, value in step.model.state_dict().items())
    assert all(p.grad is None for p in step.model.parameters())


def test_an_optimizer_that_fails_leaves_no_gradients(
    world: shoal.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, other = build(world), build(world)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(step.optimizer, "step", fail)
        with pytest.raises(ArithmeticError):
            step(batch_of(samples()))
    data = samples()[0].flip(0), samples()[1]
    assert step(batch_of(data))[:3] == other(batch_of(data))[:3]
    assert_same(step.model, other.model)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_cosine_over_the_steps_ends_with_them(world: shoal.World, micro_batches: int) -> None:
    """FAILURES 21: not after half of them with two micro-batches, nor after a fourth on four ranks."""
    step = build(world)
    step.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, T_max=20)
    rates = []
    for _ in range(20):
        rates.append(step.optimizer.param_groups[0]["lr"])
        step(batch_of(samples(), micro_batches=micro_batches))
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * n / 20)) for n in range(20)])
    assert step.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


class Branching(nn.Module):
    """Behaves otherwise in eval mode, as dropout does, and holds what must not follow its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.layer(self.norm(values))
        if self.training:
            return output
        return output * 2


COMPILERS = [
    "script",
    pytest.param("inductor", marks=[pytest.mark.system, pytest.mark.long]),  # needs a C++ compiler
]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_numbers_are_the_eager_ones(world: shoal.World, compiler: str) -> None:
    compiled, eager = (build(world, Branching(), compile=how) for how in (compiler, None))
    eager.model.load_state_dict(compiled.model.state_dict())
    for _ in range(3):
        first, second = (step(batch_of(samples(), micro_batches=1)) for step in (compiled, eager))
        assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert_same(compiled.model, eager.model, rtol=1e-5, atol=1e-6)
    assert list(compiled.model.state_dict()) == list(eager.model.state_dict())


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_code_follows_the_mode_of_each_module(world: shoal.World, compiler: str) -> None:
    model = Branching()
    step = build(world, model, compile=compiler)
    micro = MicroBatch(samples(), 0, SAMPLES, 1.0)
    step(batch_of(samples()))
    for training, frozen in ((False, False), (True, False), (True, True), (False, True), (True, True)):
        model.train(training)
        if frozen:
            model.norm.eval()
        found, expected = step.infer(micro, 0), copy.deepcopy(model)(micro.value[0])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_first_step_leaves_every_mode_as_it_was(world: shoal.World) -> None:
    model = Branching()
    step = build(world, model)
    model.norm.eval()
    step(batch_of(samples()))
    assert model.training
    assert not model.norm.training
    assert model.norm.num_batches_tracked == 0


def test_the_first_step_consumes_no_randomness_of_its_own(world: shoal.World) -> None:
    step = build(world, nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), random="ranks")
    reference = copy.deepcopy(step.model)
    torch.manual_seed(5)
    step(batch_of(samples()))
    torch.manual_seed(5)
    plain_step(reference, samples())
    assert_same(step.model, reference, rtol=1e-5, atol=1e-6)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(values).tanh())
        return output


def test_tied_weights_stay_tied_and_learn_from_both_uses(world: shoal.World) -> None:
    model = Tied()
    reference = copy.deepcopy(model)
    step = build(world, model)
    step(batch_of(samples()))
    plain_step(reference, samples())
    assert model.first.weight is model.second.weight
    assert_same(model, reference, rtol=1e-5, atol=1e-6)
    assert step.state_dict()["optimizer"]["members"] == {"first.weight": 0}


def test_frozen_layers_stay_as_they_are(world: shoal.World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    step = build(world, model, clip=1.0)
    step(batch_of(samples()))
    after = model.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert changed == ["1.weight", "1.bias"]


def test_state_of_another_step_is_refused(world: shoal.World) -> None:
    state = build(world).state_dict()
    with pytest.raises(CheckpointError, match=r"the checkpoint has 1 parameter group\(s\)"):
        grouped(world, [0, 1], [2, 3]).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"in another group: 0\.bias, 2\.weight"):
        grouped(world, [0, 1], [2, 3]).load_state_dict(grouped(world, [0, 2], [1, 3]).state_dict())


def grouped(world: shoal.World, *groups: list[int], momentum: float = 0.0) -> shoal.Step:
    """A Step whose optimizer has the model's parameters in these groups, by number."""
    model = shoal.parallelize(network(), world)
    parameters = list(model.parameters())
    chosen: list[dict[str, Any]] = [
        {"params": [parameters[number] for number in group], "lr": 0.1 * (1 + place)}
        for place, group in enumerate(groups)
    ]
    return shoal.Step(model, torch.optim.SGD(chosen, momentum=momentum), shoal.Task(loss))


def test_the_state_of_an_optimizer_goes_by_name_and_not_by_order(world: shoal.World) -> None:
    written = grouped(world, [0, 1], [2, 3], momentum=0.9)
    written(batch_of(samples()))
    read = grouped(world, [1, 0], [3, 2], momentum=0.9)
    read.load_state_dict(copy.deepcopy(written.state_dict()))
    written(batch_of(samples()))
    read(batch_of(samples()))
    assert_same(written.model, read.model)


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop", "NAdam", "SGD"])
def test_the_users_optimizer_is_the_one_that_steps(world: shoal.World, name: str) -> None:
    model = shoal.parallelize(network(), world)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    reference = network()
    theirs = getattr(torch.optim, name)(reference.parameters(), lr=0.01)
    for _ in range(3):
        step(batch_of(samples()))
        F.cross_entropy(reference(samples()[0]), samples()[1]).backward()
        theirs.step()
        theirs.zero_grad()
    assert step.optimizer is optimizer
    assert_same(model, reference, rtol=1e-4, atol=1e-5)


class Counting(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1


class WithExtra(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: list[int] = []

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.layer(values)
        return output

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_state_that_is_of_no_parameter_and_of_no_tensor_goes_on(world: shoal.World) -> None:
    def make() -> tuple[WithExtra, Counting, shoal.Step]:
        model = shoal.parallelize(WithExtra(), world)
        optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, shoal.Step(model, optimizer, shoal.Task(loss))

    model, _, step = make()
    step(batch_of(samples()))
    model.seen = [1, 2]
    state = copy.deepcopy(step.state_dict())
    model, optimizer, step = make()
    step.load_state_dict(state)
    assert model.seen == [1, 2]
    own: dict[Any, Any] = optimizer.state
    assert own["steps"] == 1
    assert "momentum_buffer" in optimizer.state[model.layer.weight]


def test_a_group_that_was_added_is_part_of_the_state(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    optimizer = torch.optim.AdamW(model[0].parameters())
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    step(batch_of(samples()))
    state = copy.deepcopy(step.state_dict())
    assert state["optimizer"]["members"] == {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 1}
    step.load_state_dict(state)


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "closure"),
        (lambda model: torch.optim.AdamW, "not a torch.optim.Optimizer"),
    ],
)
def test_optimizers_that_no_step_can_drive(
    world: shoal.World, optimizer: Callable[[nn.Module], Any], found: str
) -> None:
    model = shoal.parallelize(network(), world)
    with pytest.raises(StepError, match=found):
        shoal.Step(model, optimizer(model), shoal.Task(loss))


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "with a metric"),
        (
            lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(sgd(network()), 0.5),
            "is not the one given",
        ),
        (lambda optimizer: 0.1, "not a torch"),
    ],
)
def test_schedules_that_no_step_can_drive(
    world: shoal.World, schedule: Callable[[torch.optim.Optimizer], Any], found: str
) -> None:
    model = shoal.parallelize(network(), world)
    optimizer = sgd(model)
    with pytest.raises(StepError, match=found):
        shoal.Step(model, optimizer, shoal.Task(loss), schedule=schedule(optimizer))

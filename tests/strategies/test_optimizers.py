"""Optimizers of all kinds on parts of a model: trained like one process, or refused when given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shoal
from helpers.ranks import Ranks, several_ranks
from helpers.reference import SEED, TOLERANCE, take_custom_step
from shoal.strategies.dtensor import whole

SAMPLES, BATCH, EPOCHS = 21, 8, 1
Made = Callable[[Any], Optimizer]


class Own(Optimizer):
    """As packages write them: the update of one parameter, from its gradient and its state."""

    def __init__(self, parameters: Any, lr: float = 0.01, limit: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "limit": limit})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self.update(parameter, self.state[parameter], group["step"])
                    parameter.sub_(update, alpha=group["lr"])

    def update(self, parameter: Any, state: dict[str, Any], number: int) -> Any:
        raise NotImplementedError


class Lion(Own):
    def update(self, parameter: Any, state: dict[str, Any], number: int) -> Any:
        mean = state.setdefault("mean", torch.zeros_like(parameter))
        update = mean.lerp(parameter.grad, 0.1).sign()
        mean.lerp_(parameter.grad, 0.01)
        return update


class Masked(Own):
    """Elementwise, by an operation that torch has not for DTensors."""

    def update(self, parameter: Any, state: dict[str, Any], number: int) -> Any:
        update = parameter.grad.clone()
        update[parameter.grad.abs() < 1e-3] = 0.0
        return update * number**-0.5


class Lamb(Own):
    """A norm of each parameter."""

    def update(self, parameter: Any, state: dict[str, Any], number: int) -> Any:
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        return mean * (parameter.norm().clamp_(0.1, 10.0) / (mean.norm() + 1e-6))


class Shampoo(Own):
    """Matrices beside the parameter, in a list."""

    def update(self, parameter: Any, state: dict[str, Any], number: int) -> Any:
        update = parameter.grad
        shape = parameter.shape
        sums = state.setdefault("sums", [torch.eye(n, dtype=parameter.dtype) for n in shape])
        for dim in range(len(shape)):
            rows = update.movedim(dim, 0).reshape(shape[dim], -1)
            sums[dim] += parameter.grad.movedim(dim, 0).reshape(shape[dim], -1).square().sum(1).diag()
            update = (
                torch.linalg.solve(sums[dim], rows)
                .reshape(update.movedim(dim, 0).shape)
                .movedim(0, dim)
            )
        return update


class Limited(Own):
    """Gradients of all parameters are clipped together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.total = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        super().step()

    def update(self, parameter: Any, state: dict[str, Any], number: int) -> Any:
        return parameter.grad / (1.0 + self.total)


class Noisy(Own):
    def update(self, parameter: Any, state: dict[str, Any], number: int) -> Any:
        return parameter.grad + torch.randn_like(parameter)


def adagrad(parameters: Any) -> Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=0.1)


def kind(name: str, **options: Any) -> Made:
    def made(parameters: Any) -> Optimizer:
        chosen: Optimizer = getattr(torch.optim, name)(parameters, lr=0.01, **options)
        return chosen

    return made


NAMES = ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
KINDS: dict[str, Made] = {name: kind(name) for name in (*NAMES, "Adafactor", "Muon")}
KINDS |= {f"{name}, foreach": kind(name, foreach=True) for name in (*NAMES, "Adafactor")}
KINDS |= {f"{name}, fused": kind(name, fused=True) for name in ("Adam", "SGD", "Adagrad")}
KINDS |= {each.__name__: each for each in (Lion, Masked, Lamb, Shampoo)}
KINDS |= {"Adagrad": adagrad, "momentum": kind("SGD", momentum=0.9, nesterov=True)}
COUPLED = "its update of a parameter depends on more than that parameter and its state"
REFUSED: dict[str, tuple[Made, str]] = {
    "Limited": (Limited, COUPLED),
    "Noisy": (Noisy, "its updates depend on random numbers, and each rank draws different ones"),
    "capturable": (kind("Adam", capturable=True), "a trial step on small parameters raises Assert"),
}

LAYOUTS: dict[str, tuple[int, Any]] = {
    "shard=2": (2, None),
    "tensor=2": (2, shoal.TensorParallel(plan={"wide": "column", "narrow": "row"})),
    "pipeline=2": (2, shoal.Pipeline(split_points=("one",))),
    "replicate=2": (2, None),
    "shard=3": (3, None),
    "replicate=2,shard=2": (4, None),
    "shard=2,tensor=2": (
        4,
        [shoal.TensorParallel(plan={"wide": "column", "narrow": "row"}), shoal.FSDP()],
    ),
}


class Net(nn.Module):
    """Matrices of 1, 3, 5 and 8 rows, and no biases where an optimizer takes only matrices."""

    def __init__(self, biases: bool) -> None:
        super().__init__()
        self.first, self.wide = nn.Linear(6, 5, biases), nn.Linear(5, 8, biases)
        self.narrow, self.one = nn.Linear(8, 5, biases), nn.Linear(5, 1, biases)
        self.three, self.last = nn.Linear(1, 3, biases), nn.Linear(3, 4, biases)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.one(x + self.narrow(torch.tanh(self.wide(x))))
        output: Tensor = self.last(torch.tanh(self.three(x)))
        return output


def built(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net(biases=name != "Muon").double()


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(batch[1])


@cache
def expected(name: str) -> dict[str, Tensor]:
    """In plain torch, on one process."""
    model, (inputs, targets) = built(name), samples()
    optimizer = KINDS[name](model.parameters())
    for epoch in range(EPOCHS):
        order = shoal.Permutation(SAMPLES, seed=SEED, epoch=epoch).indices(0, SAMPLES)
        for indices in torch.from_numpy(order).split(BATCH):
            total, count = loss(model(inputs[indices]), (None, targets[indices]))
            (total / count).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(world: shoal.World, strategy: Any, loops: bool, names: list[str]) -> dict[str, float]:
    """How far each kind of optimizer ends from one process, on this rank."""
    found = {}
    for name in names:
        made = KINDS[name]
        model = shoal.parallelize(built(name), world, strategy)
        optimizer = made(model.parameters())
        step = None if loops else shoal.Step(model, optimizer, shoal.Task(loss))
        loader = shoal.Loader(samples(), world, batch_size=BATCH, micro_batches=2, seed=SEED)
        for batch in loader.epochs(EPOCHS):
            if step is None:
                take_custom_step(model, optimizer, batch, loss)
            else:
                step(batch)
        right = expected(name)
        ends = {n: whole(p.detach()) for n, p in model.named_parameters()}
        found[name] = max(float((end - right[n]).abs().max()) for n, end in ends.items())
    return found


def given(world: shoal.World, name: str, strategy: Any, where: str) -> None:
    model = shoal.parallelize(built(name), world, strategy)
    optimizer = REFUSED[name][0](model.parameters())
    if where == "step":
        shoal.Step(model, optimizer, shoal.Task(loss))
    loader = shoal.Loader(samples(), world, batch_size=BATCH, seed=SEED)
    if where == "run":
        shoal.Run("never", model, loader, optimizer=optimizer)
    for batch in loader.epochs(1):
        take_custom_step(model, optimizer, batch, loss)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int, str], Ranks]]:
    with several_ranks(seed=SEED) as started:
        yield started


def check(ranks: Callable[[int, str], Ranks], layout: str, loops: bool, names: list[str]) -> None:
    size, strategy = LAYOUTS[layout]
    for found in ranks(size, layout).call(trained, strategy, loops, names):
        assert {name: error for name, error in found.items() if error > TOLERANCE} == {}


@pytest.mark.parametrize(
    ("layout", "names"), [("shard=3", ["Muon", "Shampoo"]), ("tensor=2", ["Adafactor", "Lamb"])]
)
def test_what_needs_whole_parameters_gets_them(
    ranks: Callable[[int, str], Ranks], layout: str, names: list[str]
) -> None:
    check(ranks, layout, False, names)


def test_what_torch_cannot_do_with_dtensors_is_done_on_shards(
    ranks: Callable[[int, str], Ranks],
) -> None:
    check(ranks, "tensor=2", True, ["Masked", "Rprop", "SGD, fused", "Adagrad"])


@pytest.mark.long
@pytest.mark.parametrize("loops", [False, True], ids=["step", "loop"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_kind_ends_where_one_process_does(
    ranks: Callable[[int, str], Ranks], layout: str, loops: bool
) -> None:
    if not (loops and "pipeline" in layout):  # a pipeline takes complete steps
        check(ranks, layout, loops, [*KINDS])


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("Limited", "step"),
        ("Limited", "run"),
        ("Limited", "loop"),
        ("Noisy", "step"),
        ("capturable", "step"),
    ],
)
def test_others_are_refused_on_all_ranks(
    ranks: Callable[[int, str], Ranks], name: str, where: str
) -> None:
    size, strategy = LAYOUTS["tensor=2"]
    for error in ranks(size, "tensor=2").errors(shoal.StepError, given, name, strategy, where):
        assert REFUSED[name][1] in error.found


def test_random_numbers_of_each_rank_are_refused_with_replicas(
    ranks: Callable[[int, str], Ranks],
) -> None:
    for error in ranks(2, "replicate=2").errors(shoal.StepError, given, "Noisy", None, "step"):
        assert REFUSED["Noisy"][1] in error.found


def test_one_without_dense_gradients_is_refused_on_one_process(world: shoal.World) -> None:
    model = shoal.parallelize(nn.Linear(2, 2), world)
    with pytest.raises(shoal.StepError, match="sparse gradients only"):
        shoal.Step(model, torch.optim.SparseAdam(model.parameters()), shoal.Task(loss))

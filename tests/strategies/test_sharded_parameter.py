"""Modules and weights of sharded models used outside forward; strides and dtypes of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from helpers.ranks import Ranks
from helpers.reference import TOLERANCE, take_custom_step
from shoal.strategies.dtensor import whole

pytestmark = pytest.mark.processes
LAYOUT = "shard=-1"
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def part(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.wide(x)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.out(self.part(x))
        return x + added


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(4, 6), nn.Linear(6, 4)
        self.blocks: Any = nn.ModuleList([Block(), Block()])
        self.enter.weight = nn.Parameter(self.enter.weight.detach().t().contiguous().t())

    def encode(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.head(self.encode(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encode(x))
        return logits


Loss = Callable[[Any, Tensor, Any], Any]


def square(x: Tensor, y: Any) -> Any:
    return ((x - y) ** 2).sum()


def children(net: Any, x: Tensor, _: Any) -> Any:
    return square(net.head(net.blocks[1](net.blocks[0].part(net.enter(x)))), x) + square(net(x), 0)


def penalties(net: Any, x: Tensor, begun: Any) -> Any:
    before = sum(square(p, begun[name]) for name, p in net.named_parameters())
    vector = torch.cat([p.flatten() for p in net.parameters()])
    return len(x) * (before + vector.norm()) + square(net(x), x)


def weights(net: Any, x: Tensor, _: Any) -> Any:
    with torch.no_grad():
        target = net.blocks[0].wide(net.encode(x))
    return square(F.linear(net.encode(x), net.enter.weight.T), x) + square(
        net.generate(x), x + target[:, :4]
    )


def recomputed(net: Any, x: Tensor, _: Any) -> Any:
    part = checkpoint(net.blocks[0].part, net.enter(x), use_reentrant=False)
    return square(part, 1) + square(checkpoint(net.generate, x, use_reentrant=False), x)


def data() -> Tensor:
    return torch.randn(22, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trained(
    world: shoal.World, loss: Loss, modules: Any, stepped: bool
) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(3)
    net = shoal.parallelize(Net().double(), world, shoal.FSDP(modules=modules))
    begun = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    task = shoal.Task(lambda output, batch: (loss(net, batch[0], begun), len(output)))
    loader = shoal.Loader((data(),), world, batch_size=8, micro_batches=2, seed=0)
    step = shoal.Step(net, optimizer, task, clip=1.0 if stepped else None)
    found = []
    for batch in loader.epochs(1):
        if stepped:
            result = step(batch)
        else:
            result = take_custom_step(
                net, optimizer, batch, lambda _, micro: (loss(net, micro[0], begun), len(micro[0]))
            )
        found += [result.loss, result.norm] if stepped else [result.loss]
    with torch.no_grad():
        found += [float(net.generate(data()).sum()), float(net.blocks[0].wide(net.enter(data())).sum())]
    if stepped:
        found.append(shoal.evaluate(step, (data(),))["loss"])
    return found, {name: whole(p.detach()).numpy().copy() for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("loss", "modules"),
    [
        (children, None),
        (penalties, None),
        (weights, None),
        (recomputed, None),
        (weights, ()),
    ],  # the last: no output of units
)
@pytest.mark.parametrize("stepped", [False, True])
def test_code_outside_forward_trains_like_one_process(
    ranks: Ranks, world: shoal.World, loss: Loss, modules: Any, stepped: bool
) -> None:
    expected, parameters = trained(world, loss, modules, stepped)
    for found, others in ranks.call(trained, loss, modules, stepped):
        assert found == pytest.approx(expected, rel=TOLERANCE)
        for name, value in parameters.items():
            np.testing.assert_allclose(others[name], value, atol=TOLERANCE)


def given_gradient(weight: Any) -> float:
    weight.grad = torch.ones(weight.shape).double()
    return float(weight.grad.norm())


def replaced(net: Any) -> None:
    net.head.weight = nn.Parameter(torch.ones(4, 6))
    net(data())


Use = Callable[[Any], Any]
VALUES: dict[str, Use] = {
    "item": lambda w: w.norm().item(),
    "float": lambda w: float(w.detach().square().sum()),
    "of data": lambda w: float(w.data.norm()),
    "format": lambda w: f"{w.mean():.9f}",
    "bool": lambda w: bool(w.sum() > 0),
    "allclose": lambda w: torch.allclose(w, torch.full_like(w, float(w[0, 0]))),
    "is_nonzero": lambda w: torch.is_nonzero((w == w[-1, -1]).sum() - 1),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().numpy().sum(1).tolist(),
    "nonzero": lambda w: (w > 0).nonzero().sum().item(),
    "mask": lambda w: w[w > 0].sum().item(),
    "row": lambda w: w[1].tolist(),
    "like": lambda w: (torch.zeros_like(w) + torch.ones(w.shape)).sum().item(),
    "gradient": lambda w: float(torch.autograd.grad((w * w).sum(), w)[0].norm()),
    "given gradient": given_gradient,
}


def clip(net: Any) -> None:
    for p in net.parameters():
        p.grad = torch.full(p.shape, 2.0, dtype=p.dtype)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for p in net.parameters():
        p.data = p.data - p.grad


def vector(net: Any) -> None:
    flat = nn.utils.parameters_to_vector(net.blocks.parameters()).detach()
    nn.utils.vector_to_parameters(flat * 0.5, net.blocks.parameters())


CHANGES: dict[str, Use] = {
    "clamp_": lambda net: [p.data.clamp_(-0.1, 0.1) for p in net.parameters()],
    "mul_": lambda net: [
        p.mul_(torch.arange(float(p.numel())).view(p.shape)) for p in net.parameters()
    ],
    "rows": lambda net: net.blocks[0].wide.weight.mul_(torch.arange(6.0)[:, None]),
    "masked_fill_": lambda net: [p.masked_fill_(p < 0, 0.5) for p in net.parameters()],
    "lists": lambda net: torch._foreach_copy_([*net.parameters()], [p * 2 for p in net.parameters()]),
    "data": lambda net: setattr(
        net.blocks[0].wide.weight, "data", torch.arange(36.0).double().view(6, 6)
    ),
    "load": lambda net: net.load_state_dict(
        {n: torch.ones(p.shape) for n, p in net.state_dict().items()}
    ),
    "constant_": lambda net: nn.init.constant_(net.blocks[0].wide.weight, 0.25),
    "clip": clip,
    "vector": vector,
}
REFUSED: dict[str, Use] = {
    "normal_": lambda net: nn.init.normal_(net.blocks[0].wide.weight),
    "xavier_uniform_": lambda net: nn.init.xavier_uniform_(net.blocks[0].wide.weight),
    "orthogonal_": lambda net: nn.init.orthogonal_(net.blocks[0].wide.weight),
    "reset_parameters": lambda net: net.blocks[0].wide.reset_parameters(),
    "randn_like": lambda net: torch.randn_like(net.blocks[0].wide.weight),
    "row": lambda net: net.blocks[0].wide.weight[0].zero_(),
    "rows": lambda net: [row.zero_() for row in net.blocks[0].out.weight],
    "view": lambda net: net.blocks[0].wide.weight.view(-1).mul_(2.0),
    "data": lambda net: net.blocks[0].wide.weight.data[:2].mul_(2.0),
    "__setitem__": lambda net: net.blocks[0].wide.weight.__setitem__(0, 1.0),
    "renorm_": lambda net: net.blocks[0].wide.weight.renorm_(2, 0, 0.5),
    "out": lambda net: torch.mul(net.blocks[0].wide.weight, 2.0, out=net.blocks[0].wide.weight),
    "shape": lambda net: setattr(net.blocks[0].wide.weight, "data", torch.ones(2)),
}
REFUSED_BY_FSDP: dict[str, Use] = {
    "register_hook": lambda net: net.head.weight.register_hook(torch.neg),
    "functional_call": lambda net: torch.func.functional_call(
        net, {n: p * 0.9 for n, p in net.named_parameters()}, (data(),)
    ),
    "replaced": replaced,
    "deepcopy": copy.deepcopy,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
}
PLAN = {"blocks.*.wide": "column", "blocks.*.out": "row"}


def used(world: shoal.World, strategy: Any) -> dict[str, Any]:
    # FSDP begins with the values of rank 0, although ranks draw others for a second model.
    torch.manual_seed(3 + (world.rank if isinstance(strategy, shoal.FSDP) else 0))

    def new() -> Any:
        with torch.random.fork_rng(devices=[]):
            return shoal.parallelize(Net().double(), world, strategy)

    net = new()
    weight = net.blocks[0].wide.weight
    found = {name: use(weight) for name, use in VALUES.items()}
    for name, change in CHANGES.items():
        net = new()
        with torch.no_grad():
            change(net)
        found["change " + name] = {n: whole(p.detach()).tolist() for n, p in net.named_parameters()}
    net = new()
    optimizer = torch.optim.Adam(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype)
    optimizer.step()
    found["state"] = float(optimizer.state[net.blocks[0].wide.weight]["exp_avg"].norm())
    if world.size > 1:
        refused = REFUSED | (REFUSED_BY_FSDP if isinstance(strategy, shoal.FSDP) else {})
        found["passed"] = [name for name, use in refused.items() if not refuses(use, new())]
    return found


def refuses(use: Use, net: Any) -> bool:
    try:
        with torch.no_grad():
            use(net)
    except shoal.StepError as error:
        return "full_tensor" in error.fix or "FSDP" in error.given
    return False


@pytest.mark.parametrize(
    ("size", "layout", "strategy"),
    [
        (2, "shard=-1", shoal.FSDP(modules=("blocks.*",))),
        (3, "shard=-1", shoal.FSDP()),
        (2, "tensor=2", shoal.TensorParallel(plan=PLAN)),
    ],
)
def test_uses_outside_a_step_are_those_of_one_process_or_refused(
    world: shoal.World, size: int, layout: str, strategy: Any
) -> None:
    expected = used(world, None)
    with Ranks(size, layout=layout) as ranks:
        for found in ranks.call(used, strategy):
            assert found.pop("passed") == []
            for name, value in expected.items():
                assert close(found[name], value), name


def close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(close(one[key], other[key]) for key in other)
    if isinstance(one, float | list):
        return bool(np.allclose(one, other, rtol=0, atol=TOLERANCE))
    return bool(one == other)


def penalized(world: shoal.World) -> None:
    net = shoal.parallelize(Net().double(), world, shoal.FSDP(modules=("blocks.*",)))
    x = data().requires_grad_()
    for batch in shoal.Loader((data(),), world, batch_size=8).epochs(1):
        for (part,) in batch:
            x = part.clone().requires_grad_()
            gradient = torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]
            batch.backward(total=square(gradient, 1), count=len(x))


def test_a_gradient_penalty_with_fsdp_names_what_works(ranks: Ranks) -> None:
    for error in ranks.errors(shoal.StepError, penalized):
        assert "replicate=-1" in error.fix


def normalized(world: shoal.World, normalize: Any) -> None:
    net = Net()
    normalize(net.blocks[1].wide)
    shoal.parallelize(net, world, shoal.TensorParallel(plan=PLAN))


def test_plans_refuse_layers_with_norms_of_weights() -> None:
    with Ranks(2, layout="tensor=2") as ranks:
        for normalize in (
            nn.utils.weight_norm,
            nn.utils.spectral_norm,
            nn.utils.parametrizations.weight_norm,
            nn.utils.parametrizations.spectral_norm,
        ):
            for error in ranks.errors(shoal.StepError, normalized, normalize):
                assert "blocks.1.wide" in error.given


def copied(world: shoal.World) -> bool:
    weight = shoal.parallelize(Net(), world).head.weight
    return torch.equal(whole(copy.deepcopy(weight)), whole(weight))


def test_a_sharded_parameter_can_be_copied(ranks: Ranks) -> None:
    assert all(ranks.call(copied))


def strided(world: shoal.World, rank: int) -> None:
    net = nn.Linear(4, 6)
    if world.rank == rank:
        net.weight = nn.Parameter(net.weight.detach().t().contiguous().t())
    shoal.parallelize(net, world)


def test_strides_that_differ_name_parameter_and_ranks(ranks: Ranks) -> None:
    for error in ranks.errors(shoal.AgreementError, strided, 1):
        assert "weight has the strides (4, 1) on rank 0" in error.given
        assert "the strides (1, 6) on rank 1" in error.found


DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bool)


class Buffers(nn.Linear):
    def __init__(self, value: int) -> None:
        super().__init__(4, 1)
        for number, dtype in enumerate(DTYPES):
            self.register_buffer(f"b{number}", torch.full((2, 3), value).to(dtype).t())
        self.register_buffer("number", torch.tensor(value).to(torch.uint16))


def exchanged(world: shoal.World, strategy: Any) -> tuple[list[Any], list[Any], list[Any]]:
    net = shoal.parallelize(Buffers(world.rank % 2), world, strategy)
    task = shoal.Task(lambda output, _: (output.sum(), len(output)))
    shoal.evaluate(net, (torch.ones(6, 4),), task=task)
    mine = [torch.full((2,), world.rank % 2).to(dtype) for dtype in DTYPES]
    gathered = [[each.float().tolist() for each in part] for part in world.gather(mine)]
    sent = [each.float().tolist() for each in world.broadcast(mine, 1)]
    return [b.float().sum().item() for b in net.buffers()], gathered, sent


@pytest.mark.parametrize("strategy", [shoal.FSDP(), None])
def test_tensors_of_any_dtype_are_sent(ranks: Ranks, strategy: Any) -> None:
    for buffers, gathered, sent in ranks.call(exchanged, strategy):
        assert buffers == [0.0] * len(buffers)
        assert gathered == [[[rank % 2] * 2] * len(DTYPES) for rank in range(ranks.size)]
        assert sent == [[1.0] * 2] * len(DTYPES)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn])
def test_a_reduction_of_another_dtype_names_it(world: shoal.World, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(shoal.AgreementError, match=f"backends do not reduce {name}"):
        world.all_reduce(torch.ones(2).to(dtype))


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(
    "kinds",
    [
        (torch.optim.SGD, torch.optim.SGD),
        (torch.optim.Adagrad, torch.optim.Adagrad),
        (partial(torch.optim.SparseAdam, eps=1e-30), partial(torch.optim.Adam, eps=1e-30)),
    ],
)
def test_sparse_embeddings_train_on_one_process(world: shoal.World, kinds: Any, stepped: bool) -> None:
    tokens = torch.randint(0, 9, (20, 4), generator=torch.Generator().manual_seed(1))

    def trained(sparse: bool) -> Tensor:
        torch.manual_seed(2)
        net = nn.Embedding(9, 3, sparse=sparse, dtype=torch.float64)
        net = shoal.parallelize(net, world)
        optimizer = kinds[not sparse](net.parameters(), lr=0.1)

        def loss(output: Tensor, _: Any) -> tuple[Tensor, int]:
            return square(output.sum((1, 2)), 1), len(output)

        step = shoal.Step(net, optimizer, shoal.Task(loss), clip=0.5 if stepped else None)
        for batch in shoal.Loader((tokens,), world, batch_size=20, micro_batches=2).epochs(2):
            _ = step(batch) if stepped else take_custom_step(net, optimizer, batch, loss, clip=0.5)
        return net.weight.detach().clone()

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=TOLERANCE)


def embedded(world: shoal.World) -> None:
    shoal.parallelize(nn.Sequential(nn.Embedding(9, 3, sparse=True)), world)


def test_sparse_embeddings_are_refused_on_several_ranks(ranks: Ranks) -> None:
    for error in ranks.errors(shoal.StepError, embedded):
        assert "sparse gradients, which ranks can't sum: 0" in error.found


def products(world: shoal.World) -> list[float]:
    """Use a weight of a plan together with another one, outside of forward."""
    torch.manual_seed(3)
    net: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 4)).double()
    plan = shoal.TensorParallel(plan={"0": "column", "2": "row"})
    net = shoal.parallelize(net, world, [plan, shoal.FSDP()] if world.size > 1 else None)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return square(output, 0) + len(output) * (net[3].weight @ net[2].weight).abs().sum(), len(
            output
        )

    step = shoal.Step(net, torch.optim.AdamW(net.parameters(), lr=0.01), shoal.Task(loss))
    return [
        step(batch).loss for batch in shoal.Loader((data(),), world, batch_size=8, seed=0).epochs(1)
    ]


def test_a_loss_uses_weights_of_a_plan_that_fsdp_has_gathered(world: shoal.World) -> None:
    expected = products(world)
    with Ranks(4, layout="shard=2,tensor=2") as ranks:
        for found in ranks.call(products):
            assert found == pytest.approx(expected, rel=TOLERANCE)


def recomputes(world: shoal.World, strategy: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    parallel: Any = shoal.parallelize(nn.Sequential(nn.Linear(4, 4), net).double(), world, strategy)
    inside, weight = parallel[1], parallel[1][0].weight

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        y = checkpoint(lambda y: inside[2](inside[1](inside[0](y))), output, use_reentrant=False)
        penalty = checkpoint(lambda w: w.square().sum(), weight, use_reentrant=False)
        return y.sum() + penalty * len(y), len(y)

    step = shoal.Step(parallel, torch.optim.SGD(parallel.parameters(), lr=0.01), shoal.Task(loss))
    step(next(shoal.Loader((data(),), world, batch_size=8, micro_batches=2).epochs(1)))


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("shard=2", shoal.FSDP()),
        ("tensor=2", shoal.TensorParallel(plan={"1.0": "column", "1.2": "row"})),
    ],
)
def test_a_recomputed_use_of_weights_in_a_loss_names_what_works(layout: str, strategy: Any) -> None:
    with Ranks(2, layout=layout) as ranks:
        for error in ranks.errors(shoal.StepError, recomputes, strategy):
            assert "a recomputation gets parts of weights" in error.found
            assert error.fix.startswith("call torch.utils.checkpoint in the model's forward")

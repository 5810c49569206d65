"""Compiled models draw the numbers that they draw uncompiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from helpers.compiling import compiler_with, counting
from helpers.exact_models import GPT, GPTBlock
from helpers.keyed_draws import keyed
from helpers.ranks import Ranks
from shoal.data.micro import MicroBatch
from shoal.strategies.random_draws.draws import layouts_of, register
from shoal.strategies.random_draws.graphs import keyed_backend
from shoal.util.errors import StepError


class Functions(nn.Module):
    """Calls a layer twice, and the random functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            self.drop(x) + self.drop(x),
            F.dropout1d(x, 0.5),
            F.alpha_dropout(x, 0.3, True),
            F.feature_alpha_dropout(x, 0.3, True),
            F.rrelu(x, training=True),
            F.gumbel_softmax(x),
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
            torch.rand_like(x),
            torch.randn_like(x),
            torch.rand(x.shape),
            torch.bernoulli(torch.sigmoid(x)),
            torch.randint(0, 9, (len(x), 3)).double(),
            torch.randperm(7).double(),
        ]


class Recomputed(nn.Module):
    """Recomputes a block by itself, inside of the compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.block = GPTBlock(0.3, heads=2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return found + F.dropout(found, 0.2)


class Declared(nn.Module):
    """Draws for tensors of shape (width, length, samples)."""

    def forward(self, x: Tensor) -> Tensor:
        with shoal.samples(dim=2):
            return F.dropout(x.permute(2, 1, 0), 0.5).permute(2, 1, 0)


INPUTS: dict[Callable[[], nn.Module], Callable[[int], Tensor]] = {
    GPT: lambda samples: torch.randint(0, 10, (samples, 5)),
}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def both(
    kind: Callable[[], nn.Module], backend: str, sizes: tuple[int, ...]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Outputs and gradients, compiled and not, of micro-batches of some sizes."""
    torch.manual_seed(0)
    model = kind().double()
    register(model)
    compiled = torch.compile(model, backend=keyed_backend(backend))
    found = []
    for samples in sizes:
        x = INPUTS.get(kind, lambda n: torch.randn(n, 3, 8).double())(samples)
        micro = MicroBatch(None, 7 * samples, samples, 1.0)
        found.append((results(model, model, x, micro), results(model, compiled, x, micro)))
    return found


def results(model: nn.Module, call: Any, x: Tensor, micro: MicroBatch) -> list[Tensor]:
    outputs = keyed(lambda: call(x), micro)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    parameters = list(model.parameters())
    if not parameters:
        return outputs
    return [*outputs, *torch.autograd.grad(sum(each.square().sum() for each in outputs), parameters)]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (Functions, "eager"),
        (Declared, "eager"),
        pytest.param(Recomputed, "aot_eager", marks=pytest.mark.compat),
        pytest.param(Declared, "inductor", marks=pytest.mark.long),
        pytest.param(Functions, "inductor", marks=pytest.mark.long),
        pytest.param(Recomputed, "inductor", marks=pytest.mark.long),
        pytest.param(GPT, "inductor", marks=pytest.mark.long),
    ],
)
def test_compiled_code_draws_the_same(kind: Callable[[], nn.Module], backend: str) -> None:
    [(expected, found)] = both(kind, backend, (4,))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_neither_positions_nor_sizes_compile_it_again(backend: str) -> None:
    stats = counting()
    for expected, found in both(GPT, backend, (3, 3, 2, 5, 4, 7)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert stats["unique_graphs"] == 2  # the second has dynamic shapes


def test_outside_of_a_step_torch_seeds_the_numbers() -> None:
    model = nn.Dropout(0.5)
    register(model)
    compiled = torch.compile(model, backend=keyed_backend("eager"))
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(compiled(torch.ones(9, 9)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_layout_that_changes_stops_compiled_code() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    register(model)
    compiled = torch.compile(model, backend=keyed_backend("eager"))
    micro = MicroBatch(None, 0, 4, 1.0)
    keyed(lambda: compiled(torch.ones(4, 4)), micro)
    layouts_of(model).possible["0#0"] = [(1, 1)]
    with pytest.raises(StepError, match=r"in '0'") as caught:
        keyed(lambda: compiled(torch.ones(4, 4)), micro)
    assert "is 1, and the graph was compiled for 0" in caught.value.found


class Counts(nn.Module):
    """Draws what needs values, and dropout, of both of which compiled code then leaves to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(2, 2), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.layer(x)) + torch.poisson(x.exp())
        return found


def test_draws_that_cannot_be_compiled_are_printed(
    world: shoal.World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", compiler_with("eager"))
    model = shoal.parallelize(Counts(), world)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters()), task, compile="inductor")
    for batch in shoal.Loader((torch.randn(8, 2),), world, batch_size=4).epochs(1):
        step(batch)
    printed = capsys.readouterr().out
    assert printed.count("each rank draws its own random numbers in compiled code, in poisson") == 1
    assert "drop" in printed


def in_several_buckets(world: shoal.World, compiled: bool) -> tuple[list[float], list[str]]:
    """Losses of a model in several buckets of DDP, for which torch splits its graph; and the breaks."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    counting()
    layers = (nn.Linear(4, 400), *(nn.Linear(400, 400) for _ in range(4)))
    net = nn.Sequential(*(part for layer in layers for part in (layer, nn.Dropout(0.3)))).double()
    with patch.object(torch, "compile", compiler_with("aot_eager")):
        model = shoal.parallelize(net, world, shoal.DDP(bucket_cap_mb=1))
        task = shoal.Task(lambda output, batch: (output.square().sum(), output.numel()))
        compiler = "inductor" if compiled else None
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task, compile=compiler)
        data = shoal.Loader((torch.ones(24, 4).double(),), world, batch_size=8)
        losses = [step(batch).loss for batch in data.epochs(1)]
    return losses, [*counters["graph_break"]]


@pytest.mark.processes
def test_a_graph_that_is_split_for_ddp_draws_the_same(ranks: Ranks) -> None:
    eager, _ = ranks.call(in_several_buckets, False)[0]
    compiled, breaks = ranks.call(in_several_buckets, True)[0]
    assert breaks == []
    assert compiled == pytest.approx(eager, rel=1e-12)

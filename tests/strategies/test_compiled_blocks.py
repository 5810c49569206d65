"""compile="blocks": each repeated block is compiled, once for all of a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.compiling import compiler_with, counting
from helpers.ranks import Ranks
from shoal.util.errors import StepError

WIDTH, BLOCKS = 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Sequential(nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.narrow(self.wide(self.norm(x)))
        return x + changed


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(make() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def net(make: Callable[[], nn.Module] = Block) -> nn.Module:
    torch.manual_seed(4)
    return Net(make).double()


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), output.numel()


def losses(
    world: shoal.World, model: nn.Module, compile: str | None, strategy: Any = None
) -> list[float]:
    model = shoal.parallelize(model, world, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = shoal.Step(model, optimizer, shoal.Task(loss), compile=compile)
    data = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = shoal.Loader((data,), world, batch_size=4)
    found = [step(batch).loss for batch in loader.epochs(1)]
    assert step.compiled is (compile is not None)
    return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    monkeypatch.setattr(torch, "compile", compiler_with("eager"))
    return counting()


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "again"),
    [
        pytest.param(Block, False, id="own"),
        pytest.param(Block, True, id="recomputed", marks=pytest.mark.long),
        pytest.param(encoder, False, id="torch's", marks=pytest.mark.long),
        pytest.param(encoder, True, id="torch's, recomputed"),
    ],
)
def test_blocks_of_a_class_are_compiled_once(
    world: shoal.World, counted: dict[str, int], make: Callable[[], nn.Module], again: bool
) -> None:
    strategy = [shoal.ActivationCheckpointing()] if again else None
    expected = losses(world, net(make), None)
    assert counted["unique_graphs"] == 0
    model = net(make)
    names = list(model.state_dict())
    assert losses(world, model, "blocks", strategy) == pytest.approx(expected, rel=1e-12)
    assert 1 <= counted["unique_graphs"] < BLOCKS
    assert list(model.state_dict()) == names


def graphs(world: shoal.World, how: str) -> tuple[list[float], int]:
    stats, torch.compile = counting(), compiler_with("eager")
    return losses(world, net(encoder), how), stats["unique_graphs"]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("how", ["blocks", "inductor"])
def test_sharded_layers_of_torch_are_compiled(world: shoal.World, how: str) -> None:
    expected = losses(world, net(encoder), None)
    with Ranks(2, layout="shard=2", seed=0) as two:
        for found, count in two.call(graphs, how):
            assert found == pytest.approx(expected, rel=1e-12)
            assert count >= 1


def test_a_block_that_the_user_compiled_counts_as_compiled(world: shoal.World) -> None:
    model = shoal.parallelize(net(), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters()), shoal.Task(loss))
    assert not step.compiled
    model.get_submodule("blocks.2").compile(backend="eager")
    assert step.compiled


def whole(world: shoal.World) -> None:
    losses(world, net(), "inductor", [shoal.ActivationCheckpointing()])


def parts(world: shoal.World) -> None:
    losses(world, net(), "blocks", [shoal.ActivationCheckpointing(modules=("blocks.*.narrow",))])


def none(world: shoal.World) -> None:
    losses(world, nn.Linear(4, 1).double(), "blocks")


@pytest.mark.parametrize(
    ("case", "words", "fix"),
    [
        (whole, "as one unit if parts of it are recomputed", "compile='blocks'"),
        (parts, "cannot compile a block if only parts of it", "recomputes whole blocks"),
        (none, "no repeated blocks", "compile='inductor'"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    world: shoal.World, case: Callable[[shoal.World], None], words: str, fix: str
) -> None:
    with pytest.raises(StepError) as raised:
        case(world)
    assert words in raised.value.found
    assert fix in raised.value.fix

"""`shoal checkpoint` on what several ranks have saved: compared and exported as if one had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shoal
from helpers.killed_training import same
from helpers.ranks import Ranks
from shoal.checkpoint.inspect import diff, extract, locate, manifest

pytestmark = pytest.mark.processes

VALUES = torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.linear(values).tanh()
        return output


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return values


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch[0])


def save(world: shoal.World, strategy: Any, folder: Path) -> None:
    """Train two steps, save, and let shoal.export write what the tool should find."""
    torch.manual_seed(3)
    model = shoal.parallelize(Net().double(), world, strategy)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=0.1), shoal.Task(loss))
    ema = shoal.EMA(model, decay=0.5)
    data = shoal.Loader((VALUES,), world, batch_size=8, micro_batches=2)
    with shoal.Run(folder / "run", step, data, state={"ema": ema}) as run:
        for batch in data.epochs(1):
            step(batch)
            ema.update()
            run.tick()
        run.save()
        shoal.export(run, folder / "model.safetensors")
        with ema.applied():
            shoal.export(run, folder / "averaged.safetensors")


def exported(
    found: manifest.CheckpointManifest, out: Path, ema: str | None = None
) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = load_file(extract.extract(found, out, step=None, ema=ema).path)
    return loaded


def save_again(world: shoal.World, folder: Path) -> None:
    model = shoal.parallelize(Net().double(), world)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=0.1), shoal.Task(loss))
    data = shoal.Loader((VALUES,), world, batch_size=8, micro_batches=2)
    with shoal.Run(folder / "run", step, data, state={"ema": shoal.EMA(model, decay=0.5)}) as run:
        assert run.restore() is not None
        run.save(to="again")


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "layout", "strategy"),
    [
        (3, "shard=-1", shoal.FSDP()),
        (2, "pipeline=2", shoal.Pipeline(split_points=("blocks.2",))),
    ],
)
def test_as_if_one_process_had_saved(
    size: int, layout: str, strategy: Any, ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    with Ranks(size, layout=layout) as ranks:
        ranks.call(save, strategy, tmp_path / "many")
    ranks_of(1).call(save, shoal.SingleProcess(), tmp_path / "one")
    ranks_of(1).call(save_again, tmp_path / "many")
    places = ("many/run/checkpoints", "one/run/checkpoints", "many/run/again")
    paths = [tmp_path / place / "step-2" for place in places]
    assert [locate.examine(path, read=True).problems for path in paths] == [[]] * 3
    many, one, again = map(manifest.inspect_checkpoint, paths)
    if isinstance(strategy, shoal.FSDP):
        assert {len(row.chunks) for name, row in many.tensors.items() if name.endswith("weight")} == {3}

    out = tmp_path / "out.safetensors"
    assert same(exported(many, out), load_file(tmp_path / "many/model.safetensors"))
    assert same(exported(many, out, "ema"), load_file(tmp_path / "many/averaged.safetensors"))

    # Saved divided, restored and saved again by one process, not an element differs; trained by one
    # process, the last bits do.
    for other, most in ((again, 0.0), (one, 1e-12)):
        found = diff.compare(many, other)
        assert (found.only_second, found.reformed) == ((), ())
        # Other ranks have random states of their own; all else is there once.
        assert {name.split("/")[0] for name in found.only_first} <= {"rank"}
        state = [each for each in found.changed if each.name.startswith("state/")]
        assert all(each.relative <= most for each in state)
        assert {path.split("/")[0] for path, *_ in found.plain} <= {"ranks", "rank"}

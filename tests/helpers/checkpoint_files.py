"""A world of one that saves, what may become of its files, and `shoal checkpoint` on them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import shoal
from shoal.checkpoint import AnyPath
from shoal.checkpoint.store import FileRecord, Manifest
from shoal.cli.main import app


@dataclass(frozen=True)
class NoLosses:
    """The membership of a world whose ranks may not be lost."""

    survivors: None = None


NO_LOSSES = NoLosses()


@dataclass(frozen=True)
class Alone:
    """A world of one; `size` can pretend to be another when only reading is tested."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    membership: Any = NO_LOSSES

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


def small_run(world: shoal.World, directory: Path, **options: Any) -> shoal.Run:
    """A run of ten batches an epoch; its model is the same each time."""
    torch.manual_seed(0)
    model = shoal.parallelize(nn.Linear(3, 1), world)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), task)
    samples = torch.arange(120.0).reshape(40, 3) / 100
    data = shoal.Loader((samples,), world, batch_size=4)
    return shoal.Run(directory, step, data, **options)


def names(directory: AnyPath) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def flip(path: Path) -> None:
    """Alter one bit."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def forge(step: Path, name: str, content: bytes) -> None:
    """Replace a file, and its size and sum in the manifest."""
    manifest = Manifest.parse((step / "manifest.json").read_bytes())
    (step / name).write_bytes(content)
    record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    forged = replace(manifest, files={**manifest.files, name: record})
    (step / "manifest.json").write_bytes(forged.render())


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def checkpoint(*arguments: object) -> tuple[int, str]:
    """The exit code of `shoal checkpoint` and what it printed; a ShoalError is raised."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output

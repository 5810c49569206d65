"""Cost of a checkpoint of 500 MB in Shoal, compared with torch.save and torch's own sharded saves.

    python benchmarks/checkpoint.py [--rounds 7] [--megabytes 500] [--ways DDP] [--json]

A model and its AdamW state in float32, on one process, on two under DDP and on two under FSDP; the
tensors are those of 10 layers of 2048 x 2048. `torch.save` gathers them on rank 0, which writes one
file while the others wait, as scripts do; it is synced here, as the others are. `dcp.save` is torch's
sharded save. `dcp.async_save` writes in the background, staged as it is by default; `reused` has one
stager that keeps its buffer (DefaultStager with all options off). DCP's saves have a separate Gloo
group. `copy` is one copy of a rank's tensors, into memory that has been used before.

"Blocked" is until the training loop may continue, "total" until all is on the disk, each of the slowest
rank. Memory is the largest increase of the resident memory of a process during a save; for a buffer
that is kept, in the first save, which counts for memory and not for time.

`--directory` is on the disk that is measured. Aims: blocked at most 1.2 x the copy, total at most that
of dcp.save.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.utils._pytree import tree_leaves

import shoal
from harness import alternate, finish, machine, parse, quartiles, ratios, show
from loops import loss
from shoal.checkpoint import Checkpoints
from shoal.checkpoint.async_save import BackgroundSaver
from shoal.distributed.watchdog.world_watchdog import CHECKED_STEPS
from shoal.strategies.dtensor import share

WAYS = {"alone": "replicate=1", "DDP": "replicate=2", "FSDP": "shard=2"}
WIDTH = 2048
PER_LAYER = 3 * 4 * WIDTH * WIDTH
"""Bytes of a layer: its weight and Adam's two moments of it."""

Wait = Callable[[], object]
SaveRecord = Callable[[Path], Wait]
"""A function that begins a save, and returns one that waits until it is on the disk."""


class Saved(NamedTuple):
    """Seconds and bytes of memory of a save on the worst rank, and the bytes on the disk."""

    blocked: float
    total: float
    memory: int
    written: int


class Training:
    """A model in mid-training, parallelized over the world."""

    def __init__(self, world: shoal.World, megabytes: int) -> None:
        layers = max(1, round(megabytes * 1e6 / PER_LAYER))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.model = shoal.parallelize(model, world)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step = shoal.Step(self.model, self.optimizer, shoal.Task(loss))

    def state(self, *, whole: bool = False) -> dict[str, Any]:
        """Return model and optimizer state by name; sharded, or gathered on the CPU of rank 0."""
        options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def local(self) -> list[Tensor]:
        """Return the tensors of this rank."""
        tensors = [leaf for leaf in tree_leaves(self.state()) if isinstance(leaf, Tensor)]
        return [share(tensor) for tensor in tensors]


def contenders(world: shoal.World, training: Training) -> dict[str, SaveRecord]:
    """Return the functions that save; each is called on all ranks."""
    group = dist.new_group(backend="gloo") if world.group is not None else None
    kept = DefaultStager(StagingOptions(False, False, False, False))
    sharded = world.layout.shard > 1
    background = BackgroundSaver(world)

    def on_rank_0(directory: Path) -> Wait:
        if world.is_rank_zero or sharded:
            state = training.state(whole=sharded)
            if world.is_rank_zero:
                with (directory / "state.pt").open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
        world.barrier()
        return int

    def synchronous(directory: Path) -> Wait:
        save(training.state(), checkpoint_id=directory, process_group=group)
        return int

    def asynchronous(directory: Path, stager: DefaultStager | None) -> Wait:
        future: Any = async_save(
            training.state(), checkpoint_id=directory, process_group=group, async_stager=stager
        )
        return future.result  # type: ignore[no-any-return]

    def through_shoal(directory: Path) -> Wait:
        """Save as a Run does, without its events."""
        checkpoints = Checkpoints(directory, world)
        checkpoints.background = background
        return checkpoints.start(1, {"step": training.step.state_dict()}, {}, {}).wait

    return {
        "torch.save": on_rank_0,
        "dcp.save": synchronous,
        "dcp.async_save": partial(asynchronous, stager=None),
        "dcp.async_save reused": partial(asynchronous, stager=kept),
        "shoal": through_shoal,
    }


def resident() -> int:
    """Return the resident memory of this process in bytes, after freed memory is returned."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current value
    return _highest()


def _highest() -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM")
    return int(found[1]) * 1024


def save_once(world: shoal.World, save: SaveRecord, directory: Path) -> Saved:
    """Save on all ranks. Collective."""
    if world.is_rank_zero:
        directory.mkdir()
        os.sync()  # earlier removals must not be waited for below
    before = resident()
    world.barrier()
    begun = time.perf_counter()
    wait = save(directory)
    blocked = time.perf_counter() - begun
    wait()
    total = time.perf_counter() - begun
    worst = map(max, zip(*world.gather((blocked, total, _highest() - before)), strict=True))
    written = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    world.barrier()
    if world.is_rank_zero:
        shutil.rmtree(directory)
    seconds, total_seconds, memory = worst
    return Saved(seconds, total_seconds, memory, written)


def measure(given: argparse.Namespace, way: str, folder: Path) -> tuple[float, list[dict[str, Any]]]:
    """Return the megabytes of a rank, and a row for each save."""
    warnings.filterwarnings("ignore", category=UserWarning)  # DCP's, of a world of one
    with shoal.init(layout=WAYS[way], device="cpu") as world:
        training = Training(world, given.megabytes)
        for _ in range(CHECKED_STEPS + 1):
            world.watchdog.begin_step()  # the check of collectives in the first steps is over
        pairs = [(tensor, torch.ones_like(tensor)) for tensor in training.local()]
        number = itertools.count()

        def copy() -> Saved:
            world.barrier()
            begun = time.perf_counter()
            for tensor, target in pairs:
                target.copy_(tensor)
            seconds = max(world.gather(time.perf_counter() - begun))
            return Saved(seconds, seconds, 0, 0)

        def numbered(save: SaveRecord) -> Saved:
            return save_once(world, save, folder / str(next(number)))

        actions: dict[str, Callable[[], Saved]] = {"copy": copy}
        for who, save in contenders(world, training).items():
            actions[who] = partial(numbered, save)
        found = alternate(actions, given.rounds + 1)  # the first of each counts only for memory
        held = sum(tensor.nbytes for tensor in training.local()) / 1e6
    blocked = {who: [each.blocked for each in saves[1:]] for who, saves in found.items()}
    total = {who: [each.total for each in saves[1:]] for who, saves in found.items()}
    return held, [
        {
            "save": who,
            "blocked, s": quartiles(blocked[who]),
            "/ copy": quartiles(ratios(blocked[who], blocked["copy"])),
            "total, s": quartiles(total[who]),
            "/ dcp.save": quartiles(ratios(total[who], total["dcp.save"])),
            "MB": saves[-1].written / 1e6,
            "memory, MB": max(each.memory for each in saves) / 1e6,
        }
        for who, saves in found.items()
    ]


def main() -> None:
    given = parse(__doc__, ways=WAYS, rounds=7, megabytes=500, directory=Path)
    figures = {}
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        for way in given.ways:
            size = shoal.Layout.parse(WAYS[way]).size
            held, rows = shoal.launch(measure, given, way, Path(folder), processes=size)[0]
            show(f"{way}, {size} process(es) with {held:.0f} MB each, {machine()}", rows)
            figures[way] = rows
    finish(given, {"checkpoint": figures})


if __name__ == "__main__":
    main()

"""Cost of a checkpoint of 500 MB in Shoal, compared with torch.save and torch's own sharded saves.

    python benchmarks/checkpoint.py [--rounds 7] [--megabytes 500] [--only DDP] [--json]

A model and its AdamW state in float32, on one process, on two under DDP and on two under FSDP; the
tensors are those of 10 layers of 2048 x 2048. `torch.save` gathers them on rank 0, which writes one
file while the others wait, as scripts do; it is synced here, as the others are. `dcp.save` is torch's
sharded save. `dcp.async_save` writes in the background, staged as it is by default; `reused` has one
stager that keeps its buffer (DefaultStager with all options off). DCP's saves have a separate Gloo
group. `copy` is one copy of a rank's tensors, into memory that has been used before.

A round runs each of them once, in an order that rotates; ratios are within rounds. "Blocked" is until
the training loop may continue, "total" until all is on the disk, each of the slowest rank. Memory is
the largest increase of the resident memory of a process during a save; for a buffer that is kept, in
the first save, which counts for memory and not for time.

Aims: blocked at most 1.2 x the copy, total at most that of dcp.save.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.utils._pytree import tree_leaves

import shoal
from shoal.checkpoint import Checkpoints
from shoal.checkpoint.async_save import BackgroundSaver
from shoal.distributed.watchdog.world_watchdog import CHECKED_STEPS
from shoal.strategies.dtensor import share
from spread import Spread, quartiles

LAYOUTS = {"alone": "replicate=1", "DDP": "replicate=2", "FSDP": "shard=2"}
WIDTH = 2048
PER_LAYER = 3 * 4 * WIDTH * WIDTH
"""Bytes of a layer: its weight and Adam's two moments of it."""

Wait = Callable[[], object]
SaveRecord = Callable[[Path], Wait]
"""A function that begins a save, and returns one that waits until it is on the disk."""


class Training:
    """A model in mid-training, parallelized over the world."""

    def __init__(self, world: shoal.World, megabytes: int) -> None:
        layers = max(1, round(megabytes * 1e6 / PER_LAYER))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.model = shoal.parallelize(model, world, None if world.layout.shard == 1 else shoal.FSDP())
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step = shoal.Step(self.model, self.optimizer, shoal.Task(_loss))

    def state(self, *, whole: bool = False) -> dict[str, Any]:
        """Return model and optimizer state by name; sharded, or gathered on the CPU of rank 0."""
        options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def local(self) -> list[Tensor]:
        """Return the tensors of this rank."""
        tensors = [leaf for leaf in tree_leaves(self.state()) if isinstance(leaf, Tensor)]
        return [share(tensor) for tensor in tensors]


def _loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def nothing() -> None:
    """Return at once, since all is on the disk already."""


def contenders(world: shoal.World, training: Training) -> dict[str, SaveRecord]:
    """Return the functions that save; each is called on all ranks."""
    group = dist.new_group(backend="gloo") if world.group is not None else None
    kept = DefaultStager(StagingOptions(False, False, False, False))
    sharded = world.layout.shard > 1

    def on_rank_0(directory: Path) -> Wait:
        if world.is_rank_zero or sharded:
            state = training.state(whole=sharded)
            if world.is_rank_zero:
                with (directory / "state.pt").open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
        world.barrier()
        return nothing

    def synchronous(directory: Path) -> Wait:
        save(training.state(), checkpoint_id=directory, process_group=group)
        return nothing

    def asynchronous(directory: Path, stager: DefaultStager | None) -> Wait:
        future: Any = async_save(
            training.state(), checkpoint_id=directory, process_group=group, async_stager=stager
        )
        return future.result  # type: ignore[no-any-return]

    return {
        "torch.save": on_rank_0,
        "dcp.save": synchronous,
        "dcp.async_save": partial(asynchronous, stager=None),
        "dcp.async_save reused": partial(asynchronous, stager=kept),
        "shoal": through_shoal(world, training),
    }


def through_shoal(world: shoal.World, training: Training) -> SaveRecord:
    """Return a function that saves as a Run does, without its events."""

    background = BackgroundSaver(world)

    def begin(directory: Path) -> Wait:
        checkpoints = Checkpoints(directory, world)
        checkpoints.background = background
        return checkpoints.start(1, {"step": training.step.state_dict()}, {}, {}).wait

    return begin


def copied(training: Training) -> Callable[[], float]:
    """Return a function that copies this rank's tensors into used memory, and returns the seconds."""
    pairs = [(tensor, torch.ones_like(tensor)) for tensor in training.local()]

    def copy() -> float:
        begun = time.perf_counter()
        for tensor, target in pairs:
            target.copy_(tensor)
        return time.perf_counter() - begun

    return copy


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


def one(world: shoal.World, save: SaveRecord, directory: Path) -> dict[str, float]:
    """Save once, on all ranks; return seconds and memory of the worst rank, bytes on the disk."""
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
    worst = [
        max(each) for each in zip(*world.gather((blocked, total, _highest() - before)), strict=True)
    ]
    written = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    world.barrier()
    if world.is_rank_zero:
        shutil.rmtree(directory)
    return dict(zip(("blocked", "total", "memory", "written"), (*worst, written), strict=True))


def measure(world: shoal.World, name: str, folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    training = Training(world, megabytes)
    for _ in range(CHECKED_STEPS + 1):
        world.watchdog.begin_step()  # the check of collectives in the first steps is over
    saves, copy = contenders(world, training), copied(training)
    names = list(saves)
    found: dict[str, list[dict[str, float]]] = {who: [] for who in names}
    copies: list[float] = []
    for number in range(-1, rounds):  # the first of each counts only for memory
        turn = number % len(names)
        for who in names[turn:] + names[:turn]:
            found[who].append(one(world, saves[who], folder / re.sub(r"\W", "-", f"{who}-{number}")))
        world.barrier()
        copies.append(max(world.gather(copy())))
    held = sum(tensor.nbytes for tensor in training.local())
    return {
        "way": name,
        "processes": world.size,
        "held": held,
        "copy": asdict(quartiles(copies[1:])),
        "saves": {who: _figures(found[who], found["dcp.save"], copies) for who in names},
    }


def _figures(
    ours: list[dict[str, float]], sharded: list[dict[str, float]], copies: list[float]
) -> dict[str, Any]:
    counted = list(zip(ours, sharded, copies, strict=True))[1:]
    return {
        "blocked": statistics.median(each["blocked"] for each, _, _ in counted),
        "blocked / copy": asdict(quartiles([each["blocked"] / copy for each, _, copy in counted])),
        "total": statistics.median(each["total"] for each, _, _ in counted),
        "total / dcp.save": asdict(quartiles([one["total"] / two["total"] for one, two, _ in counted])),
        "written": ours[-1]["written"],
        "memory": max(each["memory"] for each in ours),
    }


def show(figures: dict[str, Any]) -> None:
    held, copy = figures["held"] / 1e6, Spread(**figures["copy"])
    print(
        f"\n{figures['way']}, {figures['processes']} process(es) with {held:.0f} MB each; copy {copy} s"
    )
    print(f"{'':<23}{'blocked':>8}{'/ copy':>24}{'total':>9}{'/ dcp.save':>24}{'MB':>5}{'memory':>7}")
    for who, row in figures["saves"].items():
        blocked, total = (
            "{median:.2f} ({low:.2f} to {high:.2f})".format(**row[ratio])
            for ratio in ("blocked / copy", "total / dcp.save")
        )
        print(
            f"  {who:<21}{row['blocked']:>6.3f} s{blocked:>24}{row['total']:>7.3f} s{total:>24}"
            f"{row['written'] / 1e6:>5.0f}{row['memory'] / 1e6:>7.0f}"
        )


def inside(way: str, result: Path, folder: Path, megabytes: int, rounds: int) -> None:
    """Measure on one rank."""
    warnings.filterwarnings("ignore", category=UserWarning)  # DCP's, of a world of one
    with shoal.init(layout=LAYOUTS[way], device="cpu") as world:
        figures = measure(world, way, folder, megabytes, rounds)
        if world.is_rank_zero:
            result.write_text(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=500, help="of state, over all ranks")
    parser.add_argument("--only", choices=LAYOUTS, help="measure only this strategy")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured")
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--inside", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        way, result = options.inside
        inside(way, Path(result), options.directory, options.megabytes, options.rounds)
        return
    found = []
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for way in [options.only] if options.only else LAYOUTS:
            result = f"{folder}/{way}.json"
            size = shoal.Layout.parse(LAYOUTS[way]).size
            given = ["--rounds", str(options.rounds), "--megabytes", str(options.megabytes)]
            command = [sys.executable, "-m", "shoal", "run", "-n", str(size), __file__, "--", *given]
            subprocess.run([*command, "--directory", folder, "--inside", way, result], check=True)
            found.append(json.loads(Path(result).read_text()))
            show(found[-1])
    if options.json:
        print(json.dumps({"checkpoint": found}))


if __name__ == "__main__":
    main()

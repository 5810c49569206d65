"""How long a checkpoint of 8 GB stops training: Shoal compared with torch.save and DCP's async_save.

python benchmarks/gpu/stall.py --directory /fast/disk
python benchmarks/gpu/stall.py --gigabytes 0.01 --width 128 --rounds 1 --steps 2

A network of square layers with the state of AdamW, on one GPU. "Stall" is the time by which a save and
the steps after it take longer than the steps alone, the device's time included. "Total" is until all
is in the files. dcp.async_save is with the options by default, and with pinned memory, copied in the
background and awaited before the next update, as in the documentation of torch.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

import shoal
from measuring import RoundTimer, parse_options, print_figures, show
from shoal.checkpoint import Checkpoints
from shoal.checkpoint.async_save import BackgroundSaver
from shoal.util import accelerator

from harness import spread, timed  # isort: skip

BYTES_PER_PARAMETER = 12
"""A weight in float32 and two moments of AdamW."""

Wait = Callable[[], object]
Save = Callable[[Path], Wait]
"""A function that begins a save, and returns one that waits until it is in the files."""


def layers_for(gigabytes: float, width: int) -> int:
    """Return the number of layers whose state has this size."""
    return max(1, round(gigabytes * 1e9 / (BYTES_PER_PARAMETER * width**2)))


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.float().square().mean(1).sum(), len(output)


class Training:
    """A model in mid-training, whose steps every save interrupts in the same way."""

    def __init__(self, given: argparse.Namespace, world: shoal.World) -> None:
        count = layers_for(given.gigabytes, given.width)
        layers = (nn.Linear(given.width, given.width, bias=False) for _ in range(count))
        self.model = shoal.parallelize(nn.Sequential(*layers), world)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step = shoal.Step(self.model, self.optimizer, shoal.Task(loss), precision="bf16")
        data = shoal.Loader((torch.randn(8 * given.batch, given.width),), world, batch_size=given.batch)
        self._batches = data.epochs(10**9)
        self.before_update: Wait = int
        self.optimizer.register_step_pre_hook(self._await_staging)

    def _await_staging(self, *_: object) -> None:
        self.before_update()

    def advance(self) -> None:
        """Take a step."""
        self.step(next(self._batches))

    def state(self) -> dict[str, Any]:
        """Return model and optimizer state by name."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def by_torch(training: Training) -> Save:
    """Return a function that writes one file while training waits."""

    def save(directory: Path) -> Wait:
        directory.mkdir()
        torch.save(training.state(), directory / "state.pt")
        return int

    return save


def by_dcp(training: Training, options: StagingOptions) -> Save:
    """Return a function that saves in the background with torch's distributed checkpoints."""
    stager = DefaultStager(options)  # which keeps its buffer from one save to the next

    def save(directory: Path) -> Wait:
        found: Any = async_save(training.state(), checkpoint_id=directory, async_stager=stager)
        if not isinstance(found, AsyncSaveResponse):
            return found.result  # type: ignore[no-any-return]
        training.before_update = found.staging_completion.result
        return found.upload_completion.result

    return save


def by_shoal(training: Training, world: shoal.World) -> Save:
    """Return a function that saves in the background as a Run does, without its events."""
    background = BackgroundSaver(world)

    def save(directory: Path) -> Wait:
        checkpoints = Checkpoints(directory, world)
        checkpoints.background = background
        training.step.engine.settle()  # a late result is looked at before a save
        return checkpoints.start(1, {"step": training.step.state_dict()}, {}, {}).wait

    return save


def stalled(
    training: Training, save: Save, directory: Path, steps: int, world: shoal.World
) -> tuple[float, float]:
    """Return the seconds by which a save prolongs the steps after it, and until it is in the files."""
    alone = steps * timed(world, training.advance, steps)
    accelerator.synchronize(world.device)
    begun = time.perf_counter()
    wait = save(directory)
    for _ in range(steps):
        training.advance()
    accelerator.synchronize(world.device)
    prolonged = time.perf_counter() - begun - alone
    wait()
    total = time.perf_counter() - begun
    training.before_update = int
    shutil.rmtree(directory)
    return prolonged, total


def measure(
    given: argparse.Namespace,
    training: Training,
    saves: Mapping[str, Save],
    folder: Path,
    world: shoal.World,
) -> dict[str, list[tuple[float, float]]]:
    """Return the stall and the total of each save in each round; print the medians so far."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in saves}
    timer = RoundTimer(given.seconds, world)
    for number in range(-1, given.rounds):  # the first one makes the buffers
        for name, save in saves.items():
            times = stalled(training, save, folder / "saved", given.steps, world)
            found[name] += [times] if number >= 0 else []
        goes_on = timer.goes_on()
        if number >= 0:
            print_figures(given, {"gigabytes": given.gigabytes, **medians(found)}, world)
            if not goes_on:
                break
    return found


def medians(found: Mapping[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Return the seconds of the median stall and total of each save."""
    return {
        name: {
            part: round(statistics.median(times), 3)
            for part, times in zip(("stall_s", "total_s"), zip(*pairs, strict=True), strict=True)
        }
        for name, pairs in found.items()
    }


def main() -> None:
    """Measure, and print."""
    sizes = {"gigabytes": 8.0, "width": 4096, "batch": 4096, "rounds": 2, "steps": 20}
    given = parse_options(__doc__, **sizes, directory=Path)
    with shoal.init() as world, tempfile.TemporaryDirectory(dir=given.directory) as folder:
        training = Training(given, world)
        in_place = StagingOptions(False, False, False, False)
        saves = {
            "torch.save": by_torch(training),
            "dcp.async_save": by_dcp(training, in_place),
            "Shoal": by_shoal(training, world),
        }
        if accelerator.is_accelerator(world.device):
            pinned = StagingOptions(use_shared_memory=False)
            saves["dcp.async_save, pinned"] = by_dcp(training, pinned)
        found = measure(given, training, saves, Path(folder), world)
        rows = []
        for name, pairs in found.items():
            stalls, totals = zip(*pairs, strict=True)
            rows.append({"save": name, "stall (s)": spread(stalls), "total (s)": spread(totals)})
        show(f"A checkpoint of {given.gigabytes:g} GB", rows, world)
        print_figures(given, {"gigabytes": given.gigabytes, **medians(found)}, world)


if __name__ == "__main__":
    main()

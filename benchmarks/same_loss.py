"""The picture of the README: one training with 1, 2 and 4 processes, and killed on 4, resumed on 3.

`shoal run` runs each, on scanned digits in float64; rank 1 of the killed one sends itself SIGKILL
between two checkpoints. The upper plot has the recorded losses, the lower one their differences from
those of one process. Needs the extra `examples`.

    python benchmarks/same_loss.py [--steps 56] [--picture docs/pictures/same_loss.svg] [--json]
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import shoal
from harness import INK, SVG, finish, parse, show
from loops import loss
from shoal.telemetry import events

EVERY = 12
"""Steps between two checkpoints."""
BATCH = 64  # of 1,437 samples: the last batch of an epoch has 29, which 2, 3 and 4 don't divide


class Point(NamedTuple):
    """The loss of a step, and the number of processes that took it."""

    step: int
    loss: float
    processes: int


class Look(NamedTuple):
    """The style of a curve, and the first point with a marker."""

    colour: str
    marker: str
    first: int


LOOKS = (Look("#d9822b", "s", 0), Look("#3b82c4", "^", 1), Look("#c2559d", "o", 2))


def train(directory: Path, steps: int, dies_after: int | None) -> None:
    """Train on one rank; rank 1 kills itself after a step, if asked to."""
    from sklearn.datasets import load_digits

    torch.set_default_dtype(torch.float64)
    digits = load_digits()
    samples = torch.tensor(digits.data)[:1437] / 16, torch.tensor(digits.target)[:1437]
    with shoal.init(seed=0) as world:
        net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        model = shoal.parallelize(net, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
        data = shoal.Loader(samples, world, batch_size=BATCH)
        with shoal.Run(directory, step, data) as run:
            run.restore()
            for batch in data.epochs(steps):
                step(batch)
                run.tick(every=EVERY)
                if step.number == dies_after and world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step.number == steps:
                    break


def launch(processes: int, directory: Path, steps: int, dies_after: int | None = None) -> None:
    given = ["--rank-of", str(directory), "--steps", str(steps)]
    given += [] if dies_after is None else ["--dies-after", str(dies_after)]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", "-n", str(processes), __file__, "--", *given],
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
        check=False,
    )
    if (done.returncode == 0) is not (dies_after is None):
        raise SystemExit(f"{processes} processes ended with {done.returncode}:\n{done.stderr}")


def recorded(directory: Path) -> list[Point]:
    """Return the steps of a run, each as the last attempt that took it recorded it."""
    taken = events.steps_by_rank(directory / "events")
    return [Point(step, ranks[0]["loss"], len(ranks)) for (_, step), ranks in sorted(taken.items())]


def measure(steps: int, folder: Path) -> dict[str, list[Point]]:
    """Return the trainings, keyed by name; the first one is on one process."""
    found = {}
    for processes in (1, 2, 4):
        directory = folder / str(processes)
        launch(processes, directory, steps)
        found[f"{processes} process{'es' if processes > 1 else ''}"] = recorded(directory)
    killed = folder / "killed"
    launch(4, killed, steps, dies_after=steps // 2 // EVERY * EVERY + EVERY // 2)
    launch(3, killed, steps)
    found["killed on 4, resumed on 3"] = recorded(killed)
    return found


def distances(curve: list[Point], one: list[Point]) -> list[float]:
    """Return the difference of each step's loss from that of one process."""
    return [abs(point.loss - other.loss) for point, other in zip(curve, one, strict=True)]


def resized(curve: list[Point]) -> int | None:
    """Return the last step before the number of processes changed."""
    pairs = itertools.pairwise(curve)
    return next((one.step for one, other in pairs if one.processes != other.processes), None)


def draw(found: dict[str, list[Point]], path: Path) -> None:
    """Draw the losses, and below them their differences, as an SVG without a background."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    with mpl.rc_context(SVG):
        figure, (above, below) = pyplot.subplots(
            2, sharex=True, figsize=(7.6, 4.6), height_ratios=(3, 2), layout="constrained"
        )
        (first, one), *others = found.items()
        above.plot([p.step for p in one], [p.loss for p in one], color=INK, lw=1.2, label=first)
        for (name, curve), look in zip(others, LOOKS, strict=True):
            # A third of the points each, so that no marker hides another; below, all of them.
            few = slice(look.first, None, len(LOOKS))
            points = {"color": look.colour, "marker": look.marker, "ls": "", "ms": 5, "mew": 1.2}
            steps = [point.step for point in curve]
            above.plot(steps[few], [p.loss for p in curve][few], label=name, mfc="none", **points)
            below.plot(steps, distances(curve, one), mfc="none", **points | {"ms": 3.5, "mew": 0.9})
            if last := resized(curve):
                for axes in (above, below):
                    axes.axvline(last + 0.5, color=look.colour, lw=1, ls=":")
                foot = {"transform": above.get_xaxis_transform(), "color": look.colour}
                above.text(last + 1, 0.05, f"resumed on {curve[-1].processes}", **foot)
        above.set_ylabel("loss")
        above.legend(frameon=False)
        below.set_yscale("symlog", linthresh=1e-16)
        below.set_ylim(-3e-17, 1e-14)
        below.set_yticks([0, 1e-16, 1e-15, 1e-14], ["0", "1e-16", "1e-15", "1e-14"])
        below.set(xlabel="optimizer step", ylabel="difference from\n1 process")
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color=INK, alpha=0.25, lw=0.5)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    given = parse(__doc__, steps=56, picture=Path, rank_of=Path, dies_after=int)
    if given.rank_of:
        train(given.rank_of, given.steps, given.dies_after)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.steps, Path(folder))
    one, *_ = found.values()
    largest = {name: max(distances(curve, one)) for name, curve in found.items()}
    rows = [
        {"training": name, "last loss": curve[-1].loss, "largest difference": largest[name]}
        for name, curve in found.items()
    ]
    show(f"{given.steps} steps, compared with 1 process", rows)
    if given.picture:
        draw(found, given.picture)
    finish(given, {"largest_difference": largest})


if __name__ == "__main__":
    main()

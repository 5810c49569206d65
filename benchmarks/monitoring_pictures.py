"""The pictures of the pages about monitoring, from one short run on four processes.

Rank 2 takes longer for each forward pass. While the run is active, the page of `shoal watch` is saved
as SVG. Afterwards the page of `shoal report` is saved as PNG, by headless chromium, and recorded steps
as a timeline in SVG. Needs the extras `examples` and `report`.

    python benchmarks/monitoring_pictures.py [--pictures docs/pictures]
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

import shoal
from harness import SVG, parse
from helpers.browser import browser
from loops import loss
from shoal.tools.report.dashboard.layout import dashboard_lines
from shoal.tools.report.dashboard.snapshot_builder import SnapshotBuilder
from shoal.tools.report.dashboard.theme import TerminalStyle

SLOW, EXTRA = 2, 0.012
WINDOW = (40, 41)
WIDTH, HEIGHT = 1000, 900
KINDS = {"forward": "#3b82c4", "backward": "#7b61b5", "communication": "#d9822b", "update": "#3f9b57"}
OPERATIONS = (
    ("communication", ("gloo:", "c10d::")),
    ("update", ("Optimizer.step",)),
    ("backward", ("autograd::engine",)),
    ("forward", ("slow", "aten::linear", "aten::gelu", "aten::cross_entropy_loss")),
)


class Network(nn.Sequential):
    """A small network that is slow on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)
        )
        self.slow = rank == SLOW

    def forward(self, inputs: Tensor) -> Tensor:
        if self.slow and self.training:
            with torch.profiler.record_function("slow"):
                time.sleep(EXTRA)
        output: Tensor = super().forward(inputs)
        return output


def train(directory: str, steps: int) -> None:
    with shoal.init(seed=0) as world:
        inputs = torch.randn(6400, 256)
        labels = inputs[:, :10].argmax(1)
        model = shoal.parallelize(Network(world.rank), world)
        step = shoal.Step(model, torch.optim.AdamW(model.parameters(), 3e-4), shoal.Task(loss))
        loader = shoal.Loader((inputs, labels), world, batch_size=128)
        with shoal.Run(directory, step, loader, profile=WINDOW) as run:
            for batch in loader.epochs(-(-steps // 50)):
                step(batch)
                run.tick(every=100)


def dashboard(run: Path, picture: Path) -> None:
    """Save the current page of `shoal watch`."""
    lines = dashboard_lines(
        SnapshotBuilder(run).look(), 88, 30, TerminalStyle(colour=True, unicode=True)
    )
    console = Console(
        file=io.StringIO(), record=True, width=88, force_terminal=True, color_system="truecolor"
    )
    console.print(Text("\n").join(lines))
    text = console.export_svg(title="shoal watch runs/a")
    begin, end = text.index("@font-face"), text.index(".terminal-", text.index("@font-face"))
    text = text[:begin] + text[end:]  # no request to another host
    text = text.replace("Fira Code, monospace", "ui-monospace, DejaVu Sans Mono, Menlo, monospace")
    picture.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def report(run: Path, picture: Path) -> None:
    """Save the top of the page of `shoal report`."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile") as chromium:
        chromium.open(run / "report" / "index.html", width=WIDTH)
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
        shot = chromium.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        picture.write_bytes(base64.b64decode(shot["data"]))


def timeline(run: Path, picture: Path) -> None:
    """Draw the recorded steps, a row for each rank."""
    with gzip.open(next((run / "traces").glob("steps-*.json.gz")), "rt", encoding="utf-8") as file:
        found = json.load(file)
    events = [event for event in found["traceEvents"] if event.get("ph") == "X"]
    begin = min(event["ts"] for event in events if kind(event))
    mpl.rcParams |= SVG
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    ranks = sorted({event["pid"] for event in events if kind(event)})
    for row, rank in enumerate(ranks):
        for name, colour in KINDS.items():
            bars = [
                ((event["ts"] - begin) / 1e3, event["dur"] / 1e3)
                for event in events
                if event["pid"] == rank and kind(event) == name
            ]
            axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=colour)
    axes.set_yticks(range(len(ranks)), [f"rank {row}" for row in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=name) for name, colour in KINDS.items()]
    axes.legend(handles=handles, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(picture, transparent=True, metadata={"Date": None})


def kind(event: dict[str, Any]) -> str | None:
    """Return the part of a step to which an operation belongs; None for all others."""
    name = str(event["name"])
    return next((part for part, begins in OPERATIONS if name.startswith(begins)), None)


def main() -> None:
    options = parse(__doc__, pictures=Path("docs/pictures"), steps=600, train=str)
    if options.train:
        train(options.train, options.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        pictures = options.pictures.resolve()
        os.chdir(folder)
        run = Path("runs/a")
        shoal_run = [sys.executable, "-m", "shoal", "run", "-n", "4", str(Path(__file__).resolve())]
        arguments = ["--train", "runs/a", "--steps", str(options.steps)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        running = subprocess.Popen([*shoal_run, *arguments], env=environment)
        while running.poll() is None and not (run / "checkpoints" / "step-400").is_dir():
            time.sleep(0.1)
        dashboard(run, pictures / "watch.svg")
        if running.wait():
            raise SystemExit(running.returncode)
        command = [sys.executable, "-m", "shoal", "report", "runs/a"]
        subprocess.run(command, check=True)
        window = f"{WINDOW[0]}:{WINDOW[1]}"
        subprocess.run([*command, "--trace", window], check=True)
        report(run, pictures / "report.png")
        timeline(run, pictures / "timeline.svg")


if __name__ == "__main__":
    main()

"""A demo of exact scaling and exact resume in a minute: `make demo`.

It trains examples/digits.py with one and with three processes and compares the losses. It kills one
process in the middle of a save, resumes with the same command and compares the result with an
uninterrupted training.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file

from shoal.telemetry import events

HERE = Path(__file__).parent
RUNS = next(path for n in count(1) if not (path := Path("runs", f"demo-{n}")).exists())
EPOCHS = 12
RANKS = 3
HOLD = r"""
import os, re, sys, threading

def hold(event, arguments):
    path = str(arguments[0]) if event == "open" else ""
    found = re.search(r"step-(\d+)\.partial/rank-1\.", path)
    if found and int(found[1]) > 60:
        with open(os.environ["DEMO_HELD"] + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.replace(file.name, os.environ["DEMO_HELD"])
        threading.Event().wait()

sys.addaudithook(hold)
"""
"""A sitecustomize.py, which Python imports at its start: the thread of rank 1 that writes a checkpoint
after step 60 stops when it opens its file, and writes its process ID to a file for the demo."""


def main() -> None:
    title("1. The same training with one process and with three")
    once = RUNS / "one"
    undisturbed = RUNS / "three"
    run([sys.executable, *digits(once)])
    run(three(undisturbed))
    one, many = losses(once), losses(undisturbed)
    worst = max(abs(one[step] - many[step]) for step in one)
    print(
        f"last loss: {one[max(one)]:.6f} with one process, {many[max(many)]:.6f} with three;\n"
        f"largest difference of the losses over {len(one)} steps: {worst:.1e}"
    )

    title("2. A process is killed in the middle of a save")
    disturbed = RUNS / "killed"
    print(kill_in_a_save(disturbed))

    title("3. The same command again")
    run(three(disturbed))
    repeated, missed = consumed(disturbed)
    same = tensors(disturbed) == tensors(undisturbed)
    verdict = "bit-equal to" if same else "DIFFERENT from"
    print(
        f"resumed at sample {resumed_at(disturbed):,}: {repeated} repeated, {missed} missed;\n"
        f"parameters {verdict} those of the uninterrupted training"
    )
    print(f"\nrun directories: {RUNS}", flush=True)
    if repeated or missed or not same or worst > 1e-6:
        raise SystemExit("the demo failed: a result is not exact")


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def digits(directory: Path) -> list[str]:
    return [str(HERE / "digits.py"), "--run", str(directory), "--epochs", str(EPOCHS)]


def three(directory: Path) -> list[str]:
    script, *arguments = digits(directory)
    return [sys.executable, "-m", "shoal", "run", "-n", str(RANKS), script, "--", *arguments]


def run(command: list[str]) -> None:
    print("$", shown(command), flush=True)
    subprocess.run(command, check=True)


def shown(command: list[str]) -> str:
    text = " ".join(command).replace(f"{sys.executable} -m shoal", "shoal")
    return text.replace(sys.executable, "python").replace(f"{HERE}{os.sep}", "examples/")


def kill_in_a_save(directory: Path) -> str:
    """Start the training, kill rank 1 while it writes its part of a save, and return the report."""
    command = three(directory)
    print("$", shown(command), flush=True)
    with TemporaryDirectory() as place:
        held = Path(place, "held")
        Path(place, "sitecustomize.py").write_text(HOLD)
        paths = [place, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DEMO_HELD": str(held)}
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        while process.poll() is None and not held.exists():
            time.sleep(0.05)
        if not held.exists():
            raise SystemExit(f"{process.communicate()[1]}\nthe training ended before a save was hit")
        (under_way,) = (directory / "checkpoints").glob("*.partial")
        os.kill(int(held.read_text()), signal.SIGKILL)
        report = process.communicate()[1].strip()
    step = under_way.name.removesuffix(".partial")
    return (
        f"{report}\n"
        f"(the demo sent this signal while rank 1 wrote its part of {step})\n"
        f"latest complete checkpoint: {newest(directory).name}"
    )


def newest(directory: Path) -> Path:
    """Return the latest complete checkpoint of a run directory."""
    checkpoints = (directory / "checkpoints").glob("step-*[0-9]")
    return max(checkpoints, key=lambda path: int(path.name.removeprefix("step-")))


def resumed_at(directory: Path) -> int:
    restores = events.read_events(directory / "events" / "rank-0.jsonl")
    return next(int(event["position"]) for event in restores if event["event"] == "restore")


def losses(directory: Path) -> dict[int, float]:
    steps = events.steps_by_rank(directory / "events")
    return {step: ranks[0]["loss"] for (_, step), ranks in steps.items()}


def consumed(directory: Path) -> tuple[int, int]:
    """Return how many positions were consumed more than once, and how many were never consumed."""
    counts: Counter[int] = Counter()
    end = 0
    for ranks in events.steps_by_rank(directory / "events").values():
        for event in ranks.values():
            counts.update(range(*event["share"]))
            end = max(end, event["first"] + event["size"])
    return sum(count - 1 for count in counts.values()), end - len(counts)


def tensors(directory: Path) -> dict[str, bytes]:
    """Return every tensor of the latest complete checkpoint, as bytes."""
    return {
        name: tensor.numpy().tobytes()
        for file in sorted(newest(directory).glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


if __name__ == "__main__":
    main()

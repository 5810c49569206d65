"""What Shoal promises, shown in a minute: `make demo`.

Trains examples/digits.py with one and with three processes and compares; kills a rank in the middle
of a save; resumes with the same command and compares with the run that nobody disturbed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from safetensors.torch import load_file

from shoal import events

HERE = Path(__file__).parent
RUNS = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
EPOCHS = 12
RANKS = 3


def main() -> None:
    title("1. The same training with one process and with three")
    once = RUNS / "one-process"
    undisturbed = RUNS / "three-processes"
    run([sys.executable, *digits(once)])
    run(three(undisturbed))
    one, many = losses(once), losses(undisturbed)
    worst = max(abs(one[step] - many[step]) for step in one)
    print(
        f"last loss: {one[max(one)]:.6f} with one process, {many[max(many)]:.6f} with three;\n"
        f"largest difference of the losses over {len(one)} steps: {worst:.1e}"
    )

    title("2. A rank is killed in the middle of a save")
    disturbed = RUNS / "killed"
    print(kill_in_a_save(disturbed))

    title("3. The same command again")
    run(three(disturbed))
    repeated, missed = consumed(disturbed)
    same = tensors(disturbed) == tensors(undisturbed)
    verdict = "bit-equal to" if same else "DIFFERENT from"
    print(
        f"resumed at sample {resumed_at(disturbed):,}: {repeated} repeated, {missed} missed, "
        f"parameters {verdict} the uninterrupted run"
    )
    print(f"\nrun directories: {RUNS}", flush=True)
    if repeated or missed or not same or worst > 1e-6:
        raise SystemExit("the demo did not keep the promises")


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
    """Start the training, and kill rank 1 where a save after the third can't end without it."""
    command = three(directory)
    print("$", shown(command), flush=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    checkpoints = directory / "checkpoints"
    while process.poll() is None:
        under_way = [path for path in checkpoints.glob("*.partial") if number(path) > 60]
        if under_way:
            rank = pid_of_rank(directory, 1)
            os.kill(rank, signal.SIGSTOP)
            time.sleep(0.5)  # if it had done its part already, the others complete the save
            if under_way[0].exists():
                os.kill(rank, signal.SIGKILL)
                break
            os.kill(rank, signal.SIGCONT)
    report = process.communicate()[1].strip()
    left = sorted(path.name for path in checkpoints.glob("*.partial"))
    if not left:
        return f"{report}\n(each save was complete before the signal came)"
    return f"{report}\n(this demo sent the signal)\nleft behind, and not a checkpoint: {left[0]}"


def number(path: Path) -> int:
    return int(path.name.removeprefix("step-").removesuffix(".partial"))


def pid_of_rank(directory: Path, rank: int) -> int:
    first = next(events.read(directory / "events" / f"rank-{rank}.jsonl"))
    return int(first["pid"])


def resumed_at(directory: Path) -> int:
    restores = events.read(directory / "events" / "rank-0.jsonl")
    return next(int(event["position"]) for event in restores if event["event"] == "restore")


def losses(directory: Path) -> dict[int, float]:
    steps = events.steps(directory / "events")
    return {step: ranks[0]["loss"] for (_, step), ranks in steps.items()}


def consumed(directory: Path) -> tuple[int, int]:
    """How many positions of the training were consumed more than once, and how many never."""
    counts: Counter[int] = Counter()
    end = 0
    for ranks in events.steps(directory / "events").values():
        for event in ranks.values():
            counts.update(range(*event["share"]))
            end = max(end, event["first"] + event["size"])
    return sum(count - 1 for count in counts.values()), end - len(counts)


def tensors(directory: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint, as bytes."""
    newest = max((directory / "checkpoints").glob("step-*[0-9]"), key=number)
    return {
        name: tensor.numpy().tobytes()
        for file in sorted(newest.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


if __name__ == "__main__":
    main()

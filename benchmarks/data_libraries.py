"""Samples repeated and lost in an epoch after SIGKILL, by the ways of data libraries and of Shoal.

    python benchmarks/data_libraries.py [--libraries WebDataset litdata] [--resumed-on 2 3] [--json]

Three ranks read 101 samples in global batches of 12, save after step 4 and are killed in step 6. The
epoch is resumed on `--resumed-on` ranks. Each cell has the samples repeated and those lost, over the
saved steps and those after the resume. "own" is the way that the library documents, with its own state
where it has one, and otherwise drops as many batches as were taken. "Shoal" is shoal.Loader over the
same files, read by the same library. Libraries that are not installed are left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from harness import ROOT, finish, machine, parse, show, versions
from read_data import KILLED, LIBRARIES, SAMPLES, SAVE, WHOLE

SCRIPT = str(ROOT / "benchmarks" / "peers" / "read_data.py")
RANKS = 3


def start(*words: str, ranks: int = 0) -> str:
    """Run the script, on ranks if there are any, and return what it printed if it failed, or ""."""
    launcher = ("-m", "shoal", "run", "-n", str(ranks)) if ranks else ()
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stdout + done.stderr or "failed") if done.returncode else ""


def seen(folder: Path, attempt: str, last: int | None = None) -> list[list[int]]:
    """Return the samples of each batch of each rank up to step `last`."""
    text = "".join(file.read_text() for file in folder.glob(f"{attempt}-*.jsonl"))
    lines = text.splitlines()
    return [ids for step, ids in map(json.loads, lines) if last is None or step <= last]


def outcome(error: str, batches: list[list[int]]) -> str:
    """Return how many samples were repeated and lost, or the error with which the ranks ended."""
    if error:
        print(error[-3000:], file=sys.stderr, flush=True)
        return str((re.findall(r"\b(\w+Error)\b", error) or ["error"])[-1])
    counts = Counter(sample for ids in batches for sample in ids)
    return f"{counts.total() - len(counts)}, {SAMPLES - len(counts)}"


def row(name: str, way: str, folder: Path, resumed_on: list[int]) -> dict[str, str]:
    """Return the figures of one way of reading: a whole epoch, and one that is killed and resumed."""
    folder.mkdir()
    error = start(name, way, str(folder), WHOLE, ranks=RANKS)
    found = {"data": name, "way": way, "not killed": outcome(error, seen(folder, WHOLE))}
    start(name, way, str(folder), KILLED, ranks=RANKS)
    for ranks in resumed_on:
        error = start(name, way, str(folder), str(ranks), ranks=ranks)
        batches = seen(folder, KILLED, SAVE) + seen(folder, str(ranks))
        found[f"{RANKS} to {ranks} ranks"] = outcome(error, batches)
    return found


def main() -> None:
    given = parse(__doc__, libraries=LIBRARIES, resumed_on=[2])
    table: list[dict[str, str]] = []
    for name in given.libraries:
        if not all(map(versions, LIBRARIES[name].packages)):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if error := start(name, "write", temporary):
                raise SystemExit(f"{name} wrote nothing: {error}")
            table += [row(name, way, folder / way, given.resumed_on) for way in ("own", "Shoal")]
        print(*table[-2:], sep="\n", flush=True)
    packages = sorted({package for name in LIBRARIES.values() for package in name.packages})
    show(f"{machine()}; {versions(*packages)}", table)
    finish(given, {"data_libraries": table})


if __name__ == "__main__":
    main()

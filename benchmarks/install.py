"""Size of an installation of Shoal, and time of importing it: bytes, files and seconds.

    python benchmarks/install.py [--rounds 7] [--json]

Sizes: Shoal's own files, and for each installed dependency the files in its RECORD; torch and its own
dependencies are left out. Times: new processes; a training rank uses every name that examples/digits.py
uses.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import shoal
from harness import ROOT, alternate, finish, machine, parse, show, spread


def size_row(name: str, sizes: list[int]) -> dict[str, Any]:
    return {"package": name, "MiB": sum(sizes) / 2**20, "files": len(sizes)}


def own() -> list[int]:
    """Return the sizes of Shoal's files, since an editable installation's RECORD doesn't list them."""
    files = [path for path in Path(shoal.__file__).parent.rglob("*") if path.is_file()]
    return [path.stat().st_size for path in files if path.suffix != ".pyc"]


def recorded(name: str) -> list[int]:
    return [file.size or 0 for file in metadata.files(name) or () if file.suffix != ".pyc"]


def dependencies(of: str) -> set[str]:
    """Return the installed distributions that one depends on, recursively, except torch."""
    found: set[str] = set()
    asked = [of]
    while asked:
        for requirement in metadata.requires(asked.pop()) or ():
            name = re.split(r"[^\w.-]", requirement)[0].lower()
            wanted = "extra ==" not in requirement and name != "torch" and name not in found
            if wanted and any(True for _ in metadata.Distribution.discover(name=name)):
                found.add(name)
                asked.append(name)
    return found


def commands() -> dict[str, list[str]]:
    example = (ROOT / "examples" / "digits.py").read_text()
    names = sorted(set(re.findall(r"\bshoal\.(\w+)", example)))
    codes = {
        "python": "",
        "import shoal": "import shoal",
        "import torch": "import torch",
        "a training rank": "import torch, shoal; " + "; ".join(f"shoal.{name}" for name in names),
    }
    return {
        **{name: [sys.executable, "-c", code] for name, code in codes.items()},
        "shoal --help": [sys.executable, "-m", "shoal", "--help"],
    }


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - started


def main() -> None:
    given = parse(__doc__, rounds=7)
    needed = {name: recorded(name) for name in dependencies("shoal")}
    sizes = [size_row(name, found) for name, found in {"shoal": own(), **needed}.items()]
    sizes.sort(key=lambda row: -row["MiB"])
    sizes.append(
        size_row("dependencies together", [size for found in needed.values() for size in found])
    )
    show(f"sizes, {machine()}", sizes)
    actions = {name: partial(seconds, command) for name, command in commands().items()}
    # Once each for the file system's cache, uncounted.
    times = alternate(actions, given.rounds, uncounted=1)
    pairs = zip(times["a training rank"], times["import torch"], strict=True)
    times["a training rank - import torch"] = [ours - base for ours, base in pairs]
    rows = [{"process": name, "seconds": spread(values)} for name, values in times.items()]
    show("times", rows)
    finish(given, {"sizes": sizes, "seconds": rows})


if __name__ == "__main__":
    main()

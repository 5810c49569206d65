"""Size of an installation of Shoal, and time of importing it: bytes, files and seconds.

Sizes: Shoal's own files, and for each installed dependency the files in its RECORD; torch and its own
dependencies are left out. Times: new processes, in an order that rotates, so that all see the same
machine; a training rank uses every name that examples/digits.py uses.

    python benchmarks/install.py [--repeats 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import shoal
from spread import Spread, spread

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "digits.py"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Files and bytes, without compiled Python."""

    files: int
    bytes: int


def own() -> Size:
    """Return the size of Shoal's folder, since an editable installation's RECORD doesn't list it."""
    files = [path for path in Path(shoal.__file__).parent.rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files if path.suffix != ".pyc"]
    return Size(files=len(sizes), bytes=sum(sizes))


def recorded(name: str) -> Size:
    sizes = [file.size or 0 for file in metadata.files(name) or () if file.suffix != ".pyc"]
    return Size(files=len(sizes), bytes=sum(sizes))


def dependencies(of: str) -> set[str]:
    """Return the installed distributions that one depends on, recursively, except torch."""
    found: set[str] = set()
    asked = [of]
    while asked:
        for requirement in metadata.requires(asked.pop()) or ():
            name = re.split(r"[^\w.-]", requirement)[0].lower()
            wanted = "extra ==" not in requirement and name != "torch" and name not in found
            if wanted and _installed(name):
                found.add(name)
                asked.append(name)
    return found


def _installed(name: str) -> bool:
    """Return False for dependencies that only another platform or Python needs."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def commands() -> dict[str, list[str]]:
    names = sorted(set(re.findall(r"\bshoal\.(\w+)", EXAMPLE.read_text())))
    rank = "import torch, shoal; " + "; ".join(f"shoal.{name}" for name in names)
    codes = {
        "python": "",
        "import shoal": "import shoal",
        "import torch": "import torch",
        "a training rank": rank,
    }
    return {
        **{name: [sys.executable, "-c", code] for name, code in codes.items()},
        "shoal --help": [sys.executable, "-m", "shoal", "--help"],
    }


def measure(repeats: int) -> dict[str, Spread]:
    """Return seconds of each command, and paired differences of a training rank and `import torch`."""
    named = list(commands().items())
    times: dict[str, list[float]] = {name: [] for name, _ in named}
    for repeat in range(-1, repeats):  # once each for the file system's cache, not counted
        turn = repeat % len(named)
        for name, command in named[turn:] + named[:turn]:
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
            times[name] += [time.perf_counter() - started] if repeat >= 0 else []
    pairs = zip(times["a training rank"], times["import torch"], strict=True)
    figures = {name: spread(values) for name, values in times.items()}
    return figures | {"a training rank - import torch": spread([ours - base for ours, base in pairs])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    needed = {name: recorded(name) for name in dependencies("shoal")}
    largest_first = sorted(needed.items(), key=lambda item: -item[1].bytes)
    together = Size(
        files=sum(size.files for size in needed.values()),
        bytes=sum(size.bytes for size in needed.values()),
    )
    sizes = {"shoal": own(), **dict(largest_first), "dependencies together": together}
    for name, size in sizes.items():
        print(f"  {name:<32}{size.bytes / 2**20:>8.2f} MiB{size.files:>7} files")
    times = measure(options.repeats)
    print(f"seconds; median (lowest to highest) of {options.repeats}")
    for name, values in times.items():
        print(f"  {name:<32}{values}")
    if options.json:
        plain_sizes = {name: asdict(size) for name, size in sizes.items()}
        seconds = {name: asdict(values) for name, values in times.items()}
        print(json.dumps({"sizes": plain_sizes, "seconds": seconds}))


if __name__ == "__main__":
    main()

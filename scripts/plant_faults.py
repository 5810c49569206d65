"""Plant small faults in the source, one at a time, and count those that the tests catch.

    scripts/plant_faults.py build/faults.json                  # 60 faults, the tests of this checkout
    scripts/plant_faults.py build/old.json --tests ../old      # the tests of another checkout
    scripts/plant_faults.py --compare build/old.json build/faults.json

Faults are planted in a copy. The tests of the fault's package run first, then those of packages that
import it; the first failure ends them. The file of results is written after each fault, and a command
that is repeated continues there.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
MARKERS = "not system and not full and not realtime and not long and not gpu and not peers"
LIMIT = 900
"""Seconds for the tests of one fault; tests that take longer have caught it."""
SWAPPED = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"is": "is not", "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and"},
    **{"+": "-", "-": "+", "*": "+", "//": "*"},
}
OPERATOR = re.compile(r"is\s+not|not\s+in|and|or|is|in|[<>=!]=|//|[-<>+*]")


@dataclass(frozen=True)
class Fault:
    """A change of one place: `before` becomes `after`, the `nth` such change of this line's text."""

    path: str
    line: int
    kind: str
    text: str
    before: str
    after: str
    nth: int = 0

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        """What tells it from others, also after other lines of the file have changed."""
        return self.path, self.kind, self.text, self.before, self.after, self.nth


def faults_in(path: str, source: str) -> Iterator[tuple[Fault, str]]:
    """Yield the faults of a module, and its source with each of them."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    seen: Counter[tuple[str, ...]] = Counter()
    whole = b"".join(lines)
    for kind, (line, column), (last, end), after in _changes(ast.parse(source), source):
        begin, stop = starts[line - 1] + column, starts[last - 1] + end
        before, text = whole[begin:stop].decode(), lines[line - 1].decode().strip()
        seen[kind, text, before, after] += 1
        nth = seen[kind, text, before, after] - 1
        changed = (whole[:begin] + after.encode() + whole[stop:]).decode()
        yield Fault(path, line, kind, text, before, after, nth), changed


Place = tuple[int, int]


def _changes(tree: ast.AST, source: str) -> Iterator[tuple[str, Place, Place, str]]:
    """Yield the kind, the place (line and byte) from which to which text changes, and the new text."""
    for node in _code(tree):
        match node:
            case ast.Compare(left=left, ops=[_], comparators=[right]):
                yield from _operator(left, right, source)
            case ast.BoolOp(values=[left, right, *_]):
                yield from _operator(left, right, source)
            case ast.BinOp(
                left=left, right=right, op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv()
            ):
                yield from _operator(left, right, source)
            case ast.Constant(value=bool(value)):
                yield "constant", *_span(node), str(not value)
            case ast.Constant(value=int() | float() as number):
                yield "constant", *_span(node), repr(number + 1)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield "condition", *_span(test), f"(not ({ast.get_source_segment(source, test)}))"
            case (
                ast.Raise()
                | ast.AugAssign()
                | ast.Expr(value=ast.Call())
                | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            ):
                yield "statement", *_span(node), "pass"


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except annotations, code for type checkers, and what f-strings contain."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            checked = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr) and not checked:
                yield from _code(child)


def _span(node: ast.expr | ast.stmt) -> tuple[Place, Place]:
    end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    return (node.lineno, node.col_offset), (end_line, end)


def _operator(left: ast.expr, right: ast.expr, source: str) -> Iterator[tuple[str, Place, Place, str]]:
    """The operator between two operands, where both are on one line."""
    (_, (line, begin)), ((last, end), _) = _span(left), _span(right)
    if line != last:
        return
    between = source.encode().splitlines()[line - 1][begin:end].decode()
    found = OPERATOR.search(between)
    if found is not None:
        place = begin + len(between[: found.start()].encode())
        swapped = SWAPPED[re.sub(r"\s+", " ", found.group())]
        yield "operator", (line, place), (line, place + len(found.group())), swapped


def choose(source: Path, count: int, seed: int) -> list[Fault]:
    """Return as many faults of each package, and of each kind within it, as can be."""
    random, chosen = Random(seed), []
    pools: dict[str, dict[str, list[Fault]]] = {}
    for path in sorted((source / "shoal").glob("*/**/*.py")):
        inside = str(path.relative_to(source))
        for fault, changed in faults_in(inside, path.read_text()):
            if ast.dump(ast.parse(changed)) != ast.dump(ast.parse(path.read_text())):
                pools.setdefault(path.relative_to(source).parts[1], {}).setdefault(
                    fault.kind, []
                ).append(fault)
    packages = sorted(pools)
    random.shuffle(packages)
    while len(chosen) < count:
        kinds = pools[packages[len(chosen) % len(packages)]]
        pool = kinds[random.choice(sorted(kinds))]
        chosen.append(pool.pop(random.randrange(len(pool))))
    return chosen


def importers(source: Path) -> dict[str, list[str]]:
    """Return by package those that import it, directly or not, the nearest first."""
    imports: dict[str, set[str]] = {}
    for path in (source / "shoal").glob("*/**/*.py"):
        found = re.findall(r"\bshoal\.(\w+)", path.read_text())
        imports.setdefault(path.relative_to(source).parts[1], set()).update(found)
    result = {}
    for package in imports:
        reached = [package]
        for one in reached:
            reached += [
                other for other in sorted(imports) if one in imports[other] and other not in reached
            ]
        result[package] = reached[1:]
    return result


def plant(checkout: Path, fault: Fault) -> str | None:
    """Plant a fault in a checkout; return the former source, or None where it is not to be found."""
    path = checkout / "src" / fault.path
    if path.exists():
        former = path.read_text()
        for other, changed in faults_in(fault.path, former):
            if other.key == fault.key:
                path.write_text(changed)
                return former
    return None


def first_failure(checkout: Path, folders: Sequence[str], workers: int) -> str | None:
    """Return the first test in these folders that fails; None if all pass."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "src"),
        "CI": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", MARKERS, "-n", str(workers)]
    process = subprocess.Popen(
        [
            *command,
            "--dist",
            "loadfile",
            "-p",
            "no:randomly",
            *(f"tests/{folder}" for folder in folders),
        ],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode in (0, 5):
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
    return found.group(1) if found else out[-300:]


def copied(tests: Path, folder: Path) -> Path:
    """Return a copy of this checkout with the tests of another."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in names.stdout.splitlines():
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(tests / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(tests / name, folder / name)
    return folder


def run(arguments: argparse.Namespace) -> None:
    """Plant all faults that have no result yet, and write the results."""
    results = Path(arguments.results)
    done = json.loads(results.read_text()) if results.exists() else []
    faults = (
        [Fault(**each["fault"]) for each in json.loads(Path(arguments.like).read_text())]
        if arguments.like
        else choose(ROOT / "src", arguments.faults, arguments.seed)
    )
    known = {Fault(**each["fault"]).key for each in done}
    near = importers(ROOT / "src")
    with tempfile.TemporaryDirectory() as folder:
        checkout = copied(arguments.tests.resolve(), Path(folder))
        have = {path.name for path in (checkout / "tests").iterdir() if path.is_dir()} - {
            "gpu",
            "shape",
        }
        for fault in (each for each in faults if each.key not in known):
            former = plant(checkout, fault)
            if former is None:
                print(f"gone    {fault.path}: {fault.text}", flush=True)
                continue
            package = Path(fault.path).parts[1]
            further = [
                each for each in [*near[package], "docs", "scenarios", "helpers"] if each in have
            ]
            caught = first_failure(checkout, [package], arguments.workers)
            if caught is None and not arguments.package_only:
                caught = first_failure(checkout, further, arguments.workers)
            (checkout / "src" / fault.path).write_text(former)
            done.append({"fault": asdict(fault), "caught": caught})
            results.parent.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps(done, indent=1))
            print(f"{'caught' if caught else 'missed'}  {described(fault)}  {caught or ''}", flush=True)
    print_table(done)


def described(fault: Fault) -> str:
    """Return the place of a fault and its change, in one line."""
    change = f"{' '.join(fault.before.split())[:60]} -> {fault.after[:60]}"
    return f"src/{fault.path}:{fault.line}: {change}"


def print_table(done: Sequence[dict[str, object]]) -> None:
    """Print the number of faults by package, and those that were missed."""
    faults = [(Fault(**each["fault"]), each["caught"]) for each in done]  # type: ignore[arg-type]
    packages = sorted({Path(fault.path).parts[1] for fault, _ in faults})
    for package in packages:
        mine = [caught for fault, caught in faults if Path(fault.path).parts[1] == package]
        print(f"{package:12} {sum(map(bool, mine)):3} of {len(mine)}")
    print(f"{'all':12} {sum(bool(caught) for _, caught in faults):3} of {len(faults)}")
    for fault, caught in faults:
        if not caught:
            print(f"missed: {described(fault)}")


def compare(old: Path, new: Path) -> None:
    """Print both shares, and the faults that one suite caught and the other missed."""
    was, now = (
        {Fault(**each["fault"]).key: each for each in json.loads(path.read_text())}
        for path in (old, new)
    )
    both = [key for key in was if key in now]
    for name, each in (("old", was), ("new", now)):
        print(f"{name}: {sum(bool(each[key]['caught']) for key in both)} of {len(both)}")
    for key in both:
        before, after = bool(was[key]["caught"]), bool(now[key]["caught"])
        if before != after:
            which = "newly missed" if before else "newly caught"
            print(f"{which}: {described(Fault(**was[key]['fault']))}  {was[key]['caught'] or ''}")


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", nargs="?", default="build/faults.json", help="file of results")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tests", type=Path, default=ROOT, help="checkout whose tests run")
    parser.add_argument("--like", help="plant the faults of this file of results")
    parser.add_argument("--package-only", action="store_true", help="only the tests of the package")
    parser.add_argument("--workers", type=int, default=3, help="processes that run tests")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    arguments = parser.parse_args()
    if arguments.compare:
        compare(*arguments.compare)
    else:
        run(arguments)


if __name__ == "__main__":
    main()

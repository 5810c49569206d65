"""Plant small faults in the source at random, one at a time, and count those that the tests catch.

`make faults`, or `plant_faults.py --json FILE`; `--resume FILE` continues. Each fault is planted in a
copy of the checkout. The default suite runs once to record which files of tests run which place; with a
fault, those of its package run first, then the others, up to the first failure. The copy may take its
tests from another checkout (`--tests`), and its faults from an earlier run (`--faults-from`);
`--compare OLD NEW` compares two such runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import cache_from_source
from pathlib import Path

import psutil
from small_faults import Fault, choose_faults, mark_places, plant_fault

ROOT = Path(__file__).resolve().parents[1]
MARK = "PLANTED_FAULT"
"""The variable by which the processes of a copy are found, also those that a test forgets."""
RECORDER = """
import os

opened, read, write, close, seen = os.open, os.read, os.write, os.close, set()


def pytest_runtest_logstart(nodeid):
    with open({current!r}, "w") as file:
        file.write(nodeid.partition("::")[0])


def record(number):
    try:
        file = opened({current!r}, os.O_RDONLY)
        test = read(file, 1000).decode()
        close(file)
        if (number, test) not in seen:
            seen.add((number, test))
            file = opened({reached!r}, os.O_WRONLY | os.O_APPEND)
            write(file, f"{{number}} {{test}}\\n".encode())
            close(file)
    except OSError:
        pass
"""
"""A plugin of pytest that keeps the file of the running test, for all processes, and appends it to a
list where a mark runs. Tests replace functions of `os`."""
PASSED, UNUSABLE, NO_TESTS = 0, 4, 5  # exit codes of pytest that say nothing about the fault


@dataclass(kw_only=True)
class Trial:
    """A fault, and what the tests make of it."""

    fault: Fault
    outcome: str = "open"
    """`caught`, `time` (also caught: the tests hang), `missed`, `absent` from the source, or `open`."""
    test: str = ""
    seconds: float = 0.0
    reached: list[str] | None = None
    """The files of tests that run its place: all, if it runs where tests are collected."""

    @property
    def caught(self) -> bool:
        """Whether the tests notice the fault."""
        return self.outcome in {"caught", "time"}


def package_of(path: str) -> str:
    """Return the package of a module, whose tests have a folder of its name; each tool is one."""
    _, _, first, second, *_ = Path(path).parts
    return second if first == "tools" else first


def tests_to_run(trial: Trial) -> list[str]:
    """Return the files of tests that run the place of a fault, those of its package first."""
    own, name = f"tests/{package_of(trial.fault.path)}/", Path(trial.fault.path).stem

    def order(file: str) -> tuple[bool, bool, str]:
        return not file.startswith(own), name not in file, file

    return sorted(trial.reached or (), key=order)


class Copy:
    """A copy of the checkout, with an environment whose `shoal` it is, that runs tests."""

    def __init__(self, folder: Path, tests: Path, *, workers: int, limit: float) -> None:
        self.folder, self._limit = folder, limit
        self.broken: set[str] = set()
        """Tests that fail without a fault, or only sometimes."""
        listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in names.split("\0"):
            if name and (ROOT / name).is_file() and not name.startswith("tests/"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        shutil.copytree(tests, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "Makefile"):  # have the markers of these tests
            shutil.copy2(tests.parent / name, folder)
        self._site = _link_environment(folder)
        made = re.search(r"^test:.*?-m '([^']+)'", (folder / "Makefile").read_text(), re.M | re.S)
        self._pytest = [str(folder / ".venv/bin/python"), "-m", "pytest", "-m", made[1] if made else ""]
        self._workers = [f"--numprocesses={workers}", "--dist=loadfile", "--no-loadscope-reorder"]

    def record_tests(self, trials: Sequence[Trial]) -> None:
        """Run all tests once without a fault, and give each trial those that run its place."""
        current, reached = self.folder / "current.txt", self.folder / "reached.txt"
        recorder = RECORDER.format(current=str(current), reached=str(reached))
        (self._site / "fault_recorder.py").write_text(recorder)
        current.write_text("")
        reached.write_text("")
        places: dict[str, dict[str, Fault]] = {}
        for number, trial in enumerate(trials):
            mark = f"__import__('fault_recorder').record({number})"
            places.setdefault(trial.fault.path, {})[mark] = trial.fault
        marked = ""
        with ExitStack() as stack:
            for path, marks in places.items():
                text = mark_places((self.folder / path).read_text(), marks)
                stack.enter_context(self.changed(path, text))
                marked += text
            out = self._execute([*self._pytest, "-n", "0", "-p", "fault_recorder"])[1]
        files = sorted((self.folder / "tests").rglob("test_*.py"))
        everything = [str(file.relative_to(self.folder)) for file in files]
        failed = {*re.findall(r"^(?:FAILED|ERROR) ([^: ]+)", out, re.MULTILINE)}
        lines = {tuple(line.split(" ")) for line in reached.read_text().splitlines()}
        for number, trial in enumerate(trials):
            tests = {test for place, test in lines if place == str(number)}
            known = f"record({number})" in marked and "" not in tests
            trial.reached = sorted(tests | failed) if known else everything

    @contextmanager
    def changed(self, path: str, text: str) -> Iterator[None]:
        """Replace a file."""
        file = self.folder / path
        sound = file.read_text()
        try:
            _replace_text(file, text)
            yield
        finally:
            _replace_text(file, sound)

    def run(self, targets: Sequence[str]) -> tuple[str, str]:
        """Run tests up to the first failure: `passed`, `caught` or `time`, and the failing test."""
        skipped = [f"--deselect={test}" for test in sorted(self.broken)]
        command = [*self._pytest, *self._workers, "-x", *skipped, *targets]
        code, out = self._execute(command, self._limit)
        if code is None:
            return "time", ""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out, re.MULTILINE)
        passed = code in {PASSED, NO_TESTS} or (code == UNUSABLE and not failed)
        return ("passed", "") if passed else ("caught", failed[1] if failed else f"exit code {code}")

    def _execute(self, command: Sequence[str], limit: float | None = None) -> tuple[int | None, str]:
        out = self.folder / "output.txt"
        with out.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=os.environ | {MARK: str(self.folder)},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self.end_processes()
                process.wait()
        return code, out.read_text(errors="replace")

    def end_processes(self) -> None:
        """Kill what this copy has started, wherever it is in the tree of processes."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder):
                    process.kill()


def _link_environment(folder: Path) -> Path:
    """Make an environment with the packages of this one; return the folder of its packages."""
    here, own = Path(sys.prefix), folder / ".venv"
    site = Path(sysconfig.get_path("purelib")).relative_to(here)
    for part in (site, Path("bin")):
        (own / part).mkdir(parents=True)
        for entry in (here / part).iterdir():
            (own / part / entry.name).symlink_to(entry)
    for editable in (own / site).glob("*shoal*.pth"):
        editable.unlink()
    (own / site / "shoal.pth").write_text(str(folder / "src"))
    shutil.copy2(here / "pyvenv.cfg", own)
    return own / site


def _replace_text(path: Path, text: str) -> None:
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)  # may have the same second and size


def run_trial(copy: Copy, trial: Trial) -> None:
    """Run the tests of a place. A failure counts if it repeats, and does not without the fault."""
    fault, begun = trial.fault, time.monotonic()
    planted = plant_fault((copy.folder / fault.path).read_text(), fault)
    files = tests_to_run(trial)
    trial.outcome = "absent" if planted is None else "missed"
    while planted is not None and files:
        with copy.changed(fault.path, planted):
            outcome, test = copy.run(files)
            if outcome == "passed":
                break
            targets = [test] if "::" in test else files
            again = copy.run(targets)[0] if "::" in test else outcome
        if again != "passed" and copy.run(targets)[0] == "passed":
            trial.outcome, trial.test = outcome, test
            break
        if "::" not in test or test in copy.broken:
            break  # they end or hang like this without the fault too
        copy.broken.add(test)
    trial.seconds = time.monotonic() - begun


def run_trials(trials: Sequence[Trial], arguments: argparse.Namespace) -> Iterator[Trial]:
    """Run the open trials; yield each when it ends."""
    waiting = [trial for trial in trials if trial.outcome == "open"]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
        place, tests = Path(folder).resolve() / "0", arguments.tests.resolve()
        copy = Copy(place, tests, workers=arguments.workers, limit=arguments.limit)
        stack.callback(copy.end_processes)
        unknown = [trial for trial in waiting if trial.reached is None]
        if unknown:
            copy.record_tests(unknown)
        for trial in waiting:
            run_trial(copy, trial)
            yield trial


def read_trials(path: Path) -> list[Trial]:
    """Return the trials of a file that this script wrote."""
    rows = json.loads(path.read_text())
    return [Trial(**row | {"fault": Fault(**row["fault"])}) for row in rows]


def write_trials(path: Path, trials: Sequence[Trial]) -> None:
    """Replace a file by these trials."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps([asdict(trial) for trial in trials], indent=1))
    new.replace(path)


def summarize_trials(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield a table of the packages, and the faults that are not caught."""
    rows = {package_of(trial.fault.path): [0, 0] for trial in trials}
    for trial in trials:
        for row in (rows[package_of(trial.fault.path)], rows.setdefault("all", [0, 0])):
            row[0] += trial.caught
            row[1] += trial.outcome != "absent"
    yield from (f"{name:12} {caught:3} of {planted:3}" for name, (caught, planted) in rows.items())
    for trial in trials:
        if not trial.caught:
            yield f"{trial.outcome}: {trial.fault}\n    {trial.fault.text}"


def compare_trials(old: Sequence[Trial], new: Sequence[Trial]) -> Iterator[str]:
    """Yield how many of the same faults two suites catch, and the faults that one misses."""
    before = {replace(trial.fault, line=0): trial for trial in old}
    pairs = [(before[key], trial) for trial in new if (key := replace(trial.fault, line=0)) in before]
    pairs = [pair for pair in pairs if not {"open", "absent"} & {trial.outcome for trial in pair}]
    caught = [sum(pair[side].caught for pair in pairs) for side in (0, 1)]
    yield f"caught of {len(pairs)} faults: {caught[0]} before, {caught[1]} now"
    for first, second in pairs:
        if first.caught != second.caught:
            change = "caught" if second.caught else "missed"
            yield f"newly {change}: {second.fault}, {first.test or second.test}"


def _parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=60, help="how many, evenly over the packages")
    parser.add_argument("--seed", type=int, default=7, help="of the choice of faults")
    parser.add_argument("--packages", nargs="+", help="of src/shoal; default: all")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="those of another checkout")
    parser.add_argument("--json", type=Path, help="write the trials to this file")
    parser.add_argument("--resume", type=Path, help="continue the trials of this file")
    parser.add_argument("--faults-from", type=Path, help="plant the faults of this file")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="run nothing")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--limit", type=float, default=900, help="seconds of the tests of one fault")
    parser.add_argument("-n", dest="workers", type=int, default=3, help="files of tests at a time")
    return parser.parse_args()


def main() -> None:
    """Do what the command line asks for."""
    arguments = _parsed_arguments()
    if arguments.compare:
        print(*compare_trials(*map(read_trials, arguments.compare)), sep="\n")
        return
    if arguments.resume or arguments.faults_from:
        trials = read_trials(arguments.resume or arguments.faults_from)
        trials = trials if arguments.resume else [Trial(fault=trial.fault) for trial in trials]
    else:
        source = ROOT / "src" / "shoal"
        texts: dict[str, dict[str, str]] = {}
        for path in sorted(source.glob("*/**/*.py")):
            name = str(path.relative_to(ROOT))
            if package_of(name) in (arguments.packages or [package_of(name)]):
                texts.setdefault(package_of(name), {})[name] = path.read_text()
        trials = [Trial(fault=f) for f in choose_faults(texts, arguments.faults, arguments.seed)]
    kept = arguments.json or arguments.resume
    for trial in () if arguments.list else run_trials(trials, arguments):
        print(f"{trial.outcome}, {trial.seconds:.0f} s: {trial.fault} {trial.test}", flush=True)
        if kept:
            write_trials(kept, trials)
    print(*summarize_trials(trials), sep="\n")


if __name__ == "__main__":
    main()

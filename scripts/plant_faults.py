"""Plant small faults in the source at random, one at a time, and count those that the tests catch.

`make faults`, or `plant_faults.py --json FILE`; `--resume FILE` continues. Each fault is planted in a
copy of the checkout. The tests of its package run first, then others whose imports reach the package,
up to the first failure. The copy may take its tests from another checkout (`--tests`), and
its faults from an earlier run (`--faults-from`); `--compare OLD NEW` compares two such runs.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import cache_from_source
from pathlib import Path

import psutil
from small_faults import Fault, choose_faults, plant_fault

ROOT = Path(__file__).resolve().parents[1]
MARK = "PLANTED_FAULT"
"""The environment variable that marks all processes of a copy, also those that a test leaves behind."""
PASSED, UNUSABLE, NO_TESTS = 0, 4, 5  # exit codes of pytest that say nothing about the fault


@dataclass(kw_only=True)
class Trial:
    """A fault, and how far the tests have come with it."""

    fault: Fault
    outcome: str = "open"
    """`caught`, `time` (also caught: the tests hang), `missed`, `absent` from the source, or `open`."""
    test: str = ""
    seconds: float = 0.0
    passed: list[str] = field(default_factory=list)
    """The groups of tests that do not notice the fault."""

    @property
    def caught(self) -> bool:
        """Whether the tests notice the fault."""
        return self.outcome in {"caught", "time"}


def noticing_tests(checkout: Path, path: str) -> dict[str, list[str]]:
    """Return the files of tests that can notice a change of a module, in groups to run in turn.

    The tests of its package come first, then others that name the module, then each folder's files
    whose imports reach the package. Words decide, because many tests are scripts in strings.
    """
    tests, source = checkout / "tests", checkout / "src" / "shoal"
    imports = _imports_of_packages(source)
    stub = (source / "__init__.pyi").read_text()
    homes = {name: home for home, name in re.findall(r"^from shoal\.(\w+).* as (\w+)$", stub, re.M)}
    helpers = {file.stem: file.read_text() for file in (tests / "helpers").rglob("[!_]*.py")}
    uses = {name: _named_helpers(text) & {*helpers} for name, text in helpers.items()}
    package, module = Path(path).parts[2], path[4:-3].removesuffix("/__init__").replace("/", ".")
    ranked = []
    for file in tests.rglob("test_*.py"):
        folder, text = file.relative_to(tests).parts[0], file.read_text()
        scripts = [
            other.read_text() for other in file.parent.rglob("*.py") if other.stem[:5] != "test_"
        ]
        used = _closure(uses, _named_helpers("".join([text, *scripts])) & {*helpers})
        named = _named_packages("".join([text, *scripts, *map(helpers.__getitem__, used)]), homes)
        reached = _closure(imports, named & {*imports})
        own, names = folder == package, module in text
        if own or package in reached:
            group = package if own else f"tests that name {module}" if names else folder
            unlike = module.rpartition(".")[2] not in file.stem
            order = (not own, not names, unlike, len(reached), str(file.relative_to(checkout)))
            ranked.append((order, group))
    groups: dict[str, list[str]] = {}
    for order, group in sorted(ranked):
        groups.setdefault(group, []).append(order[-1])
    return groups


def _imports_of_packages(source: Path) -> dict[str, set[str]]:
    imported = re.compile(r"(?:from |import |[\"'])shoal\.(\w+)")
    found = {
        init.parent.name: {
            name for file in init.parent.rglob("*.py") for name in imported.findall(file.read_text())
        }
        for init in source.glob("*/__init__.py")
    }
    return {name: names & {*found} for name, names in found.items()}


def _closure(edges: Mapping[str, set[str]], names: set[str]) -> set[str]:
    reached: set[str] = set()
    while names - reached:
        reached |= names
        names = set().union(*(edges[name] for name in names))
    return reached


def _named_helpers(text: str) -> set[str]:
    lines = re.findall(r"\bhelpers[. ](?:.*import \([^)]*\)|.*)", text)
    return {*re.findall(r"\w+", " ".join(lines))}


def _named_packages(text: str, homes: Mapping[str, str]) -> set[str]:
    """The packages that a test names by an import, a public name, or the `shoal` command."""
    words = {*re.findall(r"\bshoal\.(\w+)", text)}
    for names in re.findall(r"from shoal import (\([^)]*\)|.*)", text):
        words |= {*re.findall(r"\w+", names)}
    command = {"cli"} if re.search(r"[\"']shoal[\"']|\bshoal (?!import\b)[a-z]+", text) else set()
    return words | command | {homes[word] for word in words & {*homes}}


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
        self._python = _link_environment(folder)
        made = re.search(r"^test:.*?-m '([^']+)'", (folder / "Makefile").read_text(), re.M | re.S)
        self._options = ["-m", made[1] if made else "", "-x", f"--numprocesses={workers}"]
        if workers:
            self._options += ["--dist=loadfile", "--no-loadscope-reorder"]

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
        command = [*self._options, *(f"--deselect={test}" for test in sorted(self.broken)), *targets]
        code, out = self._execute([str(self._python), "-m", "pytest", *command])
        if code is None:
            return "time", ""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out, re.MULTILINE)
        passed = code in {PASSED, NO_TESTS} or (code == UNUSABLE and not failed)
        return ("passed", "") if passed else ("caught", failed[1] if failed else f"exit code {code}")

    def _execute(self, command: Sequence[str]) -> tuple[int | None, str]:
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
                code = process.wait(self._limit)
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
    """Make an environment with the packages of this one; return its Python."""
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
    return own / "bin" / "python"


def _replace_text(path: Path, text: str) -> None:
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)  # may have the same second and size


def run_trial(copy: Copy, trial: Trial, *, own_tests_only: bool) -> Trial:
    """Run the tests that may notice a fault, from where the trial stands."""
    fault, begun = trial.fault, time.monotonic()
    planted = plant_fault((copy.folder / fault.path).read_text(), fault)
    if planted is None:
        trial.outcome = "absent"
        return trial
    package = Path(fault.path).parts[2]
    trial.outcome = "open" if own_tests_only else "missed"
    for group, files in noticing_tests(copy.folder, fault.path).items():
        if group not in trial.passed and (group == package or not own_tests_only):
            outcome, trial.test = _run_group(copy, files, fault.path, planted)
            if outcome != "passed":
                trial.outcome = outcome
                break
            trial.passed.append(group)
    trial.seconds += time.monotonic() - begun
    return trial


def _run_group(copy: Copy, files: Sequence[str], path: str, planted: str) -> tuple[str, str]:
    """Run tests with a fault. A test counts if it fails twice with the fault, and not without."""
    while True:
        with copy.changed(path, planted):
            outcome, test = copy.run(files)
            if "::" not in test or test in copy.broken:
                break
            again = copy.run([test])[0]
        if again != "passed" and copy.run([test])[0] == "passed":
            return outcome, test
        copy.broken.add(test)
    if outcome == "time" and copy.run(files)[0] == "time":
        return "passed", ""  # they take as long without the fault
    return outcome, test


def run_trials(trials: Sequence[Trial], arguments: argparse.Namespace) -> Iterator[Trial]:
    """Run the open trials, several at once with `--jobs`; yield each when it ends."""
    copies: queue.Queue[Copy] = queue.Queue()

    def run(trial: Trial) -> Trial:
        copy = copies.get()
        try:
            return run_trial(copy, trial, own_tests_only=arguments.own_tests_only)
        finally:
            copies.put(copy)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
        pool = stack.enter_context(ThreadPoolExecutor(arguments.jobs))
        for number in range(arguments.jobs):
            place, tests = Path(folder).resolve() / str(number), arguments.tests.resolve()
            copy = Copy(place, tests, workers=arguments.workers, limit=arguments.limit)
            stack.callback(copy.end_processes)  # before the pool waits for them
            copies.put(copy)
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        waiting = [pool.submit(run, trial) for trial in trials if trial.outcome == "open"]
        for done in as_completed(waiting):
            yield done.result()


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
    rows = {trial.fault.path.split("/")[2]: [0, 0] for trial in trials}
    for trial in trials:
        for row in (rows[trial.fault.path.split("/")[2]], rows.setdefault("all", [0, 0])):
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
    parser.add_argument(
        "--own-tests-only", action="store_true", help="leave the other folders for later"
    )
    parser.add_argument("--json", type=Path, help="write the trials to this file")
    parser.add_argument("--resume", type=Path, help="continue the trials of this file")
    parser.add_argument("--faults-from", type=Path, help="plant the faults of this file")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="run nothing")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--limit", type=float, default=900, help="seconds of one group of tests")
    parser.add_argument("-n", dest="workers", type=int, default=3, help="files of tests at a time")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
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
        names = arguments.packages or [path.parent.name for path in source.glob("*/__init__.py")]
        files = {name: sorted((source / name).rglob("*.py")) for name in names}
        texts = {n: {str(p.relative_to(ROOT)): p.read_text() for p in files[n]} for n in names}
        trials = [Trial(fault=f) for f in choose_faults(texts, arguments.faults, arguments.seed)]
    kept = arguments.json or arguments.resume
    for trial in () if arguments.list else run_trials(trials, arguments):
        print(f"{trial.outcome}, {trial.seconds:.0f} s: {trial.fault} {trial.test}", flush=True)
        if kept:
            write_trials(kept, trials)
    print(*summarize_trials(trials), sep="\n")


if __name__ == "__main__":
    main()

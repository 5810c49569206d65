"""The small faults that `make faults` plants, and the tests that it runs with each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import plant_faults
import pytest
import small_faults
from plant_faults import Trial
from small_faults import Fault, choose_faults, find_faults, mark_places, plant_fault


def planted(source: str) -> list[str]:
    return [plant_fault(source, fault) or "" for fault in find_faults("a.py", source)]


@pytest.mark.parametrize(
    ("source", "faulty"),
    [
        ("a < b\n", "a <= b\n"),
        ("x = (a) == (b)\n", "x = (a) != (b)\n"),
        ("x = a and b and c\n", "x = a or b and c\n"),
        ("x = é * b\n", "x = é // b\n"),
        ("x = True\n", "x = False\n"),
        ("x = 1_000\n", "x = 1001\n"),
        ("if (a\n    or b):\n    b = a\n", "if (not (a\n    or b)):\n    b = a\n"),
        ("def f():\n    g(\n        a\n    )\n", "def f():\n    pass\n"),
        ("self.a = b\n", "pass\n"),
        ("a += b\n", "pass\n"),
        ("raise E(f'{a + 1}') from e\n", "pass\n"),
        ("def f():\n    return a\n", "def f():\n    return None\n"),
    ],
)
def test_a_fault_is_planted(source: str, faulty: str) -> None:
    assert faulty in planted(source)


@pytest.mark.parametrize(
    "source",
    [
        'def f(a: Literal[1]) -> Literal[2]:\n    """Return 1 + 2."""\n',
        "if TYPE_CHECKING:\n    import a\n",
        "x = f'{a + 1}'\n",
        "x = 'a' + b\n",
        "@cache(1)\ndef f(): ...\n",
        "warnings.warn(a)\n",
        "def f():\n    return None\n",
    ],
)
def test_nothing_is_planted_where_no_test_can_notice(source: str) -> None:
    assert planted(source) == []


SOURCE = (
    "def f(a):\n    if a < 1:\n        return 2\n\n\ndef g(a):\n    if a < 1:\n        return a - 1\n"
)


def test_a_fault_is_planted_in_a_source_that_has_changed() -> None:
    fault = next(f for f in find_faults("a.py", SOURCE) if f.before == "<" and f.line == 7)
    changed = "import c\n" + SOURCE.replace("    if", "      if")
    assert plant_fault(changed, fault) == "a <= 1".join(changed.rsplit("a < 1", 1))
    assert plant_fault(SOURCE.replace("def g(a):\n    if a < 1", "def g(a):\n    if a"), fault) is None


def test_the_choice_is_even_and_the_same_each_time() -> None:
    sources = {name: {f"{name}.py": SOURCE} for name in ("data", "plan", "util")}
    chosen = choose_faults(sources, 7, 3)
    assert [fault.path for fault in chosen] == ["data.py", "plan.py", "util.py"] * 2 + ["data.py"]
    assert len(set(chosen)) == 7
    assert chosen == choose_faults(sources, 7, 3)
    assert chosen != choose_faults(sources, 7, 4)
    everything = choose_faults(sources, 1000, 3)
    assert len({fault.kind for fault in everything[::3][:4]}) == 4
    assert len(everything) == 3 * len(find_faults("a.py", SOURCE))


def test_tests_that_run_the_place_are_tried_those_of_its_package_first() -> None:
    files = ["tests/data/test_batch.py", "tests/data/test_loader.py", "tests/checkpoint/test_step.py"]
    trial = Trial(fault=find_faults("src/shoal/data/loader.py", SOURCE)[0], reached=files)
    assert plant_faults.tests_to_run(trial) == [files[1], files[0], files[2]]


class Suite(plant_faults.Copy):
    """Tests that end as given, with the fault and without; without the broken ones, they pass."""

    def __init__(self, module: Path, faulty: tuple[str, str], sound: str) -> None:
        self.folder, self.broken = module.parents[3], set()
        self._module, self._faulty, self._sound = module, faulty, sound
        module.parent.mkdir(parents=True)
        module.write_text(SOURCE)

    def run(self, targets: Sequence[str]) -> tuple[str, str]:
        if self.broken:
            return "passed", ""
        return (self._sound, "") if self._module.read_text() == SOURCE else self._faulty


@pytest.mark.parametrize(
    ("faulty", "sound", "outcome"),
    [
        (("passed", ""), "passed", "missed"),
        (("caught", "test_a.py::test"), "passed", "caught"),
        (("caught", "test_a.py::test"), "caught", "missed"),
        (("caught", "exit code -9"), "passed", "caught"),
        (("time", ""), "passed", "time"),
        (("time", ""), "time", "missed"),
    ],
)
def test_a_failure_counts_that_does_not_come_without_the_fault(
    tmp_path: Path, faulty: tuple[str, str], sound: str, outcome: str
) -> None:
    trial = Trial(fault=find_faults("src/shoal/data/a.py", SOURCE)[0], reached=["test_a.py"])
    plant_faults.run_trial(Suite(tmp_path / trial.fault.path, faulty, sound), trial)
    assert trial.outcome == outcome


def test_a_place_records_the_tests_that_run_it(tmp_path: Path) -> None:
    current, reached = tmp_path / "current.txt", tmp_path / "reached.txt"
    reached.touch()
    recorder = plant_faults.RECORDER.format(current=str(current), reached=str(reached))
    (tmp_path / "fault_recorder.py").write_text(recorder)
    faults = [fault for fault in find_faults("a.py", SOURCE) if fault.before == "a < 1"]
    marks = {f"__import__('fault_recorder').record({n})": fault for n, fault in enumerate(faults)}
    (tmp_path / "a.py").write_text(mark_places(SOURCE, marks))
    (tmp_path / "test_f.py").write_text("import a\n\n\ndef test(): assert a.f(0) == 2\n")
    (tmp_path / "test_g.py").write_text(
        "import subprocess, sys\n\n\ndef test():\n"
        "    subprocess.check_call([sys.executable, '-c', 'import a; print(a.g(2), a.g(2))'])\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "fault_recorder", "-p", "no:xdist"]
    subprocess.run(command, cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert reached.read_text() == "0 test_f.py\n1 test_g.py\n"


def test_two_suites_are_compared_by_the_faults_of_both(tmp_path: Path) -> None:
    first, second, third = find_faults("src/shoal/data/a.py", SOURCE)[:3]
    old = [Trial(fault=first, outcome="caught", test="test_a"), Trial(fault=second, outcome="missed")]
    old.append(Trial(fault=third, outcome="open"))
    moved = replace(first, line=9)
    new = [
        Trial(fault=moved, outcome="missed"),
        *(Trial(fault=f, outcome="time") for f in (second, third)),
    ]
    lines = list(plant_faults.compare_trials(old, new))
    assert lines == [
        "caught of 2 faults: 1 before, 1 now",
        f"newly missed: {moved}, test_a",
        f"newly caught: {second}, ",
    ]
    plant_faults.write_trials(tmp_path / "trials.json", old)
    assert plant_faults.read_trials(tmp_path / "trials.json") == old
    assert list(plant_faults.summarize_trials(new))[:2] == [
        "data           2 of   3",
        "all            2 of   3",
    ]


def test_each_chosen_fault_compiles(repository: Path) -> None:
    folder = repository / "src/shoal/util"
    sources = {"util": {path.name: path.read_text() for path in folder.glob("*.py")}}
    chosen: list[Fault] = small_faults.choose_faults(sources, 50, 1)
    for fault in chosen:
        source = sources["util"][fault.path]
        assert (plant_fault(source, fault) or source) != source

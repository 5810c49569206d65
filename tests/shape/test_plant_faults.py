"""The small faults that `make faults` plants, and the tests that it runs with each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import plant_faults
import pytest
import small_faults
from plant_faults import Trial
from small_faults import Fault, choose_faults, find_faults, plant_fault


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


def test_tests_that_reach_a_package_run_after_its_own(tmp_path: Path) -> None:
    for path, text in {
        "src/shoal/__init__.pyi": "from shoal.data.loader import Loader as Loader\n",
        "src/shoal/data/__init__.py": "",
        "src/shoal/training/__init__.py": "from shoal.data.batch import Batch\n",
        "src/shoal/cli/__init__.py": "def run():\n    from shoal.training import step\n",
        "tests/data/test_batch.py": "",
        "tests/data/test_loader.py": "",
        "tests/training/test_step.py": "import shoal.training.step\n",
        "tests/docs/test_links.py": "no = 'import'",
        "tests/util/test_public.py": "from shoal import (\n    Loader,\n)\n",
        "tests/util/test_by_helper.py": "from helpers.ranks import run\n",
        "tests/report/test_named.py": "import shoal.data.loader\n",
        "tests/helpers/ranks.py": "command = [python, '-m', 'shoal']\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert plant_faults.noticing_tests(tmp_path, "src/shoal/data/loader.py") == {
        "data": ["tests/data/test_loader.py", "tests/data/test_batch.py"],
        "tests that name shoal.data.loader": ["tests/report/test_named.py"],
        "util": ["tests/util/test_public.py", "tests/util/test_by_helper.py"],
        "training": ["tests/training/test_step.py"],
    }
    only = plant_faults.noticing_tests(tmp_path, "src/shoal/cli/main.py")
    assert only == {"util": ["tests/util/test_by_helper.py"]}


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

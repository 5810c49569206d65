"""The pictures of the README and of a pipeline are those that their scripts draw."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.processes

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

STEPS = 26
Curves: TypeAlias = dict[str, list[Any]]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    return load(repository / "benchmarks/same_loss.py")


def test_the_committed_picture_of_a_pipeline_is_that_of_its_script(
    repository: Path, tmp_path: Path
) -> None:
    pipeline = load(repository / "benchmarks/pipeline_picture.py")
    pipeline.draw(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == pipeline.PICTURE.read_bytes()


@pytest.fixture(scope="module")
def found(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    curves: Curves = script.measure(STEPS, tmp_path_factory.mktemp("runs"))
    return curves


@pytest.mark.long
def test_every_curve_is_of_all_steps_on_the_processes_it_names(found: Curves) -> None:
    assert [[point.step for point in curve] for curve in found.values()] == [[*range(1, STEPS + 1)]] * 4
    processes = {name: [point.processes for point in curve] for name, curve in found.items()}
    assert processes == {
        "1 process": [1] * STEPS,
        "2 processes": [2] * STEPS,
        "4 processes": [4] * STEPS,
        "killed on 4, resumed on 3": [4] * 12 + [3] * (STEPS - 12),
    }


@pytest.mark.long
def test_the_curves_are_one_and_learn(script: ModuleType, found: Curves) -> None:
    one, *others = found.values()
    assert one[-1].loss < 0.6 * one[0].loss
    for curve in others:
        assert max(script.distances(curve, one)) < 1e-14


def test_distances_are_those_of_the_same_step(script: ModuleType) -> None:
    one = [script.Point(1, 2.0, 1), script.Point(2, 1.0, 1)]
    other = [script.Point(1, 2.5, 4), script.Point(2, 0.75, 4)]
    assert script.distances(other, one) == [0.5, 0.25]
    assert script.resized(other) is None
    assert script.resized([*other, script.Point(3, 0.5, 3)]) == 2


@pytest.mark.long
def test_the_picture_is_the_same_again(script: ModuleType, found: Curves, tmp_path: Path) -> None:
    for name in ("one.svg", "other.svg"):
        script.draw(found, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_bytes()
    assert drawn == (tmp_path / "other.svg").read_bytes()
    text = "".join(ElementTree.fromstring(drawn).itertext())
    assert [name for name in found if name not in text] == []


def test_the_committed_picture_is_small_and_has_no_background(repository: Path) -> None:
    path = repository / "docs/pictures/same_loss.svg"
    assert path.stat().st_size < 60_000
    backgrounds = [part for part in ElementTree.parse(path).iter() if part.get("id") == "patch_1"]
    [shape] = [part for part in backgrounds[0].iter() if part.get("style")]
    assert "fill: none" in (shape.get("style") or "")

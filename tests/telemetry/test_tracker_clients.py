"""MLflow, Comet and Trackio by their own clients, offline: one curve over two attempts."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import shoal
from helpers.checkpoint_files import small_run

pytestmark = [pytest.mark.processes, pytest.mark.peers]

Points = list[tuple[int, float]]


def attempt(world: shoal.World, directory: Path, stop: int, tracker: object) -> None:
    """Train up to step `stop`, with saves after steps 4 and 8."""
    with small_run(world, directory, trackers=(tracker,)) as run:
        run.restore()
        for batch in run.loader.epochs(9):
            run.steps["step"](batch)
            world.log({"half": run.step / 2})
            world.log({"double": run.step * 2})
            run.tick(every=4)
            if run.step == stop:
                break


def mlflow_points(directory: Path, name: str) -> Points:
    import mlflow

    known = json.loads((directory / "mlflow.json").read_text())["id"]
    found = mlflow.MlflowClient().get_metric_history(known, name)
    return sorted((metric.step, metric.value) for metric in found)


def comet_points(directory: Path, name: str) -> Points:
    known = json.loads((directory / "comet.json").read_text())["id"]
    archives = sorted((directory / "comet").glob("*.zip"))
    assert all(path.name.startswith(known) for path in archives)
    points = []
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            lines = map(json.loads, archive.read("messages.json").splitlines())
            metrics = [line["payload"]["metric"] for line in lines if line["type"] == "metric_msg"]
        points += [(m["step"], m["metricValue"]) for m in metrics if m["metricName"] == name]
    return sorted(points)


def trackio_points(directory: Path, name: str) -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    known = json.loads((directory / "trackio.json").read_text())["id"]
    logs = SQLiteStorage.get_logs("tests", known)
    return sorted((line["step"], line[name]) for line in logs if name in line)


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)


CLIENTS: dict[str, tuple[object, Callable[[Path, str], Points]]] = {
    "mlflow": (shoal.MLflow(experiment="tests", name="a"), mlflow_points),
    "comet": (shoal.Comet(project="tests", offline=True), comet_points),
    "trackio": (shoal.Trackio(project="tests"), trackio_points),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_resumed_run_continues_one_curve(world: shoal.World, tmp_path: Path, client: str) -> None:
    """The first attempt logs two steps beyond its checkpoint; the second repeats them."""
    tracker, points = CLIENTS[client]
    directory = tmp_path / "run"
    attempt(world, directory, 6, tracker)
    attempt(world, directory, 9, tracker)
    for name, factor in (("half", 0.5), ("double", 2.0)):
        assert points(directory, name) == [(step, step * factor) for step in range(1, 10)]


def test_mlflow_names_the_checkpoint_and_the_machine(world: shoal.World, tmp_path: Path) -> None:
    import mlflow

    directory = tmp_path / "run"
    attempt(world, directory, 6, CLIENTS["mlflow"][0])
    run = mlflow.get_run(json.loads((directory / "mlflow.json").read_text())["id"])
    assert run.data.tags["shoal.run_directory"] == str(directory)
    assert run.data.tags["shoal.checkpoint"] == str(directory / "checkpoints/step-4")
    assert run.info.status == "FINISHED"


def test_a_run_that_mlflow_does_not_start_is_an_error(world: shoal.World, tmp_path: Path) -> None:
    import mlflow

    directory = tmp_path / "run"
    mlflow.set_experiment("tests")
    with mlflow.start_run(), pytest.raises(shoal.LaunchError, match="already active"):
        attempt(world, directory, 2, CLIENTS["mlflow"][0])
    attempt(world, directory, 2, CLIENTS["mlflow"][0])
    (tmp_path / "mlflow.db").unlink()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/other.db")
    try:
        with pytest.raises(shoal.LaunchError, match=r"mlflow\.json"):
            attempt(world, directory, 9, CLIENTS["mlflow"][0])
    finally:
        mlflow.set_tracking_uri(None)

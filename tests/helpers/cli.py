"""The `shoal` command in this process, in a directory with a script and a made-up Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from helpers.fake_slurm import COMMANDS, Fakes
from shoal.cli.main import app
from shoal.util.errors import LaunchError, ShoalError


def shoal(*arguments: str) -> Result:
    """Run the command with these arguments."""
    return CliRunner().invoke(app, arguments)


def refused(*arguments: str) -> LaunchError:
    """Return the LaunchError that the command raises with these arguments."""
    done = shoal(*arguments)
    assert isinstance(done.exception, LaunchError), (done.output, done.exception)
    return done.exception


def plan_error(*arguments: str) -> ShoalError:
    """Return the error, of any kind, that the command raises with these arguments."""
    done = shoal(*arguments)
    assert isinstance(done.exception, ShoalError), (done.output, done.exception)
    return done.exception


def fake_slurm(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    submitted: str,
    script: str = "print('trained')\n",
    sites: Mapping[str, str] | None = None,
    commands: Sequence[str] = COMMANDS,
) -> Fakes:
    """Enter a directory with `script` as train.py, whose Slurm answers `submitted` to each sbatch.

    The user has files of `sites`. Other `commands` are those of another scheduler.
    """
    fakes = Fakes(folder / "fakes", commands)
    for name, value in fakes.variables().items():
        monkeypatch.setenv(name, value)
    for kind in ("config", "state"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(folder / kind))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(folder))
    monkeypatch.setenv("COLUMNS", "300")
    for name, text in (sites or {}).items():
        path = folder / f"config/shoal/sites/{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "work").mkdir()
    (folder / "work/train.py").write_text(script)
    monkeypatch.chdir(folder / "work")
    fakes.set(commands[0], out=submitted)
    return fakes

"""Follow docs/getting-started/installation.md where a torch is installed: it stays unchanged.

The torch is a stand-in: metadata, and a module that can't be imported. Everything is fetched once, from
the index that pip is configured with; the installations themselves ask no index.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import shoal

pytestmark = [pytest.mark.processes, pytest.mark.system, pytest.mark.timeout(600)]

OLD, OWN, NEWEST = "2.10.7", "2.12.7", "2.99.0"


def stand_in(version: str, folder: Path) -> Path:
    """A wheel of torch: nothing but metadata and a module that says who imported it."""
    info = f"torch-{version}.dist-info"
    files = {
        "torch/__init__.py": "raise ImportError('torch was imported')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    path = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def run(command: list[str] | str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def checkout(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation reads of the project."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(repository / name, folder)
    shutil.copytree(repository / "src", folder / "src")
    return folder


@pytest.fixture(scope="module")
def wheels(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-ins, and all that Shoal needs to be built and to run."""
    folder = tmp_path_factory.mktemp("wheels")
    stand_in(OWN, folder)
    (folder / "torch.txt").write_text(f"torch=={OWN}\n")
    given = ["--find-links", str(folder), "-c", str(folder / "torch.txt"), "-d", str(folder)]
    done = run([sys.executable, "-m", "pip", "download", *given, ".", "hatchling"], checkout)
    assert done.returncode == 0, done.stderr
    for version in (OLD, NEWEST):
        stand_in(version, folder)
    return folder


class Environment:
    """An environment of its own whose pip asks no index, with a stand-in for torch."""

    def __init__(self, folder: Path, wheels: Path, torch: str) -> None:
        self.folder = folder
        self._variables = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_CONFIG_FILE": os.devnull,
        }
        run([sys.executable, "-m", "venv", str(folder)], wheels).check_returncode()
        self.shell(f"pip install torch=={torch}", folder).check_returncode()

    def shell(self, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return run(line, folder, **self._variables)

    def torch(self) -> dict[str, str]:
        """The hash of every file of torch and of its metadata, RECORD among them."""
        [site] = self.folder.glob("lib/python*/site-packages")
        return {
            str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in site.glob("torch*/*")
            if path.is_file()
        }

    def versions(self) -> dict[str, str]:
        lines = self.shell("pip list --format=freeze", self.folder).stdout.splitlines()
        return dict(line.split("==") for line in lines)


def blocks(repository: Path, heading: str) -> list[str]:
    """The blocks of shell of the page below a heading."""
    page = (repository / "docs/getting-started/installation.md").read_text()
    (part,) = re.findall(rf"^#+ {heading}.*?\n(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE)
    found: list[str] = re.findall(r"^```\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture
def commands(repository: Path) -> list[str]:
    """The commands that install: plain, then with torch held."""
    return [*blocks(repository, "Installation$"), *blocks(repository, "Keep the PyTorch")]


def test_the_page_names_all_dependencies(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    text = (repository / "docs/getting-started/installation.md").read_text()
    download, _, by_name = blocks(repository, "Offline install")
    named = re.findall(r"'(.*?)'", download)
    assert sorted([*named, *re.findall(r"`(torch>=[\d.]+)`", text)]) == sorted(project["dependencies"])
    assert by_name.split()[-len(named) :] == [re.split("[>=]", each)[0] for each in named]
    extras = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    shown = {name for row in extras for name in re.findall(r"`(\w+)`", row)}
    assert shown == project["optional-dependencies"].keys() - {"dev", "docs"}


@pytest.mark.long
@pytest.mark.parametrize("torch", [OWN, "2.11.0a0"], ids=["accepted", "pre-release"])
def test_an_installation_offline_keeps_the_torch_of_the_centre(
    torch: str, repository: Path, checkout: Path, wheels: Path, tmp_path: Path
) -> None:
    download, install, without = blocks(repository, "Offline install")
    outside = Environment(tmp_path / "outside", wheels, OWN)
    outside.shell(download, checkout).check_returncode()
    shutil.move(checkout / "wheels", tmp_path / "wheels")
    with zipfile.ZipFile(stand_in(torch, tmp_path)) as module:
        module.extractall(tmp_path / "module")  # PYTHONPATH shows it, as modules of centres do

    def shell(line: str) -> subprocess.CompletedProcess[str]:
        return run(line, tmp_path, PYTHONPATH=str(tmp_path / "module"), PIP_CONFIG_FILE=os.devnull)

    accepted = torch == OWN
    assert (shell(install).returncode == 0) is accepted
    if not accepted:
        shell(f". shoal-env/bin/activate\n{without}").check_returncode()
    said = shell(". shoal-env/bin/activate; pip list --format=freeze; shoal --version")
    assert f"torch=={torch}\n" in said.stdout
    assert f"shoal {shoal.__version__}\n" in said.stdout, said.stderr
    assert list(tmp_path.glob("shoal-env/lib/*/site-packages/shoal"))
    assert not list(tmp_path.glob("shoal-env/lib/*/site-packages/torch"))


@pytest.mark.long
@pytest.mark.parametrize("way", [0, 1], ids=["plain", "torch held"])
def test_a_torch_that_is_new_enough_is_left_alone(
    way: int, commands: list[str], checkout: Path, wheels: Path, tmp_path: Path
) -> None:
    """Although a newer one is to be had."""
    environment = Environment(tmp_path / "venv", wheels, OWN)
    before = environment.torch()
    assert f"torch-{OWN}.dist-info/RECORD" in before
    done = environment.shell(commands[way], checkout)
    assert done.returncode == 0, done.stderr
    assert environment.torch() == before
    assert environment.versions()["torch"] == OWN
    assert environment.shell("pip check", tmp_path).returncode == 0
    said = environment.shell("shoal --version", tmp_path)
    assert (said.stdout, said.stderr) == (f"shoal {shoal.__version__}\n", "")
    assert environment.shell("shoal run --help", tmp_path).returncode == 0
    assert environment.shell("python -c 'import shoal'", tmp_path).returncode == 0
    # The stand-in would have told of an import.
    assert (
        "torch was imported"
        in environment.shell("python -c 'import shoal; shoal.Step'", tmp_path).stderr
    )


@pytest.mark.long
def test_a_torch_that_is_too_old_is_replaced_unless_held(
    commands: list[str], checkout: Path, wheels: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "venv", wheels, OLD)
    before, versions = environment.torch(), environment.versions()
    plain, held = commands
    refused = environment.shell(held, checkout)
    assert refused.returncode != 0
    assert "depends on torch>=2.11" in refused.stderr + refused.stdout
    assert f"torch=={OLD}" in refused.stderr + refused.stdout
    assert (environment.torch(), environment.versions()) == (before, versions)

    assert environment.shell("pip install --no-deps .", checkout).returncode == 0
    assert environment.torch() == before
    assert environment.shell(plain, checkout).returncode == 0
    assert environment.versions()["torch"] == NEWEST

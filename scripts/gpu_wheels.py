"""Install what Shoal's GPU suite needs on a machine without a network, from a directory of wheels.

python scripts/gpu_wheels.py download DIR --python 3.12     # where there is a network
python scripts/gpu_wheels.py install DIR                    # on the machine, into build/venv

torch and numpy are those of the machine: they are neither downloaded nor replaced. The environment sees
all packages of the interpreter that makes it, and gets those that are missing. It needs no root.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "build" / "venv"
OF_THE_MACHINE = ("torch", "numpy")
TESTS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
BUILD = ("hatchling", "editables")
"""Needed by pip for the installation of a checkout."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")


def requirements() -> list[str]:
    """Return what is downloaded."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [each for each in project["dependencies"] if not each.startswith(OF_THE_MACHINE)]
    return [*needed, *TESTS, *BUILD]


def download(directory: Path, python: str, machine: str) -> None:
    """Fill a directory with wheels for this version of Python and this processor."""
    platforms = [f"--platform={each}_{machine}" for each in PLATFORMS]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--only-binary=:all:"),
            *(f"--python-version={python}", *platforms),
            *("--dest", str(directory), "--constraint", str(ROOT / "constraints.txt")),
            *requirements(),
        ],
        check=True,
    )


def install(directory: Path, environment: Path) -> None:
    """Make an environment on top of this interpreter's packages, without a network."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        sys.exit(
            f"given: {sys.executable}\nfound: it has no torch, which is not installed from wheels\n"
            "fix:   make test-gpu PYTHON=/path/to/a/python/with/torch"
        )
    if environment.exists() and not (environment / "pyvenv.cfg").exists():
        sys.exit(
            f"given: --environment {environment}\nfound: a directory that is not an environment\n"
            "fix:   name a directory that does not exist"
        )
    # pip is the machine's too: Debian's Python may come without the one for environments.
    pip = metadata.packages_distributions().get("pip")
    venv.create(environment, system_site_packages=True, with_pip=not pip, clear=True)
    version = "python{}.{}".format(*sys.version_info)
    if sys.prefix != sys.base_prefix:  # an environment: the new one would see only what it is based on
        packages = environment / "lib" / version / "site-packages" / "of_the_machine.pth"
        packages.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(f"torch=={torch}\n")
        constraints.flush()
        done = subprocess.run(
            [
                *(str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-index"),
                *("--find-links", str(directory.absolute()), "--constraint", constraints.name),
                *("--disable-pip-version-check", "--editable", str(ROOT), *TESTS),
            ],
            check=False,
        )
    if done.returncode:
        sys.exit(
            f"given: wheels in {directory}\n"
            "found: pip cannot install Shoal from them; its message is above\n"
            f"fix:   gpu_wheels.py download {directory} --python {version.removeprefix('python')}"
        )


def main() -> None:
    """Download or install."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("download", "install"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--python", default="3.12", help="version to download for; default: 3.12")
    parser.add_argument("--machine", default="x86_64", help="processor to download for")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help="default: build/venv")
    given = parser.parse_args()
    if given.what == "download":
        download(given.directory, given.python, given.machine)
    else:
        install(given.directory, given.environment)


if __name__ == "__main__":
    main()

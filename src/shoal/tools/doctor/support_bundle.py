"""An archive to attach to a support request: the doctor's findings and their context."""

from __future__ import annotations

import getpass
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import psutil

from shoal.distributed import env_vars
from shoal.telemetry.events import parse_event, paths_in
from shoal.tools.doctor.findings import Examination, examination_document
from shoal.tools.doctor.redaction import Redactor, stand_ins
from shoal.util.document import to_json
from shoal.util.errors import LaunchError
from shoal.util.packages import packages
from shoal.util.safe_text import MASK
from shoal.util.tables import rendered
from shoal.util.units import size

PREFIXES = (
    "SLURM_", "PBS_", "PALS_", "LSB_", "FLUX_", "PMI_", "PMIX_", "OMPI_", "I_MPI_", "MPICH_", "HYDRA_",
    "UCX_", "FI_", "GLOO_", "NCCL_", "RCCL_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_",
    "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "GOMP_", "PYTHON", "SHOAL_",
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_",
)  # fmt: skip
"""Prefixes of the environment variables that are included; all others are private."""

LINES, TAIL = 200, 1 << 16
UNWRAPPED = 1000
"""The width of text in an archive that is redacted after it was laid out."""
_COLUMNS = 100
_MOST_LOGS, _MOST_STARTS = 20, 64
_LOGS = ("*.log", "*.out", "*.err", "log*.txt", "hang-*.txt")
_HOSTS = ("NODELIST", "HOST", "NODENAME")
"""A variable with this in its name has names of hosts as its value."""
_FOLDERS = (".", "logs", "jobs/*", "jobs/*/logs")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The contents of an archive: redacted texts, keyed by their file names in it."""

    texts: Mapping[str, str]

    def write(self, path: Path) -> list[str]:
        """Write it to a new file that only its owner can read; return a line for each text in it.

        Raises LaunchError if that file exists or can't be written.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    self._fill(file)
            except OSError:
                path.unlink(
                    missing_ok=True
                )  # an incomplete file is useless, and would block the next try
                raise
        except OSError as error:
            raise LaunchError(
                given=f"--bundle {path}",
                found=error.strerror or str(error),
                fix="use a file that does not exist yet, in a directory that can be written",
            ) from None
        return [f"{name} ({size(len(text.encode()))})" for name, text in self.texts.items()]

    def _fill(self, file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in self.texts.items():
                archive.writestr(name, text)


def collect_bundle(found: Examination, *, described: str, run: Path | None, anonymous: bool) -> Bundle:
    """Return the contents for a support request.

    `described` is the output of `shoal info`. Of a run directory it includes the start of each attempt
    and the ends of log files; no data, no checkpoint, and only environment variables with PREFIXES.
    Secrets are masked. With `anonymous`, names of hosts, their addresses, the user and the home
    directory are replaced.
    """
    names: dict[str, str] = {}
    if anonymous:
        names = stand_ins(
            hosts=[*found.hosts, os.uname().nodename],
            addresses=_addresses(),
            user=_user(),
            home=str(Path.home()),
        )
    redactor = Redactor(env_vars.secrets(), names)
    variables: dict[str, str] = redactor.tree(env_vars.beginning_with(PREFIXES))
    if anonymous:
        # Compact lists of hosts (node[01-99]) contain names that are not known here.
        variables |= {name: MASK for name in variables if any(word in name for word in _HOSTS)}
    # Text is redacted before it is wrapped into columns, since a line break could hide a secret.
    lines = [
        replace(one, found=redactor.text(one.found), fix=redactor.text(one.fix))
        for one in found.findings
    ]
    told = replace(found, findings=tuple(lines), hosts=tuple(map(redactor.text, found.hosts)))
    report = examination_document(told)
    texts = {
        "report.txt": rendered(report, _COLUMNS),
        "report.json": to_json(report),
        "info.txt": redactor.text(described),
        "packages.txt": "".join(f"{name}=={version}\n" for name, version in sorted(packages().items())),
        "environment.txt": "".join(f"{name}={value}\n" for name, value in sorted(variables.items())),
    }
    if run is not None:
        starts = [redactor.tree(one) for one in _starts(run)]
        texts["run/starts.jsonl"] = "".join(f"{json.dumps(one)}\n" for one in starts)
        for name, text in _logs(run):
            texts[redactor.text(f"run/{name}")] = redactor.text(text)
    return Bundle(texts=texts)


def _addresses() -> list[str]:
    return [
        one.address
        for known in psutil.net_if_addrs().values()
        for one in known
        if one.address not in ("127.0.0.1", "::1") and not one.address.startswith("00:00:00:00")
    ]


def _user() -> str:
    with suppress(KeyError, OSError):  # a user ID without a name, as in containers
        return getpass.getuser()
    return ""


def _starts(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the start of each attempt on each rank, with its configuration."""
    for path in list(paths_in(run).values())[:_MOST_STARTS]:
        with suppress(OSError), path.open("rb") as lines:
            for line in lines:
                if b'"start"' not in line:  # there may be a million other lines
                    continue
                event = parse_event(line)
                if event is not None and event["event"] == "start":
                    yield event


def _logs(run: Path) -> Iterator[tuple[str, str]]:
    """Yield the last lines of the newest log files."""
    logs = {
        path
        for folder in _FOLDERS
        for pattern in _LOGS
        for path in run.glob(f"{folder}/{pattern}")
        if path.is_file() and not path.is_symlink()
    }
    for path in sorted(logs, key=lambda one: one.stat().st_mtime, reverse=True)[:_MOST_LOGS]:
        with suppress(OSError):
            yield str(path.relative_to(run)), _tail(path)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - TAIL)
        file.seek(start)
        lines = file.read(TAIL).decode(errors="replace").splitlines(keepends=True)
    # A truncated line could be part of a secret, which no pattern recognizes.
    return "".join(lines[1 if start else 0 :][-LINES:])

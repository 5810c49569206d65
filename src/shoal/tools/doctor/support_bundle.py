"""A redacted archive to attach to a support request: the doctor's findings and their context."""

from __future__ import annotations

import getpass
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from shoal.distributed import env_vars
from shoal.telemetry.events import parse_event, paths_in
from shoal.tools.doctor.findings import Examination, examination_document
from shoal.util.document import to_json
from shoal.util.errors import LaunchError, raised_as
from shoal.util.packages import packages
from shoal.util.safe_text import MASK, is_secret, masked
from shoal.util.tables import rendered
from shoal.util.units import size

# Values after a name: `token=…`, `"api_key": "…"`, `--password …`. The value is examined only if the
# name is that of a secret: it may be a name with a value itself, and a line may be long.
_NAMED = re.compile(
    r"""(?<![\w.-])(?:--?)?(?P<name>[A-Za-z_][\w.-]*)\\*["']?[ \t]*(?:=>|[:=])[ \t]*"""
    r"""|(?<![\w-])--(?P<flag>[\w-]+)["']?,?[ \t]+"""
)
# Also as Python shows it, `b'…'` and `SecretStr('…')`, and as JSON within JSON, `\"…\"`.
_VALUE = re.compile(
    r"""(?:\w+\()?[bBfFrRuU]{0,2}(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|\\+"[^"\\\n]*\\+"|[^\s,;&'"]+"""
)
# Keys with a known format, in any place.
_FORMS = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|sk_live_|gsk_|nvapi-|npm_|pypi-|xox[abprs]-|AKIA|ASIA|AIza|ya29\.|wandb_v\d_)[\w./+-]{12,}"
    r"|\b(?i:(?:proxy-)?authorization|(?:set-)?cookie)[\"']?[ \t]*[:=][^\n]*"
    r"|\bmachine[ \t]+\S+[ \t]+login[ \t]+\S+[ \t]+password[ \t]+\S+"
    r"|(?<=\s)-u[ \t]+[^\s:]+:\S+"
    r"|\b(?:Bearer|Basic)[ \t]+[\w./+=~-]{8,}"
    r"|\beyJ[\w-]{8,4096}\.[\w-]{8,4096}\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_SHORTEST = 6
"""Shorter secrets are also words; they are masked only after their name."""


class Redactor:
    """A function object that masks secrets and replaces each of `names` by its placeholder.

    `secrets` are values that are known to be secret: they are masked everywhere.
    """

    def __init__(self, secrets: Iterable[str], names: Mapping[str, str] | None = None) -> None:
        known = {one for one in secrets if len(one) >= _SHORTEST}
        known |= {json.dumps(one)[1:-1] for one in known} | {quote(one, safe="") for one in known}
        values = sorted(known, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, values))) if values else None
        self._names = dict(names or {})
        longest = sorted(self._names, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest))
        self._replaced = re.compile(rf"(?<![\w-])(?:{alternatives})(?![\w-])") if longest else None

    def text(self, text: str) -> str:
        """Return `text` without secrets and names."""
        if self._secrets is not None:
            text = self._secrets.sub(MASK, text)
        text = _FORMS.sub(MASK, text)
        text = _mask_named(text)
        text = str(masked(text))
        if self._replaced is not None:
            text = self._replaced.sub(lambda found: self._names[found[0]], text)
        return text

    def tree(self, tree: Any) -> Any:
        """Return JSON values with redacted strings, each according to the rules for its key."""
        return self._each(masked(tree))

    def _each(self, tree: Any) -> Any:
        if isinstance(tree, str):
            return self.text(tree)
        if isinstance(tree, Mapping):
            return {self.text(str(name)): self._each(item) for name, item in tree.items()}
        if isinstance(tree, list | tuple):
            return [self._each(item) for item in tree]
        return tree


def _mask_named(text: str) -> str:
    pieces, at = [], 0
    for found in _NAMED.finditer(text):
        if found.start() < at or not is_secret(found["name"] or found["flag"]):
            continue
        value = _VALUE.match(text, found.end())
        if value is not None and not (found["name"] == "tokens" and value[0].isdecimal()):
            pieces += [text[at : found.end()], MASK]
            at = value.end()
    return "".join([*pieces, text[at:]])


def stand_ins(
    *, hosts: Iterable[str], addresses: Iterable[str], user: str, home: str
) -> dict[str, str]:
    """Return consistent placeholders for names of hosts, their addresses, a user and a home."""
    names: dict[str, str] = {}
    for number, host in enumerate(dict.fromkeys(hosts), 1):
        names[host] = f"host-{number}"
        names.setdefault(host.partition(".")[0], f"host-{number}")
    for number, address in enumerate(dict.fromkeys(addresses), 1):
        names[address] = f"address-{number}"
    if len(home) > 1:
        names[home] = "HOME"
    if user:
        names[user] = "USER"
    return names


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


def write_bundle(texts: Mapping[str, str], path: Path) -> list[str]:
    """Write an archive to a new file that only its owner can read; return a line for each text in it.

    `texts` are keyed by their file names in it. Raises LaunchError if that file exists or can't be
    written.
    """
    with raised_as(
        LaunchError,
        given=f"--bundle {path}",
        fix="use a file that does not exist yet, in a directory that can be written",
    ):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with (
                os.fdopen(descriptor, "wb") as file,
                zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
            ):
                for name, text in texts.items():
                    archive.writestr(name, text)
        except OSError:
            path.unlink(missing_ok=True)  # incomplete, it would only block the next try
            raise
    return [f"{name} ({size(len(text.encode()))})" for name, text in texts.items()]


def collect_bundle(
    found: Examination, *, described: str, run: Path | None, anonymous: bool
) -> dict[str, str]:
    """Return the redacted texts for a support request, keyed by their file names.

    `described` is the output of `shoal info`. Of a run directory it includes the start of each attempt
    and the ends of log files; no data, no checkpoint, and only environment variables with PREFIXES.
    Secrets are masked. With `anonymous`, names of hosts, their addresses, the user and the home
    directory are replaced.
    """
    names: dict[str, str] = {}
    if anonymous:
        names = stand_ins(
            hosts=[*found.hosts, os.uname().nodename],
            addresses=[
                one.address
                for known in psutil.net_if_addrs().values()
                for one in known
                if one.address not in ("127.0.0.1", "::1") and not one.address.startswith("00:00:00:00")
            ],
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
    return texts


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

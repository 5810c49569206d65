"""A site: what its Slurm wants and allows, read from a small TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from shoal.launcher.submit.job import LAUNCHERS, LauncherName
from shoal.launcher.submit.times import parse_time
from shoal.util.errors import LaunchError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Qos:
    """A quality of service and its limits: seconds, and GPUs of one job."""

    name: str
    time: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Nodes of one kind, under the name that people give to `--partition`.

    `option` is what Slurm's own option gets, None where it needs none. `qos` are in the order in
    which they are tried; the first is what a job gets that names none. `account` is appended to an
    account. None of a number is: not known.
    """

    name: str
    option: str | None = None
    constraint: str | None = None
    account: str = ""
    gres: str = "gpu"
    gpus: int | None = None
    cores: int | None = None
    cpus_per_gpu: int | None = None
    nodes: int | None = None
    time: int | None = None
    qos: tuple[Qos, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a site wants. `setup` are lines of its file that a job begins with, as they stand there.

    `tried` is what it was tried on, empty for a site that never was. `hosts` are patterns of its
    login nodes' names. `container` are the words in front of an image. `local` is where nodes have a
    disk of their own, as a shell of the first node reads it.
    """

    name: str
    about: str = ""
    tried: str = ""
    hosts: tuple[str, ...] = ()
    launcher: LauncherName = "srun"
    hint: str | None = None
    ports: str | None = None
    memory: bool = True
    requeue: bool = True
    whole_nodes: bool = False
    lead: int = 300
    python: str | None = None
    mpirun: tuple[str, ...] = ("mpirun",)
    container: tuple[str, ...] = ("apptainer", "exec", "--nv")
    local: str = "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}"
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    default: str | None = None
    partitions: Mapping[str, Partition] = field(default_factory=dict)

    def partition(self, name: str | None) -> Partition | None:
        """The partition of that name, the default one for None; None if the site does not list it."""
        return self.partitions.get(name if name is not None else self.default or "")


def read_site(name: str, text: str, file: str) -> Site:
    """The site that a TOML text describes; `file` is where it stands, for errors.

    Raises LaunchError where it is no TOML, has a key that means nothing, or a value of another kind.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(file, f"no TOML: {error}", "mend that line") from None
    partitions = table.pop("partitions", {})
    site = _Table(table, file, "").read(
        Site,
        name=name,
        partitions={
            key: _partition(key, value, file) for key, value in _tables(partitions, file, "partitions")
        },
    )
    if site.launcher not in LAUNCHERS:
        raise _wrong(file, f"launcher = {site.launcher!r}", f"one of {', '.join(LAUNCHERS)}")
    if site.ports is not None and not _is_range(site.ports):
        raise _wrong(file, f"ports = {site.ports!r}", 'two numbers, as in "10001-20000"')
    for key, words in (("mpirun", site.mpirun), ("container", site.container)):
        if not words:
            raise _wrong(file, f"{key} = []", "the words of a command, or leave it out")
    if site.default is not None and site.default not in site.partitions:
        raise _wrong(file, f"default = {site.default!r}, which is none of its partitions", "add it")
    return site


def _is_range(text: str) -> bool:
    found = re.fullmatch(r"(\d+)-(\d+)", text, re.ASCII)
    return found is not None and 1 <= int(found[1]) <= int(found[2]) <= 65535


def _partition(name: str, table: dict[str, Any], file: str) -> Partition:
    where = f"partitions.{name}."
    qos = [
        _Table(value, file, f"{where}qos.{key}.").read(Qos, name=key)
        for key, value in _tables(table.pop("qos", {}), file, f"{where}qos")
    ]
    table.setdefault("option", name)
    partition = _Table(table, file, where).read(Partition, name=name, qos=tuple(qos))
    # `option = ""` says that Slurm finds the partition by itself.
    return replace(partition, option=partition.option or None)


class _Table:
    """A table of a site's file, read into a dataclass whose fields say what each key holds."""

    def __init__(self, table: dict[str, Any], file: str, where: str) -> None:
        self._table, self._file, self._where = table, file, where

    def read(self, kind: Callable[..., T], **known: Any) -> T:
        fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
        values = {}
        for key, value in self._table.items():
            if key not in fields or key in known:
                own = ", ".join(name for name in fields if name not in known)
                raise _wrong(self._file, f"an unknown key, {self._where}{key}", f"keys are {own}")
            values[key] = self._value(key, value, fields[key].type)
        return kind(**values, **known)

    def _value(self, key: str, value: Any, kind: str) -> Any:
        """`kind` is the annotation as it is written."""
        if key in {"time", "lead"}:
            return parse_time(self._plain(key, value, str), f"{self._file}: {self._where}{key} =")
        if kind.startswith("tuple"):
            words = self._plain(key, value, list)
            return tuple(self._plain(key, word, str) for word in words)
        for name, one in (("int", int), ("bool", bool)):
            if kind.startswith(name):
                return self._plain(key, value, one)
        return self._plain(key, value, str)

    def _plain(self, key: str, value: Any, kind: type[T]) -> T:
        if type(value) is not kind:
            raise _wrong(
                self._file,
                f"{self._where}{key} = {value!r}, a {type(value).__name__}",
                f"a {_WORDS[kind]}",
            )
        if isinstance(value, int) and value < 0:
            raise _wrong(self._file, f"{self._where}{key} = {value!r}", "0 or more")
        return value


_WORDS: dict[type, str] = {
    str: 'text, as in "a100"',
    int: "whole number",
    bool: "true or false",
    list: 'list of texts, as in ["module purge"]',
}


def _tables(tables: object, file: str, where: str) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise _wrong(file, f"{where} that are no tables", f"begin one with [{where}.NAME]")
    return list(tables.items())


def _wrong(file: str, found: str, fix: str) -> LaunchError:
    return LaunchError(given=f"the site in {file}", found=found, fix=fix)

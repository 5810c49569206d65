"""The sites: their resources and limits; those of Shoal, and the user's own, as small TOML files."""

from __future__ import annotations

import fnmatch
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from shoal.distributed import env_vars
from shoal.tools.submit.scheduler import Scheduler
from shoal.tools.submit.schedulers import SCHEDULERS, find_scheduler
from shoal.tools.submit.times import parse_time
from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import LaunchError, raised_as


@dataclass(frozen=True, kw_only=True)
class Qos:
    """A quality of service and its limits: seconds, and GPUs of one job."""

    name: str
    time: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Nodes of one kind, under the name that users pass as `--partition`.

    Schedulers other than Slurm call it a queue. `option` is the name that the scheduler gets, None if
    it needs none. `qos` are in the order in which they are tried; a job without one gets the first.
    `account` is appended to an account. `setup` is used in place of the site's, unless it is None.
    `gpu_resource` is the scheduler's name for the GPUs of these nodes, None for its usual one.
    `parallel_environment` is what Grid Engine needs for several processes. A number that is None is not
    known.
    """

    name: str
    option: str | None = None
    constraint: str | None = None
    account: str = ""
    setup: tuple[str, ...] | None = None
    gpu_resource: str | None = None
    parallel_environment: str | None = None
    gpus: int | None = None
    cores: int | None = None
    cpus_per_gpu: int | None = None
    nodes: int | None = None
    time: int | None = None
    qos: tuple[Qos, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster.

    `setup` are the lines with which each batch script begins, unquoted. `scheduler` is a name in
    `schedulers.SCHEDULERS`. `tried` describes the tests of the site file, and is empty if there were
    none. `hosts` are patterns of the names of login nodes. `launcher` is None for the
    scheduler's own. Without `multithread`, processes get physical cores. `container` are the words
    before an image; `image` is the default one. `volumes` are claims of Kubernetes with their paths, as
    in `data:/mnt/data`. `local` is a directory on a disk of the node, with variables of the shell, None
    for the scheduler's. `options` are further directives of the scheduler.
    """

    name: str
    scheduler: str = "slurm"
    about: str = ""
    tried: str = ""
    hosts: tuple[str, ...] = ()
    launcher: str | None = None
    multithread: bool = True
    ports: str | None = None
    memory: bool = True
    requeue: bool = True
    whole_nodes: bool = False
    lead: int = 300
    python: str | None = None
    mpirun: tuple[str, ...] = ("mpirun",)
    container: tuple[str, ...] = ("apptainer", "exec", "--nv")
    image: str | None = None
    volumes: tuple[str, ...] = ()
    local: str | None = None
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    default: str | None = None
    partitions: Mapping[str, Partition] = field(default_factory=dict)

    def partition(self, name: str | None) -> Partition | None:
        """Return the partition of that name, or the default one for None; None if it is not listed."""
        return self.partitions.get(name if name is not None else self.default or "")


T = TypeVar("T")


def site_scheduler(site: Site) -> Scheduler:
    """Return the scheduler of a site."""
    return find_scheduler(site.scheduler, f"the site {site.name}")


def read_site(name: str, text: str, file: str) -> Site:
    """Return the site that a TOML text describes; `file` is the name of the file, for errors.

    Raises LaunchError if it is not TOML, has an unknown key or scheduler, or a value of a wrong type.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(file, f"it is not TOML: {error}", "correct that line") from None
    partitions = table.pop("partitions", {})
    site = _Table(table, file, "").read(
        Site,
        name=name,
        partitions={
            key: _partition(key, value, file) for key, value in _tables(partitions, file, "partitions")
        },
    )
    _check_keys(site, file)
    launchers = site_scheduler(site).profile.launchers
    if site.launcher not in (None, *launchers):
        raise _wrong(file, f"launcher = {site.launcher!r}", f"one of {', '.join(launchers)}")
    if site.ports is not None and not _is_range(site.ports):
        raise _wrong(file, f"ports = {site.ports!r}", 'two numbers, as in "10001-20000"')
    for key, words in (("mpirun", site.mpirun), ("container", site.container)):
        if not words:
            raise _wrong(file, f"{key} = []", "the words of a command, or leave it out")
    if any(re.search("[{}]", re.sub(r"\{(per_node|cpus)\}", "", word)) for word in site.mpirun):
        raise _wrong(file, f"mpirun = {list(site.mpirun)}", "no braces but {per_node} and {cpus}")
    if site.default is not None and site.default not in site.partitions:
        raise _wrong(file, f"default = {site.default!r}, which is not one of its partitions", "add it")
    return site


def _check_keys(site: Site, file: str) -> None:
    """Raise LaunchError for a key that only other schedulers have."""
    own = find_scheduler(site.scheduler, _given(file)).profile
    foreign = {key for each in SCHEDULERS.values() for key in each.profile.site_keys}
    parts = {f"partitions.{name}.": part for name, part in site.partitions.items()}
    for where, part in {"": site, **parts}.items():
        for key in sorted(foreign.difference(own.site_keys).intersection(vars(part))):
            if getattr(part, key) != getattr(type(part), key):
                raise _wrong(file, f"{where}{key}, which is not a key of {own.title}", "leave it out")


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
    # `option = ""` means that the scheduler chooses the partition.
    return replace(partition, option=partition.option or None)


class _Table:
    """A table of a site file, read into a dataclass whose fields are its keys."""

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
        """Return a converted value; `kind` is the annotation as it is written."""
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
    str: 'string, as in "a100"',
    int: "integer",
    bool: "true or false",
    list: 'list of strings, as in ["module purge"]',
}


def _tables(tables: object, file: str, where: str) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise _wrong(file, f"{where} that are not tables", f"begin one with [{where}.NAME]")
    return list(tables.items())


def _wrong(file: str, found: str, fix: str) -> LaunchError:
    return LaunchError(given=_given(file), found=found, fix=fix)


def _given(file: str) -> str:
    return f"the site in {file}"


PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class SiteEntry:
    """A site's name, its file as shown to users, and its text."""

    name: str
    file: str
    text: str


def folder() -> Path:
    """Return the directory of the user's own sites, one `NAME.toml` each."""
    return env_vars.config_folder() / "sites"


def entries() -> dict[str, SiteEntry]:
    """Return all sites by name; the user's own replace those of the same name."""
    shipped = resources.files(__package__).joinpath("sites")
    found = {}
    files = (file for file in shipped.iterdir() if file.name.endswith(".toml"))
    for file in sorted(files, key=lambda file: file.name):
        name = file.name.removesuffix(".toml")
        found[name] = SiteEntry(name=name, file=f"shoal's own {file.name}", text=file.read_text())
    for path in sorted(folder().glob("*.toml")):
        with raised_as(
            LaunchError,
            given=f"the site in {path}",
            fix="repair it, or move it elsewhere: each file NAME.toml in this directory describes a "
            "site",
        ):
            text = path.read_text(errors="replace")
        found[path.stem] = SiteEntry(name=path.stem, file=str(path), text=text)
    return found


def find_entry(name: str) -> SiteEntry:
    """Return the site of that name. Raises LaunchError if there is none."""
    found = entries()
    if name not in found:
        raise LaunchError(
            given=f"--site {name}",
            found=f"the sites are {', '.join(found)}; your own are in {folder()}",
            fix=f"run `shoal sites new {name}` on a login node: it drafts one from the scheduler's "
            "data",
        )
    return found[name]


def load(entry: SiteEntry) -> Site:
    """Return the site that an entry describes."""
    return read_site(entry.name, entry.text, entry.file)


def choose(name: str | None, host: str | None = None) -> Decision[Site]:
    """Return the given site, else that of SHOAL_SITE, else the one whose login node this is, else
    plain.

    Default of `host`: the name of this machine.
    """
    reason = GIVEN
    if name is None and (own := env_vars.variable(env_vars.SITE)):
        name, reason = own, f"{GIVEN}: {env_vars.SITE}={own}"
    if name is None:
        host = socket.gethostname() if host is None else host
        name, reason = PLAIN, f"no site has {host} among its hosts"
        pairs = ((entry, pattern) for entry in entries().values() for pattern in load(entry).hosts)
        for entry, pattern in pairs:
            if fnmatch.fnmatchcase(host, pattern):
                name, reason = entry.name, f"{host} is one of its hosts, {pattern}"
                break
    return Decision(what="site", value=load(find_entry(name)), reason=reason)

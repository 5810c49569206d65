"""The available sites: those that come with Shoal, and the user's own."""

from __future__ import annotations

import fnmatch
import socket
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shoal.distributed import env_vars
from shoal.tools.submit.site import Site
from shoal.tools.submit.site_file import read_site
from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import LaunchError

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
        found[path.stem] = SiteEntry(name=path.stem, file=str(path), text=_read(path))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise LaunchError(
            given=f"the site in {path}",
            found=error.strerror or str(error),
            fix="repair it, or move it elsewhere: each file NAME.toml in this directory describes a "
            "site",
        ) from None


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
    if name is not None:
        return Decision(what="site", value=load(find_entry(name)), reason=GIVEN)
    if own := env_vars.variable(env_vars.SITE):
        reason = f"{GIVEN}: {env_vars.SITE}={own}"
        return Decision(what="site", value=load(find_entry(own)), reason=reason)
    host = socket.gethostname() if host is None else host
    for entry in entries().values():
        site = load(entry)
        for pattern in site.hosts:
            if fnmatch.fnmatchcase(host, pattern):
                return Decision(
                    what="site", value=site, reason=f"{host} is one of its hosts, {pattern}"
                )
    reason = f"no site has {host} among its hosts"
    return Decision(what="site", value=load(find_entry(PLAIN)), reason=reason)

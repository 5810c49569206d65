"""Redaction of text that leaves the site: secrets are masked, people and hosts replaced on request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from shoal.util.safe_text import MASK, is_secret, masked

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

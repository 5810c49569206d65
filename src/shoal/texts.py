"""Text that may be shown and kept: control characters escaped, secrets masked."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from typing import Any

# Controls of C0 and C1, line separators, marks that reorder text, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_WORDS = "token|secret|password|passwd|passphrase|credential|auth|bearer|key"
# Whole words, as in HF_TOKEN, apiKey and AWS_SECRET_ACCESS_KEY, and not in `tokenizer` or `keep`.
_SECRET = re.compile(rf"(?:^|[^a-z])(?:{_WORDS})s?(?![a-z])|(?:password|passwd|apikey)$")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")

MASK = "***"


def printable(text: str) -> str:
    """`text` as one line that a terminal shows and does not obey: control characters are escaped."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def masked(tree: Any, *, secret: bool = False) -> Any:
    """Settings without what people keep to themselves.

    In dicts, lists and tuples, texts below a name like `api_key`, `TOKEN` or `dbPassword` become
    `***`, and so do names and passwords in URLs. Numbers stay: `tokens` may be counted. Types stay too.
    """
    if type(tree) is str:
        return MASK if secret and tree else _LOGIN.sub(f"{MASK}@", tree)
    if type(tree) in (dict, OrderedDict, Counter):
        pairs = ((name, masked(item, secret=secret or is_secret(name))) for name, item in tree.items())
        return type(tree)(dict(pairs))
    if type(tree) in (list, tuple):
        return type(tree)(masked(item, secret=secret) for item in tree)
    return tree


def passwords(text: str) -> list[str]:
    """The passwords in URLs (`https://name:password@host`), and names that stand there alone."""
    return [found.rpartition(":")[2].rstrip("@") for found in _LOGIN.findall(text)]


def is_secret(name: object) -> bool:
    """Whether a setting's name says that its value is a secret."""
    return isinstance(name, str) and bool(_SECRET.search(_HUMP.sub("_", name).lower()))


def duration(seconds: float) -> str:
    """For people: 0:07, 12:34, 3:25:45, 4d 03:25. Nothing where a clock was set back meanwhile."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"

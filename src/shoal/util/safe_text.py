"""Text that may be shown and kept: control characters escaped, secrets masked."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

# Controls of C0 and C1, line separators, marks that reorder text, and lone surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\n-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_WORDS = (
    "token|secret|password|passwd|pass(?:phrase)?|credential|auth(?:orization)?|bearer|key|cookie|jwt"
    "|private"
)
# Whole words, as in HF_TOKEN, apiKey and AWS_SECRET_ACCESS_KEY, and not in `tokenizer` or `keep`. Short
# ones count at the end only: `tok_embeddings` and `pw_conv` are names of layers.
_ENDS = "password|passwd|sshpass|apikey|token|secret|(?:^|[^a-z])(?:pwd|pw|tok)|[^a-z]pat"
_DIRECTORIES = ("PWD", "OLDPWD")
_SECRET = re.compile(rf"(?:^|[^a-z])(?:{_WORDS})s?(?![a-z])|(?:{_ENDS})$")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LOGIN = re.compile(r"(?<=://)[^/\s\"']+@")  # a password may have another @ in it
_OPTION = re.compile(r"(--?[\w-]+)(?:=(.+))?", re.DOTALL)

MASK = "***"


def printable(text: str) -> str:
    """Return `text` as one line that a terminal shows and does not interpret: control characters are
    escaped.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def masked(tree: Any, *, secret: bool = False) -> Any:
    """Return settings without secrets.

    In mappings, lists and tuples, texts below a name like `api_key`, `TOKEN` or `dbPassword` become
    `***`, and so do names and passwords in URLs, and values after an option like `--api-key` in a list
    of arguments. Numbers stay: `tokens` may be counted. Python's own types stay too; other mappings
    become dicts.
    """
    if secret and tree and isinstance(tree, str | bytes):
        return MASK
    if type(tree) is str:
        option = _OPTION.fullmatch(tree)
        if option is not None and option[2] and is_secret(option[1]):
            return f"{option[1]}={MASK}"
        return _LOGIN.sub(f"{MASK}@", tree)
    if isinstance(tree, Mapping):
        made = {name: masked(item, secret=secret or is_secret(name)) for name, item in tree.items()}
        if isinstance(tree, OrderedDict | Counter):
            return type(tree)(made)
        return made
    if type(tree) in (list, tuple):
        named = [False, *map(_names_a_secret, tree)]
        return type(tree)(
            masked(item, secret=secret or follows) for item, follows in zip(tree, named, strict=False)
        )
    return tree


def shown(value: object) -> str:
    """Return the text of a value, as `str` does; secrets in it are masked."""
    found = _opened(value)
    hidden = masked(found)
    return str(value) if hidden == found else str(hidden)


def _opened(value: Any) -> Any:
    """Return names and strings of a value: dicts and lists replace all objects with names or items."""
    if isinstance(value, Mapping):
        return {name: _opened(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _opened(getattr(value, field.name, None)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _opened(value._asdict())
    if isinstance(value, Namespace | SimpleNamespace):
        return _opened(vars(value))
    if isinstance(value, list | tuple | set | frozenset):
        return [_opened(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _names_a_secret(argument: object) -> bool:
    """Return whether it is an option whose value comes next."""
    option = _OPTION.fullmatch(argument) if isinstance(argument, str) else None
    return option is not None and option[2] is None and is_secret(option[1])


def passwords(text: str) -> list[str]:
    """Return the passwords in URLs (`https://name:password@host`), and names that appear there without
    one.
    """
    return [found.rpartition(":")[2].rstrip("@") for found in _LOGIN.findall(text)]


def is_secret(name: object) -> bool:
    """Return whether a setting's name suggests that its value is a secret."""
    if not isinstance(name, str) or name in _DIRECTORIES:
        return False
    return bool(_SECRET.search(_HUMP.sub("_", name).lower()))

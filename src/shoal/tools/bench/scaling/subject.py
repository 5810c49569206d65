"""The subject of a study, read from text: a built-in model, a function that makes one, or a script.

Built-in models are written `NAME` or `NAME:size=value,…`, functions `package.module:function`, scripts
as a path that ends in `.py`. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from shoal.util.errors import LaunchError

IMAGE = {"size": 224, "classes": 1000}
SIZES: Mapping[str, Mapping[str, int]] = {
    "dense": {"width": 512, "layers": 3, "inputs": 784, "classes": 10},
    "resnet-small": {"size": 32, "width": 16, "blocks": 2, "classes": 10},
    "resnet18": IMAGE,
    "resnet50": IMAGE,
    "resnet101": IMAGE,
    "gpt": {"layers": 4, "width": 128, "heads": 4, "context": 128, "words": 256},
}
"""The built-in models with their default sizes."""


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """One of Shoal's built-in models, with all its sizes."""

    name: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        usual = SIZES[self.name]
        given = ",".join(f"{name}={n}" for name, n in self.sizes.items() if usual[name] != n)
        return f"{self.name}:{given}" if given else self.name


@dataclass(frozen=True, kw_only=True)
class Factory:
    """A function `module:name` that returns (model, task, dataset) when it is called."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True, kw_only=True)
class ScriptSubject:
    """A script of the user."""

    path: str

    def __str__(self) -> str:
        return self.path


Subject: TypeAlias = BuiltIn | Factory | ScriptSubject


def parse_subject(text: str) -> Subject:
    """Return the subject that `text` describes, which need not exist. Raises LaunchError for others."""
    if text.endswith(".py"):
        return ScriptSubject(path=text)
    name, colon, rest = text.partition(":")
    if name in SIZES:
        return BuiltIn(name=name, sizes={**SIZES[name], **_sizes(name, rest if colon else "")})
    module = name.split(".")
    if colon and rest.isidentifier() and all(part.isidentifier() for part in module):
        return Factory(module=name, name=rest)
    raise LaunchError(
        given=text,
        found="neither a built-in model, nor module:function, nor a script",
        fix=f"use one of {', '.join(SIZES)}; package.module:function; or train.py",
    )


def throughput_unit(subject: Subject) -> tuple[str, int]:
    """Return the unit of throughput, and the number of units per sample."""
    if isinstance(subject, BuiltIn):
        if subject.name == "gpt":
            return "tokens", subject.sizes["context"]
        if subject.name.startswith("resnet"):
            return "images", 1
    return "samples", 1


def _sizes(name: str, text: str) -> dict[str, int]:
    found = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in SIZES[name] or not value.isdecimal() or int(value) < 1:
            usual = ",".join(f"{size}={number}" for size, number in SIZES[name].items())
            raise LaunchError(
                given=f"{name}:{text}",
                found=f"{part!r} is not one of its sizes, or not a number above 0",
                fix=f"use {name}:{usual}, or some of these",
            )
        found[key] = int(value)
    if name == "gpt" and (shape := {**SIZES[name], **found})["width"] % shape["heads"]:
        raise LaunchError(
            given=f"{name}:{text}",
            found=f"the width {shape['width']} is not divisible by {shape['heads']} heads",
            fix=f"gpt:width={shape['width']},heads={_divisor(shape['width'], shape['heads'])}",
        )
    return found


def _divisor(width: int, heads: int) -> int:
    return max(number for number in range(1, heads + 1) if width % number == 0)

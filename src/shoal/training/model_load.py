"""Import of weights into a model, parallelized or not."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from shoal._torch.modules import loads_itself
from shoal.checkpoint import Agreement
from shoal.strategies import known_engine
from shoal.strategies.dtensor import shared_like
from shoal.strategies.other_tools import unwrapped
from shoal.training.state_names import first_names, model_differences, shapes
from shoal.training.weights.hugging_face import ignored
from shoal.training.weights.loading import (
    Match,
    Shapes,
    UnfitError,
    aliases,
    check_dtypes,
    fill,
    match,
)
from shoal.training.weights.sources import Source
from shoal.util.errors import CheckpointError

PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""The prefixes of names by wrappers: DDP and DataParallel, torch.compile, FSDP1."""

T = TypeVar("T")


def load(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
    download: bool = False,
    revision: str | None = None,
) -> None:
    """Load weights into a model, in place. Each rank reads only the parts of files that it keeps.

    Call it on all ranks if the model is parallelized, before the first step. Models of transformers
    take the names and forms of tensors that `from_pretrained` takes. Prefixes that wrappers leave in
    names (`module.`, `_orig_mod.`) are dropped if the model has no such names. Tied weights may have
    one name in the file. Floating-point values are converted to the dtype of the model.

    Args:
        model: Module to change, parallelized or not; also in a wrapper of DDP or Fabric.
        source: A safetensors file; a directory with `model.safetensors`, or with
            `model.safetensors.index.json` and its files; an fsspec URL of a file or a directory; the
            name of a model in the local Hugging Face cache, such as "org/name"; or a mapping from names
            to tensors.
        rename: Function from each name in the source to the name in the model. Default: None.
        strict: Whether each entry of the state_dict must be in the source, and the reverse. If False,
            entries that the source lacks do not change, tensors that the model lacks are ignored, and
            rank 0 prints both. Default: True.
        download: Whether to download a model that the local Hugging Face cache lacks. Default: False.
        revision: Commit, tag or branch on the Hugging Face hub. Default: None, the main branch.

    Raises:
        CheckpointError: Before anything changes, and on all ranks of a parallelized model: if names or
            shapes differ, two names become the same, weights are quantized, or files are missing,
            damaged or of different saves.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> shoal.load(model, {"module.weight": torch.zeros(1, 4), "module.bias": torch.ones(1)})
        >>> model.bias.item()
        1.0
    """
    if not isinstance(model, nn.Module) or not isinstance(source, str | os.PathLike | Mapping):
        raise CheckpointError(
            given=f"shoal.load({type(model).__name__}, {type(source).__name__})",
            found="the first argument is the model, the second a file, a directory or a state_dict",
            fix="shoal.load(model, 'model.safetensors')",
        )
    if not (rename is None or callable(rename)) or not isinstance(strict, bool):
        raise CheckpointError(
            given=f"shoal.load(model, …, rename={rename!r}, strict={strict!r})",
            found="rename is a function from a name to a name, and strict is True or False",
            fix="shoal.load(model, source, rename=lambda name: name.removeprefix('model.'))",
        )
    model = unwrapped(model)
    if isinstance(source, Mapping):
        _load_mapping(model, source, rename, strict)
    else:
        _load_files(model, Source(source, download=download, revision=revision), rename, strict)


def _load_mapping(
    model: nn.Module, source: Mapping[str, Any], rename: Callable[[str], str] | None, strict: bool
) -> None:
    here = _of_all_ranks(model)
    of = f"of {len(source)} entries"
    named = {_new_name(name, here, rename): tensor for name, tensor in source.items()}
    if len(named) < len(source):
        twice = sorted(name for name in source if name not in named)
        raise CheckpointError(
            given=f"shoal.load(model, …) of {len(source)} tensors",
            found=f"several have the same name without its prefix, such as {twice[0]}",
            fix="pass the entries of one model: "
            "{k: v for k, v in state.items() if k.startswith('module.')}",
        )
    absent = [name for name, shape in here.items() if shape is None and name not in named]
    _compare(model, f"shoal.load(model, …) {of}", here, shapes(named), {*absent}, strict)
    if absent:
        _warn_of_absent(f"shoal.load(model, …) {of}", absent)
    own = model.state_dict()  # of a pipeline, this rank's part
    shards = {name: shared_like(named[name], v) if name in named else v for name, v in own.items()}
    model.load_state_dict(shards)


def _load_files(
    model: nn.Module, source: Source, rename: Callable[[str], str] | None, strict: bool
) -> None:
    engine = known_engine(model)
    world = None if engine is None else engine.world

    def together(action: Callable[[], T]) -> T:
        return action() if world is None else Agreement(world).together(source.given, action)

    here = _of_all_ranks(model)
    own = model.state_dict()
    if world is not None and source.on_hub:
        first = world.placement.local_rank == 0
        together(lambda: source.locate() if first else None)
    place = together(lambda: source.locate(download=False) if world else source.locate())

    def matched() -> Match:
        source.check_not_quantized(place)
        stored = source.tensors(place)
        try:
            found = match(model, stored, here, lambda name: _new_name(name, here, rename))
            check_dtypes(own, found)
        except UnfitError as error:
            raise source.error(str(error), error.fix) from None
        return found

    found = together(matched)
    tied = aliases(own, found.shapes)
    accepted = tied if world is None else {*tied}.union(*world.gather(sorted(tied)))
    extra = [name for name in found.plain if here.get(name, ()) is None]
    absent = {name for name, shape in here.items() if shape is None and name not in extra}
    there = {**found.shapes, **dict.fromkeys(extra, None)}
    _compare(model, source.given, here, there, accepted | absent, strict)

    def change() -> None:
        own.update({n: found.plain.pop(n).whole() for n in extra})
        fill(own, found)
        if extra or loads_itself(model):
            model.load_state_dict(own)

    together(change)
    for (old, new), number in check_dtypes(own, found).items():
        said = f"shoal: {source.given}: {number} tensors of {old} as {new}".replace("torch.", "")
        (print if world is None else world.print)(said)
    if absent and (world is None or world.is_rank_zero):
        _warn_of_absent(source.given, absent)


def _warn_of_absent(given: str, absent: Iterable[str]) -> None:
    warnings.warn(
        f"{given}: it lacks {', '.join(absent)}; the model keeps its own values", stacklevel=5
    )


def _compare(
    model: nn.Module, given: str, here: Shapes, there: Shapes, accepted: Collection[str], strict: bool
) -> None:
    """Raise CheckpointError if the entries of the source are not those of the model.

    Entries in `accepted` may be missing. Without `strict`, rank 0 prints the names of one side only.
    """
    may_miss, may_have = ignored(model, unexpected=False), ignored(model, unexpected=True)
    missing = [n for n in here if n not in {*there, *accepted} and not _matches(may_miss, n)]
    unexpected = [n for n in there if n not in here and not _matches(may_have, n)]
    both = {n: shape for n, shape in here.items() if n in there}
    if not strict and both:
        differences = model_differences(both, {n: there[n] for n in both})
    else:
        expected = both | {n: here[n] for n in missing}
        differences = model_differences(expected, {n: there[n] for n in (*both, *unexpected)})
    if differences:
        raise CheckpointError(
            given=f"{given} into a {type(model).__name__} of {len(here)} entries",
            found=f"it is the state of another model; {differences}",
            fix="build the model that the file was written from; or pass rename=, a function from the "
            "names of the file to those of the model; or strict=False, to load only common names",
        )
    engine = known_engine(model)
    sides = (("not in the source, unchanged", missing), ("not in the model, ignored", unexpected))
    for what, names in sides:
        if names:
            line = f"shoal: {given}: {what}: {first_names(names, 10)}"
            (print if engine is None else engine.world.print)(line)


def _matches(pattern: re.Pattern[str] | None, name: str) -> bool:
    return pattern is not None and pattern.search(name) is not None


def _of_all_ranks(model: nn.Module) -> Shapes:
    """Return the shapes of the model's state, of which each rank of a pipeline holds a part."""
    mine, engine = shapes(model.state_dict()), known_engine(model)
    if engine is None or engine.world.layout.degree("pipeline") == 1:
        return mine
    parts = engine.world.gather(mine)
    return {name: shape for part in parts for name, shape in part.items()}


def _new_name(name: str, here: Mapping[str, object], rename: Callable[[str], str] | None) -> str:
    """Return the name in the model: renamed by the user, and without prefixes of wrappers."""
    bare = name if rename is None else rename(name)
    if not isinstance(bare, str):
        raise CheckpointError(
            given=f"the name {name!r} in shoal.load",
            found=f"names are strings, and this one is {bare!r}"
            + ("" if rename is None else " after rename"),
            fix="pass a state_dict, or a rename that returns the name of an entry of the model",
        )
    while bare not in here:
        prefix = next((prefix for prefix in PREFIXES if bare.startswith(prefix)), None)
        if prefix is None:
            break
        bare = bare.removeprefix(prefix)
    # torch.compile may have wrapped only a part of the model.
    inner = bare
    for prefix in PREFIXES:
        inner = inner.replace(f".{prefix}", ".")
    return inner if inner in here else bare

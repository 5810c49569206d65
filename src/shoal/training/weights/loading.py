"""Weights into a model: names are matched before anything changes, then each rank reads its part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.mesh import local_slices
from shoal.strategies.dtensor import is_divided, share
from shoal.training.state_names import first_names
from shoal.training.weights.hugging_face import (
    Conversion,
    FileNames,
    is_pretrained,
    plain_twin,
    tied_names,
)
from shoal.training.weights.stored import KINDS, StoredTensor, blocks, on_meta

Shapes = dict[str, tuple[int, ...] | None]


class UnfitError(ValueError):
    """Tensors that can't be loaded into the model under any names, and what to do."""

    def __init__(self, found: str, fix: str = "pass unquantized weights of this model") -> None:
        super().__init__(found)
        self.fix = fix


@dataclass
class Match:
    """Which tensors of files belong to which entries of a model's state."""

    stored: Mapping[str, StoredTensor]
    """All tensors of the files."""
    plain: dict[str, StoredTensor] = field(default_factory=dict)
    """The tensors that belong to one entry, by its name."""
    converted: list[tuple[Conversion, dict[str, Tensor]]] = field(default_factory=list)
    """Conversions of transformers, each with its results on the meta device."""
    twin: Any = None

    @property
    def shapes(self) -> Shapes:
        """The shape of each entry that the files have."""
        found: Shapes = {name: one.shape for name, one in self.plain.items()}
        for _, results in self.converted:
            found.update({name: tuple(one.shape) for name, one in results.items()})
        return found

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each entry that the files have."""
        found = {name: one.dtype for name, one in self.plain.items()}
        for _, results in self.converted:
            found.update({name: one.dtype for name, one in results.items()})
        return found


def match(
    model: nn.Module, stored: Mapping[str, StoredTensor], here: Shapes, bare: Callable[[str], str]
) -> Match:
    """Return which tensors of files belong to which entries of the state, `here`.

    `bare` changes a name as the user wants it, and removes prefixes of wrappers. Raises UnfitError.
    """
    unknown = sorted({one.kind for one in stored.values()} - KINDS.keys())
    if unknown:
        raise UnfitError(f"quantized weights: tensors of type {', '.join(unknown)}")
    found = Match(stored)
    names = {name: bare(name) for name in stored}
    if is_pretrained(model):
        found.twin = plain_twin(model)
        originals = {new: name for name, new in names.items()}
        renamed, conversions = FileNames(found.twin, here).translated(
            [new for new in originals if here.get(new) is None]
        )
        names.update({originals[old]: new for old, new in renamed.items()})
        for each in conversions:
            each.sources = {p: [originals[n] for n in some] for p, some in each.sources.items()}
            found.converted.append((each, _converted(each, stored, found.twin)))
            for name in each.names():
                del names[name]
    often = Counter(names.values())
    twice = sorted(name for name, new in names.items() if often[new] > 1)
    if twice:
        raise UnfitError(
            f"several tensors get the same name, such as {twice[0]}",
            "pass the weights of one model; rename must return another name for each tensor",
        )
    found.plain = {new: stored[name] for name, new in names.items()}
    for name, source in tied_names(model).items():
        if name in here and name not in found.plain and source in found.plain:
            found.plain[name] = found.plain[source]
    return found


def _converted(each: Conversion, stored: Mapping[str, StoredTensor], twin: Any) -> dict[str, Tensor]:
    """Return the results of a conversion on the meta device."""
    meta = {n: on_meta(stored[n].shape, stored[n].dtype) for n in each.names()}
    try:
        return each.apply(meta, twin)
    except Exception as error:  # transformers raises many kinds
        raise UnfitError(
            f"transformers can't make {each.target} from {first_names(each.names())}: {error}"
        ) from None


def check_dtypes(own: Mapping[str, Any], found: Match) -> dict[tuple[torch.dtype, torch.dtype], int]:
    """Return how many tensors change their dtype, by the old and the new one.

    Raises UnfitError for values that a parameter can't take, such as those of quantized weights.
    """
    changes: dict[tuple[torch.dtype, torch.dtype], int] = {}
    for name, dtype in found.dtypes.items():
        target = own.get(name)
        if not isinstance(target, Tensor) or target.dtype == dtype:
            continue
        if not (_is_plain(dtype) and _is_plain(target.dtype)):
            raise UnfitError(
                f"{name} is {dtype} instead of {target.dtype}: quantized weights, or those of "
                "another model".replace("torch.", "")
            )
        changes[dtype, target.dtype] = changes.get((dtype, target.dtype), 0) + 1
    return changes


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def aliases(own: Mapping[str, Any], names: Shapes) -> set[str]:
    """Return the entries that are the same tensor as one of `names`, such as tied weights."""
    known = {_place(own[name]) for name in names if isinstance(own.get(name), Tensor)} - {None}
    return {name for name, value in own.items() if name not in names and _place(value) in known}


def aliases_within(own: Mapping[str, Any]) -> set[str]:
    """Return the entries that are the same tensor as one before them, such as tied weights."""
    seen: dict[object, str] = {}
    for name, value in own.items():
        seen.setdefault(_place(value) or name, name)
    return {*own} - {*seen.values()}


def _place(value: object) -> tuple[int, tuple[int, ...]] | None:
    if not isinstance(value, Tensor) or not value.numel() or value.is_meta:
        return None
    local = share(value)
    return (local.data_ptr(), tuple(value.shape)) if local.numel() else None


@torch.no_grad()
def fill(own: Mapping[str, Any], found: Match) -> None:
    """Read this rank's part of each entry in `own`, the state of the module on this rank, in place."""
    done: set[object] = set()
    for name, stored in sorted(found.plain.items(), key=_place_in_files):
        target = own.get(name)
        place = _place(target)
        if isinstance(target, Tensor) and place not in done:
            _read(stored, _slices(target), share(target).detach())
            done |= {place} - {None}
    for conversion, results in found.converted:
        targets = {name: own[name] for name in results if isinstance(own.get(name), Tensor)}
        if conversion.by_row:
            for target in targets.values():
                _fill_rows(found, conversion, target)
        elif targets:
            made = conversion.apply(_whole(found, conversion.names()), found.twin)
            for name, target in targets.items():
                share(target).copy_(made[name][_slices(target)])


def _place_in_files(item: tuple[str, StoredTensor]) -> tuple[str, int]:
    return str(item[1].path), item[1].start


def _fill_rows(found: Match, conversion: Conversion, target: Tensor) -> None:
    """Convert one row of the result at a time, such as one expert."""
    rows, *others = _slices(target)
    local = share(target)
    for number, row in enumerate(range(rows.start, rows.stop)):
        tensors = _whole(found, conversion.names(row))
        (made,) = conversion.apply(tensors, found.twin).values()
        local[number].copy_(made[0][tuple(others)])


def _whole(found: Match, names: Sequence[str]) -> dict[str, Tensor]:
    return {name: found.stored[name].whole() for name in names}


def _slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the part of a full tensor that this rank holds."""
    if is_divided(tensor):
        return local_slices(tensor)
    return tuple(slice(0, size) for size in tensor.shape)


def _read(stored: StoredTensor, slices: tuple[slice, ...], local: Tensor) -> None:
    """Read a part of a stored tensor into `local`, with its dtype and on its device."""
    same = local.dtype == stored.dtype and local.device.type == "cpu" and local.is_contiguous()
    if same and local.dim():
        stored.read(slices, local)
        local[:0].zero_()  # counts as a change for autograd and for caches of gathered parameters
        return
    for rows, part in _pieces(slices, local, stored.dtype):
        piece = torch.empty(part.shape, dtype=stored.dtype)
        stored.read(rows, piece)
        part.copy_(piece)


def _pieces(
    slices: tuple[slice, ...], local: Tensor, dtype: torch.dtype
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Return parts of `slices` with few bytes each, and their places in `local`."""
    if not slices:
        yield slices, local
        return
    first, *others = slices
    row = local[:1].numel() * dtype.itemsize
    for begin, end in blocks(first.start, first.stop, row):
        yield (slice(begin, end), *others), local[begin - first.start : end - first.start]

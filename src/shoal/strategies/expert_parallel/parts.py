"""The two forms of experts, and how a module computes with those of one rank, or with all.

The weights of experts are rows of stacked parameters, or each expert is a module in a ModuleList. In
both forms, each parameter is a DTensor that is split along its first dimension over the `expert` axis,
so that names, checkpoints and norms are those of any sharded model. A rank has the rows of its experts
of a stacked parameter. Of experts in a list, it has a slice of each, and exchanges slices for its own
experts before it computes.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.modules import children as children_of
from shoal._torch.modules import parameters as table_of
from shoal.strategies.dtensor import whole
from shoal.strategies.expert_parallel.exchange import Exchange

COUNT = "num_experts"
"""The attribute in which modules of transformers have the number of their experts."""


def number_of_experts(module: nn.Module) -> int:
    """Return the number of experts of a module, 0 for modules of another kind."""
    names = [*inspect.signature(type(module).forward).parameters]  # it may be replaced by ours
    if len(names) != 4 or "ind" not in names[2] or "weight" not in names[3]:
        return 0  # the names tell experts from an attention with one weight for all heads
    experts = experts_in(module)
    number = len(experts) if experts is not None else _rows(module)
    return number if getattr(module, COUNT, number) == number else 0


def experts_in(module: nn.Module) -> nn.ModuleList | None:
    """Return the list of the experts, if they are modules that have the same parameters."""
    lists = [part for part in (module, *module.children()) if isinstance(part, nn.ModuleList)]
    if len(lists) != 1 or not len(lists[0]):
        return None
    forms = [[(n, p.shape, p.dtype) for n, p in expert.named_parameters()] for expert in lists[0]]
    inside = sum(map(len, forms))
    alike = all(form == forms[0] and form for form in forms)
    sized = all(shape for form in forms for _, shape, _ in form) and len({f[2] for f in forms[0]}) == 1
    return lists[0] if alike and sized and inside == len(list(module.parameters())) else None


def _rows(module: nn.Module) -> int:
    held = list(module.parameters(recurse=False))
    sizes = {p.shape[0] if p.dim() > 1 else 0 for p in held}
    others = any(True for child in module.children() for _ in child.parameters())
    stacked = any(p.dim() == 3 for p in held) and len(sizes) == 1 and not others
    return sizes.pop() if stacked else 0


@contextmanager
def some_experts(
    module: nn.Module, exchange: Exchange, *, every: bool = False
) -> Iterator[list[Tensor]]:
    """Let a module compute with the experts of this rank, or `every` one; yields their weights."""
    if exchange.group is None:
        yield list(module.parameters())
        return
    experts = experts_in(module)
    number = number_of_experts(module)
    places: list[tuple[dict[str, Any], str]]
    if experts is None:
        places = [(table_of(module), key) for key, p in table_of(module).items() if p is not None]
        tensors = [whole(t[key]) if every else t[key].to_local() for t, key in places]
    else:
        own = range(number) if every else exchange.own(number)
        places = [place for expert in own for place in _places(experts[expert])]
        tensors = [whole(t[key]) for t, key in places] if every else _own(experts, exchange)
    kept = [table[key] for table, key in places]
    items = None if experts is None else OrderedDict(children_of(experts))
    try:
        if items is not None:
            children_of(experts).clear()  # type: ignore[arg-type] # a list
            chosen = [*items.values()][own.start : own.stop]
            children_of(experts).update((str(n), expert) for n, expert in enumerate(chosen))  # type: ignore[arg-type]
        for (table, key), tensor in zip(places, tensors, strict=True):
            table[key] = tensor
        if COUNT in vars(module):
            vars(module)[COUNT] = len(own) if items is not None else len(tensors[0])
        yield tensors
    finally:
        for (table, key), parameter in zip(places, kept, strict=True):
            table[key] = parameter
        if items is not None:
            children_of(experts).clear()  # type: ignore[arg-type]
            children_of(experts).update(items)  # type: ignore[arg-type]
        if COUNT in vars(module):
            vars(module)[COUNT] = number


def _places(expert: nn.Module) -> list[tuple[dict[str, Any], str]]:
    tables = (table_of(part) for part in expert.modules())
    return [(table, key) for table in tables for key, p in table.items() if p is not None]


def _own(experts: nn.ModuleList, exchange: Exchange) -> list[Tensor]:
    """Return the full parameters of this rank's experts, for the slices of all experts. Collective."""
    places = [_places(expert) for expert in experts]
    slices = [table[key].to_local().flatten() for some in places for table, key in some]
    shapes = [table[key].shape for table, key in places[0]]
    own = len(exchange.own(len(experts)))
    sizes = [[exchange.rows(s[0], rank) * s[1:].numel() for s in shapes] for rank in exchange.ranks]
    received = [own * sum(each) for each in sizes]
    sent = [own * sum(sizes[exchange.rank])] * len(sizes)
    parts = exchange(torch.cat(slices), sent, received).split(received)
    pieces = [part.view(own, -1).split(each, 1) for part, each in zip(parts, sizes, strict=True)]
    full = [
        torch.cat(one, 1).unflatten(1, s)
        for one, s in zip(zip(*pieces, strict=True), shapes, strict=True)
    ]
    return [each[expert] for expert in range(own) for each in full]

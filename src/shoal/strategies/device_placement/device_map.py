"""Assignment of modules to devices: by a map of names, or balanced by memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal._torch.modules import buffers, children, move_own_tensors, parameters
from shoal.strategies.held_parameters import first
from shoal.strategies.module_patterns import alike, find_units
from shoal.strategies.partition.stages import balanced
from shoal.util.errors import StepError


class DeviceSlot(NamedTuple):
    """A device. `number` distinguishes entries of the same device, such as the CPU listed twice."""

    device: torch.device
    number: int = 0


@dataclass
class ModulePart:
    """A module that is not split, or with `own` only the tensors outside its submodules."""

    name: str
    own: bool
    point: bool
    tensors: dict[int, int] = field(default_factory=dict)
    """The bytes of its parameters and buffers, by id."""


class HeldModules(NamedTuple):
    """Names of adjacent modules on a spot, names of modules tied to them, and all of their bytes."""

    names: list[str]
    tied: list[str]
    size: int

    def __str__(self) -> str:
        ends = dict.fromkeys((self.names[0], self.names[-1]))
        neighbours = " to ".join(name or "the model's direct parameters" for name in ends)
        tied = "".join(f" and {name}" for name in self.tied)
        return f"{neighbours}{tied}, {self.size / 2**20:.3g} MiB"


def assigned(
    model: nn.Module, entries: Mapping[str, DeviceSlot], given: str
) -> dict[nn.Module, DeviceSlot]:
    """Return the spot of each module in `entries` or inside one of them; the innermost entry decides.

    The keys of `entries` are names as in named_modules(), or patterns in which `*` stands for one part
    of a name. Modules without tensors are left out unless `entries` contains them, and run wherever
    their inputs are. Raises StepError, with `given` as the situation, for unknown names,
    contradictions, and parameters that belong to no spot or to two.
    """
    named = _named(model, entries, given)
    spots: dict[nn.Module, DeviceSlot] = {}
    names: dict[nn.Module, str] = {}

    def visit(name: str, module: nn.Module, inherited: DeviceSlot | None) -> None:
        spot = named.get(name, inherited)
        if spot is not None and (name in named or any(True for _ in _tensors(module))):
            if spots.setdefault(module, spot) != spot:
                raise _contradiction(given, f"{names[module]} and {name} are one module", spots[module])
            names.setdefault(module, name)
        for key, child in children(module).items():  # named_children leaves out second names
            if child is not None:
                visit(f"{name}.{key}".lstrip("."), child, spot)

    visit("", model, None)
    _check_tensors(model, spots, given)
    return spots


def balance(
    model: nn.Module, spots: Sequence[DeviceSlot], given: str
) -> tuple[dict[str, DeviceSlot], list[HeldModules]]:
    """Return entries for `assigned` that minimize the memory of the fullest spot, and the contents.

    Adjacent modules in the order of registration stay together. The model is split before and after
    its repeated blocks; without any, between the layers of its Sequentials, or else between its
    children. Modules that share a parameter are on the same spot.
    """
    pieces = list(_pieces(model))
    hosts, sizes = _hosts(pieces)
    atoms: list[list[int]] = []
    for number, piece in enumerate(pieces):
        if hosts[number] != number:
            continue
        before = pieces[atoms[-1][-1]] if atoms else None
        if before is None or piece.point or before.point:
            atoms.append([])
        atoms[-1].append(number)
    costs = [(str(number), float(sum(sizes[n] for n in atom))) for number, atom in enumerate(atoms)]
    try:
        begins = [0, *map(int, balanced(costs, len(spots))), len(atoms)]
    except ValueError:
        raise StepError(
            given=given,
            found=f"{len(spots)} devices, but only {len(atoms)} part(s) of {type(model).__name__} that "
            "can be on different devices",
            fix="use fewer devices, or pass a map: shoal.DevicePlacement({'encoder': 0, 'decoder': 1})",
        ) from None
    entries: dict[str, DeviceSlot] = {}
    held = []
    for spot, begin, end in zip(spots, begins, begins[1:], strict=False):
        mine = {number for atom in atoms[begin:end] for number in atom}
        names = [pieces[number].name for number in sorted(mine)]
        tied = [
            p.name
            for p, host in zip(pieces, hosts, strict=True)
            if host in mine and p.name not in names
        ]
        entries |= dict.fromkeys((*names, *tied), spot)
        held.append(HeldModules(names, tied, sum(sizes[number] for number in mine)))
    return entries, held


def place(model: nn.Module, spots: Mapping[nn.Module, DeviceSlot]) -> None:
    """Move the tensors of each module to its spot. Tied parameters stay tied."""
    if model in spots and len({spots.get(part, spots[model]) for part in model.modules()}) == 1:
        model.to(spots[model].device)
        return
    for part in model.children():
        place(part, spots)
    if model in spots:
        device = spots[model].device
        move_own_tensors(model, lambda tensor: tensor.to(device))


def _named(model: nn.Module, entries: Mapping[str, DeviceSlot], given: str) -> dict[str, DeviceSlot]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    named: dict[str, DeviceSlot] = {}
    for pattern, spot in entries.items():
        wanted = pattern.split(".")
        found = [name for name in names if alike(name.split("."), wanted)]
        if not found:
            near = get_close_matches(pattern, names) or [n for n, _ in model.named_children()]
            raise StepError(
                given=given,
                found=f"no module of {type(model).__name__} matches {pattern!r}",
                fix=f"use one of these: {', '.join(map(repr, near))}"
                if near
                else "use '' for the model itself, which has no submodules",
            )
        for name in found:
            if named.setdefault(name, spot) != spot:
                raise _contradiction(given, f"two entries of the map match {name!r}", named[name])
    return named


def _contradiction(given: str, found: str, spot: DeviceSlot) -> StepError:
    return StepError(
        given=given,
        found=f"{found}: one of them places it on {spot.device}, the other on another device",
        fix="map each module to one device; the entry of a submodule overrides its parent's entry",
    )


def _check_tensors(model: nn.Module, spots: Mapping[nn.Module, DeviceSlot], given: str) -> None:
    loose: list[str] = []
    known: dict[int, tuple[str, DeviceSlot]] = {}
    for name, module in model.named_modules():
        for key, tensor in _own(module):
            full = f"{name}.{key}".lstrip(".")
            if module not in spots:
                loose.append(full)
                continue
            other, spot = known.setdefault(id(tensor), (full, spots[module]))
            if spot != spots[module]:
                raise StepError(
                    given=given,
                    found=f"{other} and {full} are one tensor, placed on {spot.device} and on "
                    f"{spots[module].device}",
                    fix="put both modules on one device; hooks move the second module's inputs to it",
                )
    if loose:
        raise StepError(
            given=given,
            found=f"no entry of the map covers {first(loose)}",
            fix="add their modules, or add '': 0 for all other modules",
        )


def _pieces(model: nn.Module) -> Iterator[ModulePart]:
    points = set(_points(model))

    def visit(name: str, module: nn.Module) -> Iterator[ModulePart]:
        inside = any(part in points for part in module.modules() if part is not module)
        point = module in points
        whole = point or not inside
        tensors = _tensors(module) if whole else (tensor for _, tensor in _own(module))
        held = {id(tensor): tensor.nbytes for tensor in tensors}
        if held:
            yield ModulePart(name, own=not whole, point=point, tensors=held)
        if not whole:
            for key, child in module.named_children():
                yield from visit(f"{name}.{key}".lstrip("."), child)

    return visit("", model)


def _points(model: nn.Module) -> list[nn.Module]:
    """Return the modules before which a model may be split."""
    return find_units(model, None) or list(_layers(model)) or list(model.children())


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of the outermost Sequentials."""
    if isinstance(model, nn.Sequential):
        yield from model.children()
        return
    for part in model.children():
        yield from _layers(part)


def _hosts(pieces: Sequence[ModulePart]) -> tuple[list[int], list[int]]:
    """Return the piece with which each piece is placed, itself or an earlier one, and its bytes."""
    hosts, sizes = list(range(len(pieces))), [0] * len(pieces)
    holder: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        sharing = [holder[key] for key in piece.tensors if key in holder]
        hosts[number] = hosts[min(sharing)] if sharing else number
        for key, size in piece.tensors.items():
            sizes[hosts[number]] += 0 if key in holder else size
            holder.setdefault(key, number)
    return hosts, sizes


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    held = chain(parameters(module).items(), buffers(module).items())
    return ((key, tensor) for key, tensor in held if tensor is not None)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())

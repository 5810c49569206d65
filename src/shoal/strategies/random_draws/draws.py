"""Random draws in a forward pass, keyed by sample, position in the model and element.

A draw in the forward pass of a registered module belongs to a site: the innermost registered module
that is running, and the number of draws that it has made for this micro-batch. Of several models, the
first that draws for a micro-batch has number 0. Parts of a forward pass that are recomputed in backward
draw the same numbers: torch restores the state of its generator there, and each draw begins with one
number of that generator, its ticket.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import FrameType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoal._torch.graphs import has_no_values, in_backward, replace_attention, replace_draws
from shoal._torch.modules import compiled_module, module_called_in, order_of_packed
from shoal.data.micro import CURRENT_DRAWS, Drawing, Draws, MicroBatch
from shoal.strategies.random_draws import philox
from shoal.strategies.random_draws.layouts import Fit, Layouts, find_rows
from shoal.strategies.random_draws.operations import (
    CONSTANT,
    REPLACED,
    Constants,
    Numbers,
    attention,
)
from shoal.strategies.random_draws.row_index import batch_rows
from shoal.strategies.random_draws.slices import Slices, row_slice

T = TypeVar("T")
_STEPS = 1 << (philox.POSITION_BITS - 1)
"""Offset of the positions of draws that belong to a step and not to samples."""
_TICKETS = 1 << 62


class RegisteredModel:
    """A registered model: what is known of its draws."""

    def __init__(self, slices: Slices | None = None) -> None:
        self.layouts = Layouts()
        self.slices = slices
        """None if each rank has complete activations."""


_OUTSIDE = RegisteredModel()
"""Takes the place of the model for draws outside of all modules, in custom loops."""
_OUTSIDE_OF: WeakKeyDictionary[Any, RegisteredModel] = WeakKeyDictionary()
"""The same by Task, in whose functions the draws are."""


@dataclass
class DrawRows:
    """The rows of one draw, along a dimension: each has `each` of its elements."""

    dim: int
    each: int

    def kept(self, limit: float, sizes: list[int]) -> Tensor:
        """Return for each element of rows of these sizes whether its number is below `limit`."""
        raise NotImplementedError

    def numbers(self, sizes: list[int], dtype: torch.dtype, number: int) -> Tensor:
        """Return a number in [0, 1) for each element of rows of these sizes."""
        raise NotImplementedError

    def below(self, limit: float, tensor: Tensor) -> Tensor:
        """Return for each element of `tensor` whether its number is below `limit`."""
        return self._like(self.kept(limit, self._sizes(tensor)), tensor)

    def uniform(self, tensor: Tensor, dtype: torch.dtype | None = None, each: int = 1) -> Tensor:
        """Return numbers in [0, 1): `each` of them per element, in a last dimension if not 1."""
        sizes = self._sizes(tensor)
        found = [
            self._like(self.numbers(sizes, dtype or tensor.dtype, number), tensor)
            for number in range(each)
        ]
        return found[0] if each == 1 else torch.stack(found, -1)

    def _sizes(self, tensor: Tensor) -> list[int]:
        """Return the sizes of a row."""
        sizes = list(tensor.shape)
        del sizes[self.dim : self.dim + 1]
        return sizes if self.each == 1 else [self.each, *sizes]

    def _like(self, rows: Tensor, tensor: Tensor) -> Tensor:
        """Return the numbers of the rows in the shape of `tensor`."""
        shape = list(tensor.shape)
        if not shape:
            return rows.reshape(())
        return rows.reshape(shape.pop(self.dim), *shape).movedim(0, self.dim)


@dataclass
class _Site(DrawRows):
    """The rows of one draw, their key, and the slice of each row."""

    key: philox.Key
    rows: philox.Rows
    device: torch.device
    part: philox.Slice | None = None

    def kept(self, limit: float, sizes: list[int]) -> Tensor:
        """Return for each element of rows of these sizes whether its number is below `limit`."""
        part = self.part or philox.complete(sizes)
        return philox.below(limit, self.key, self.rows, part, self.device)

    def numbers(self, sizes: list[int], dtype: torch.dtype, number: int) -> Tensor:
        """Return a number in [0, 1) for each element of rows of these sizes."""
        part = self.part or philox.complete(sizes)
        return philox.uniform(self.key, self.rows, part, self.device, dtype, number)


_MODULES: WeakKeyDictionary[nn.Module, tuple[RegisteredModel, str]] = WeakKeyDictionary()
"""The model and the name of each module of the registered models."""
_NO_TICKET = object()


@dataclass
class _Record:
    """The draws of a step so far: the results by ticket, and whether backward made draws of its own."""

    tickets: dict[int, Any] = field(default_factory=dict)
    in_backward: bool = False


_record = _Record()


def register(model: nn.Module, *, split: bool = False) -> None:
    """Key the draws of a model's modules by samples. With `split`, once its slices are known."""
    _intercept()
    registered = RegisteredModel(Slices() if split else None)
    for name, module in model.named_modules():
        _MODULES[module] = registered, name


def adopt(model: nn.Module, module: nn.Module, name: str = "") -> None:
    """Key the draws of `module` as those of the module `name` of a registered model.

    It runs in the place of that module. Does nothing for a model that is not registered.
    """
    if model in _MODULES:
        _MODULES[module] = _MODULES[model][0], name


def name_of(module: nn.Module) -> str | None:
    """Return the name of a module in its registered model; None if it is in none."""
    return _MODULES[module][1] if module in _MODULES else None


@cache
def _intercept() -> None:
    """Replace torch's random operations, once in a process."""
    replaced = {name: partial(call, _numbers) for name, call in REPLACED.items()}
    if replace_draws({**replaced, "_pack_padded_sequence": _pack}):
        replace_attention(partial(attention, _is_drawing))


def _pack(original: Callable[[], Any], *_: Any) -> Any:
    """Pack padded sequences, and note to which samples the packed rows belong."""
    data, sizes = original()
    draws = CURRENT_DRAWS.get()
    if draws is not None and not has_no_values(data):
        batch_rows(draws).add_packed(sizes, order_of_packed(sys._getframe()))
    return data, sizes


def layouts_of(model: nn.Module) -> Layouts:
    """Return what is known of the draws of a registered model."""
    return _MODULES[model][0].layouts


def task_layouts(task: Any) -> Layouts:
    """Return what is known of the draws in the functions of a Task."""
    return _OUTSIDE_OF.setdefault(task, RegisteredModel()).layouts


def slices_of(model: nn.Module) -> Slices | None:
    """Return the slices that this rank draws for a model; None if it has complete activations."""
    return _MODULES[model][0].slices if model in _MODULES else None


def names_of(model: RegisteredModel) -> dict[int, str]:
    """Return the names of the modules of a model, by their `id`."""
    return {id(module): name for module, (owner, name) in _MODULES.items() if owner is model}


def is_registered(module: nn.Module) -> bool:
    """Return whether the draws of a module are to belong to samples."""
    return module in _MODULES


def draws_of_another_pass() -> Drawing:
    """Count the draws inside separately, for another forward pass of the current micro-batch."""
    now = CURRENT_DRAWS.get()
    return Drawing(now and Draws(now.micro, now.seed, now.scope, now.owner))


@contextmanager
def constant_draws() -> Iterator[None]:
    """Draw constants inside, in all modules, to compare models that would draw different numbers."""
    _intercept()
    token = CONSTANT.set(True)
    try:
        yield
    finally:
        CONSTANT.reset(token)


def forget() -> bool:
    """Drop the record of the draws of a step, whose backward has ended.

    Return whether backward made draws of its own, as hooks of gradients and autograd functions may.
    """
    found = _record.in_backward
    _record.tickets.clear()
    _record.in_backward = False
    return found


def _numbers(tensor: Tensor, generator: torch.Generator | None, **options: bool) -> Numbers | None:
    """Return the numbers of a draw: constants, or those of its site, with the options of `_site`."""
    if CONSTANT.get() and not has_no_values(tensor):
        return Constants()
    return _site(tensor, generator, **options)


def _site(tensor: Tensor, generator: torch.Generator | None, *, of_step: bool = False) -> _Site | None:
    """Return the site of a draw for `tensor`, or None if torch draws.

    A draw `of_step` belongs to no sample, regardless of its shape.
    """
    if generator is not None or has_no_values(tensor):  # DTensors find shapes with meta tensors
        return None
    return first_time(partial(_new_site, tensor, of_step))


def _new_site(tensor: Tensor, of_step: bool) -> tuple[_Site | None] | None:
    """Return the site of a draw that is not recomputed: (None,) if it is counted and torch draws."""
    draws = CURRENT_DRAWS.get()
    found = None if draws is None else running_module()
    if draws is None or found is None:
        return None
    model, module, trains = found
    name, key = next_draw(draws, model, module)
    if not tensor.numel():  # a slice may be empty; the next draw has the same number on all ranks
        return (None,)
    micro, slices = draws.micro, model.slices
    fit, index = None, None
    if of_step:
        if trains:
            model.layouts.add_of_step(name, tensor.shape[0], micro.samples)
    else:  # in eval mode, a module may draw less often, and the same number may be another draw
        known = model.layouts if trains and not (slices and slices.is_whole) else Layouts()
        fit, index = find_rows(known, name, tensor.shape, batch_rows(draws))
    part = None
    if slices is not None:
        if trains:
            fit = slices.record(name, tensor.shape, fit)
        drawn = slices.part(name, tensor.shape) if trains else None
        if drawn is None:
            slices.by_rank.add(module or "the model")
            return (None,)
        part = row_slice(drawn, fit, micro.samples)
        if index is None and fit and not fit[1]:
            index = batch_rows(draws).index(tensor.shape[fit[0]])
    first = first_position(micro, fit)
    if fit is None:
        size = tensor.shape[0] if tensor.ndim else 1
        return (_Site(0, size, key, philox.Rows(first, 1), tensor.device, part),)
    dim, rows = fit[0], micro.samples if index is None else tensor.shape[fit[0]]
    each = tensor.shape[dim] // rows
    return (_Site(dim, each, key, philox.Rows(first, rows, index), tensor.device, part),)


def next_draw(draws: Draws, model: RegisteredModel, module: str) -> tuple[str, philox.Key]:
    """Count a draw of a module, and return the name of its site and its key."""
    number = draws.models.setdefault(model, len(draws.models))
    made = draws.made.get((number, module), 0)
    draws.made[number, module] = made + 1
    name = f"{draws.scope}{module}#{made}"
    return name, philox.site_key(draws.seed, f"{number} {name}")


def first_position(micro: MicroBatch, fit: Fit | None) -> int:
    """Return the position of the first row of a draw; without a sample dimension, that of the step."""
    return micro.first if fit is not None else _STEPS + micro.batch_first


def first_time(make: Callable[[], tuple[T | None] | None]) -> T | None:
    """Return the result of `make`, or in backward that of the forward pass, part of which runs again.

    `make` returns None for a draw that is not counted.
    """
    if in_backward():
        found = _record.tickets.get(_ticket(), _NO_TICKET) if _record.tickets else _NO_TICKET
        if found is not _NO_TICKET:
            return cast(T | None, found)
        _record.in_backward |= running_module() is not None
        return None
    made = make()
    if made is None:
        return None
    _record.tickets[_ticket()] = made[0]
    return made[0]


def _is_drawing() -> bool:
    """Return whether the numbers of a draw that happened now would belong to samples."""
    if CONSTANT.get() or (_record.tickets and in_backward()):
        return True
    return CURRENT_DRAWS.get() is not None and running_module() is not None


def _ticket() -> int:
    return int(torch.randint(_TICKETS, (), generator=torch.default_generator))


def running_module() -> tuple[RegisteredModel, str, bool] | None:
    """Return the model, the name and the mode of the innermost registered module that is running.

    The name is empty outside of all modules. Return None inside modules none of which is registered.
    """
    inside = False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = module_called_in(frame)
        if module is not None:
            module = compiled_module(module) or module
            found = _MODULES.get(module)
            if found is not None:
                return *found, module.training
            inside = True
        frame = frame.f_back
    return None if inside else (_outside(), "", True)


def _outside() -> RegisteredModel:
    draws = CURRENT_DRAWS.get()
    if draws is None or draws.owner is None:
        return _OUTSIDE
    return _OUTSIDE_OF.setdefault(draws.owner, RegisteredModel())


def unknown_lines(model: nn.Module) -> Iterator[str]:
    """Yield the reasons for which draws do not belong to samples that were not yielded before.

    Those of the functions of a Task count for the model that asks first.
    """
    yield from layouts_of(model).unknown.take_lines("the model")
    for outside in (_OUTSIDE, *_OUTSIDE_OF.values()):
        yield from outside.layouts.unknown.take_lines("code outside the model")

"""Random draws in a forward pass, keyed by sample, position in the model and element.

A draw in the forward pass of a registered module belongs to a site: the innermost registered module
that is running, and the number of draws that it has made for this micro-batch. Of several models, the
first that draws for a micro-batch has number 0. Parts of a forward pass that are recomputed in backward
draw the same numbers: torch restores the state of its generator there, and each draw begins with one
number of that generator, its ticket.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoal._torch.modules import module_called_in
from shoal._torch.random_operations import in_backward, replace_attention, replace_draws
from shoal.data.micro import CURRENT_DRAWS
from shoal.strategies.random_draws import philox
from shoal.strategies.random_draws.layouts import Layouts, sample_dimension
from shoal.strategies.random_draws.operations import REPLACED, attention

_STEPS = 1 << 62
"""Offset of the positions of draws that belong to a step and not to samples."""
_TICKETS = 1 << 62


class _Model:
    """A registered model: what is known of its draws."""

    def __init__(self) -> None:
        self.layouts = Layouts()


_OUTSIDE = _Model()
"""Takes the place of the model for draws outside of all modules, such as those of a loss function."""


@dataclass
class _Site:
    """The rows of one draw: the key, the first position, their number and their dimension."""

    key: philox.Key
    first: int
    rows: int
    dim: int

    def below(self, limit: float, tensor: Tensor) -> Tensor:
        """Return for each element of `tensor` whether its number is below `limit`."""
        count = tensor.numel() // self.rows
        found = philox.below(limit, self.key, self.first, self.rows, count, tensor.device)
        return self._like(found, tensor)

    def uniform(self, tensor: Tensor, dtype: torch.dtype | None = None, each: int = 1) -> Tensor:
        """Return numbers in [0, 1): `each` of them per element, in a last dimension if not 1."""
        count = each * tensor.numel() // self.rows
        dtype = dtype or tensor.dtype
        found = philox.uniform(self.key, self.first, self.rows, count, tensor.device, dtype)
        if each == 1:
            return self._like(found, tensor)
        parts = found.reshape(self.rows, count // each, each)
        return torch.stack([self._like(parts[..., i], tensor) for i in range(each)], -1)

    def _like(self, rows: Tensor, tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if not shape:
            return rows.reshape(())
        return rows.reshape(shape.pop(self.dim), *shape).movedim(0, self.dim)


_MODULES: WeakKeyDictionary[nn.Module, tuple[_Model, str]] = WeakKeyDictionary()
"""The model and the name of each module of the registered models."""
_tickets: dict[int, _Site] = {}


def register(model: nn.Module) -> None:
    """Key the draws of a model's modules by samples."""
    _intercept()
    registered = _Model()
    for name, module in model.named_modules():
        _MODULES[module] = registered, name


@cache
def _intercept() -> None:
    """Replace torch's random operations, once in a process."""
    if replace_draws({name: partial(call, _site) for name, call in REPLACED.items()}):
        replace_attention(partial(attention, _is_drawing))


def layouts_of(model: nn.Module) -> Layouts:
    """Return what is known of the draws of a registered model."""
    return _MODULES[model][0].layouts


def is_keyed(module: nn.Module) -> bool:
    """Return whether the draws of a module belong to samples."""
    return module in _MODULES


def forget() -> None:
    """Drop the record of the draws of a step, whose backward has ended."""
    _tickets.clear()


def _site(tensor: Tensor, generator: torch.Generator | None, *, of_step: bool = False) -> _Site | None:
    """Return the site of a draw for `tensor`, or None if torch draws.

    A draw `of_step` belongs to no sample, regardless of its shape.
    """
    if generator is not None or not tensor.numel():
        return None
    if _tickets and in_backward():
        return _tickets.get(_ticket())
    draws = CURRENT_DRAWS.get()
    if draws is None:
        return None
    found = _innermost()
    if found is None:
        return None
    model, module, trains = found
    number = draws.models.setdefault(model, len(draws.models))
    name = f"{draws.scope}{module}#{draws.made[model, module]}"
    draws.made[model, module] += 1
    micro = draws.micro
    key = philox.site_key(draws.seed, f"{number} {name}")
    if of_step:
        dim = None
    else:  # in eval mode, a module may draw less often, and the same number may be another draw
        known = model.layouts if trains else Layouts()
        dim = sample_dimension(known, name, tensor.shape, micro.samples)
    if dim is None:
        site = _Site(key, _STEPS + micro.batch_first, 1, 0)
    else:
        site = _Site(key, micro.first, micro.samples, dim)
    _tickets[_ticket()] = site
    return site


def _is_drawing() -> bool:
    """Return whether the numbers of a draw that happened now would belong to samples."""
    if _tickets and in_backward():
        return True
    return CURRENT_DRAWS.get() is not None and _innermost() is not None


def _ticket() -> int:
    return int(torch.randint(_TICKETS, (), generator=torch.default_generator))


def _innermost() -> tuple[_Model, str, bool] | None:
    """Return the model, the name and the mode of the innermost registered module that is running.

    The name is empty outside of all modules. Return None inside modules none of which is registered.
    """
    inside = False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = module_called_in(frame)
        if module is not None:
            found = _MODULES.get(module)
            if found is not None:
                return *found, module.training
            inside = True
        frame = frame.f_back
    return None if inside else (_OUTSIDE, "", True)

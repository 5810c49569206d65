"""Random draws in a forward pass, keyed by sample, position in the model and element.

A draw in the forward pass of a registered module belongs to a site: the innermost registered module
that is running, and the number of draws that it has made for this micro-batch. Of several models, the
first that draws for a micro-batch has number 0. Parts of a forward pass that are recomputed in backward
draw the same numbers: torch restores the state of its generator there, and each draw begins with one
number of that generator, its ticket.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoal._torch.modules import module_called_in
from shoal._torch.random_operations import in_backward, replace_draws
from shoal.data.micro import CURRENT_DRAWS
from shoal.strategies.random_draws import philox
from shoal.strategies.random_draws.layouts import Layouts

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
        if self.dim == 0:
            return rows.reshape(tensor.shape)
        shape = tensor.shape
        return rows.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)


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
    replace_draws(_REPLACED)


def layouts_of(model: nn.Module) -> Layouts:
    """Return what is known of the draws of a registered model."""
    return _MODULES[model][0].layouts


def is_keyed(module: nn.Module) -> bool:
    """Return whether the draws of a module belong to samples."""
    return module in _MODULES


def forget() -> None:
    """Drop the record of the draws of a step, whose backward has ended."""
    _tickets.clear()


def _site(tensor: Tensor, generator: torch.Generator | None) -> _Site | None:
    """Return the site of a draw for `tensor`, or None if torch draws."""
    if generator is not None or not tensor.numel():
        return None
    draws = CURRENT_DRAWS.get()
    if draws is None:
        return _tickets.get(_ticket()) if _tickets and in_backward() else None
    found = _innermost()
    if found is None:
        return None
    model, module = found
    number = draws.models.setdefault(model, len(draws.models))
    name = f"{draws.scope}{module}#{draws.made[found]}"
    draws.made[found] += 1
    micro = draws.micro
    key = philox.site_key(draws.seed, f"{number} {name}")
    dim = model.layouts.dimension(name, tensor.shape, micro.samples)
    if dim is None:
        site = _Site(key, _STEPS + micro.batch_first, 1, 0)
    else:
        site = _Site(key, micro.first, micro.samples, dim)
    _tickets[_ticket()] = site
    return site


def _ticket() -> int:
    return int(torch.randint(_TICKETS, (), generator=torch.default_generator))


def _innermost() -> tuple[_Model, str] | None:
    """Return the model and the name of the innermost registered module that is running.

    The name is empty outside of all modules. Return None inside modules none of which is registered.
    """
    inside = False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = module_called_in(frame)
        if module is not None:
            found = _MODULES.get(module)
            if found is not None:
                return found
            inside = True
        frame = frame.f_back
    return None if inside else (_OUTSIDE, "")


def _bernoulli_(
    original: Callable[[], Tensor], tensor: Tensor, p: Any = 0.5, *, generator: Any = None
) -> Tensor:
    site = _site(tensor, generator)
    if site is None:
        return original()
    if isinstance(p, Tensor):
        p = p.to(tensor.device)
        return tensor.copy_(site.uniform(tensor, p.dtype) < p)
    return tensor.copy_(site.below(p, tensor))


def _uniform_(
    original: Callable[[], Tensor],
    tensor: Tensor,
    low: float = 0.0,
    high: float = 1.0,
    *,
    generator: Any = None,
) -> Tensor:
    site = _site(tensor, generator)
    if site is None:
        return original()
    return tensor.copy_(site.uniform(tensor).mul_(high - low).add_(low))


def _normal_(
    original: Callable[[], Tensor],
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    generator: Any = None,
) -> Tensor:
    """Box and Muller 1958, one number from two."""
    site = _site(tensor, generator)
    if site is None:
        return original()
    first, second = site.uniform(tensor, each=2).unbind(-1)
    radius = torch.log1p(-first).mul_(-2).sqrt_()
    return tensor.copy_(torch.cos(second * (2 * torch.pi)).mul_(radius).mul_(std).add_(mean))


def _exponential_(
    original: Callable[[], Tensor], tensor: Tensor, rate: float = 1.0, *, generator: Any = None
) -> Tensor:
    site = _site(tensor, generator)
    if site is None:
        return original()
    found = torch.log1p(-site.uniform(tensor)).neg_()
    least = 2.0**-54 if found.dtype == torch.float64 else 2.0**-25  # never 0, as torch promises
    return tensor.copy_(found.clamp_(min=least).div_(rate))


def _random_(
    original: Callable[[], Tensor], tensor: Tensor, *bounds: int | None, generator: Any = None
) -> Tensor:
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    if low is None or high is None:
        return original()
    site = _site(tensor, generator)
    if site is None:
        return original()
    return tensor.copy_(site.uniform(tensor, torch.float64).mul_(high - low).floor_().add_(low))


def _native_dropout(
    original: Callable[[], Any], tensor: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    site = _site(tensor, None) if train is not False else None
    if site is None:
        return original()  # type: ignore[no-any-return]
    mask = site.below(1 - p, tensor)
    return tensor * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _rrelu_with_noise(
    original: Callable[[], Tensor],
    tensor: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Tensor:
    site = _site(tensor, generator) if training else None
    if site is None:
        return original()
    slope = site.uniform(tensor).mul_(upper - lower).add_(lower).to(tensor.dtype)
    noise.copy_(torch.where(tensor <= 0, slope, 1.0))
    return tensor * noise


_REPLACED: dict[str, Callable[..., Any]] = {
    "bernoulli_.float": _bernoulli_,
    "bernoulli_.Tensor": _bernoulli_,
    "uniform_": _uniform_,
    "normal_": _normal_,
    "exponential_": _exponential_,
    "random_.from": _random_,
    "random_.to": _random_,
    "native_dropout": _native_dropout,
    "rrelu_with_noise": _rrelu_with_noise,
}

"""Random operations in graphs of torch's compiler, computed from a table of keys and positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from shoal._torch.dispatch import TorchDispatchMode
from shoal._torch.graphs import generate_loop
from shoal.strategies.random_draws import philox
from shoal.strategies.random_draws.draws import DrawRows
from shoal.strategies.random_draws.operations import REPLACED, SiteOf


@dataclass
class TableRows(DrawRows):
    """The rows of a draw whose key and first position are a row of a table."""

    table: Tensor
    row: int

    def below(self, limit: float, tensor: Tensor) -> Tensor:
        """Return for each element of `tensor` whether its number is below `limit`."""
        count = tensor.numel() // self.rows
        found: Tensor = _below(self.table, self.row, limit, self.rows, -(-count // 4))
        return self.like(found.view(torch.bool)[:, :count], tensor)

    def numbers(self, tensor: Tensor, count: int, each: int, dtype: torch.dtype) -> Tensor:
        """Return `count` numbers in [0, 1) for each row, `each` of them for each element."""
        found: Tensor = _uniform(self.table, self.row, dtype == torch.float64, self.rows, count)
        return found


@torch.library.custom_op("shoal::below", mutates_args=())
def _below(table: Tensor, row: int, limit: float, rows: int, blocks: int) -> Tensor:
    """Return four results of `philox.below` in the bytes of each int32, which one loop can compute."""
    key, first = _entry(table, row)
    return philox.below(limit, key, first, rows, 4 * blocks, table.device).view(torch.int32)


@torch.library.custom_op("shoal::uniform", mutates_args=())
def _uniform(table: Tensor, row: int, double: bool, rows: int, count: int) -> Tensor:
    key, first = _entry(table, row)
    dtype = torch.float64 if double else torch.float32
    return philox.uniform(key, first, rows, count, table.device, dtype).contiguous()


@_below.register_fake
def _(table: Tensor, row: int, limit: float, rows: int, blocks: int) -> Tensor:
    return table.new_empty((rows, blocks), dtype=torch.int32)


@_uniform.register_fake
def _(table: Tensor, row: int, double: bool, rows: int, count: int) -> Tensor:
    return table.new_empty((rows, count), dtype=torch.float64 if double else torch.float32)


def _entry(table: Tensor, row: int) -> tuple[philox.Key, philox.Word]:
    entry = table[row]
    first, second, position = entry.tolist() if entry.device.type == "cpu" else entry.unbind()
    return (first, second), position


@cache
def generate_loops() -> None:
    """Let inductor compute the numbers in its loops, once in a process."""
    operations = torch.ops.shoal
    generate_loop(operations.below.default, _packed_element, lambda limit: (torch.int32, 1))
    dtypes = (torch.float32, torch.float64)
    generate_loop(
        operations.uniform.default,
        _uniform_element,
        lambda double: (dtypes[double], philox.UNITS[double]),
    )


def _packed_element(entry: Any, row: Any, block: Any, limit: float) -> Any:
    *key, first = entry
    return philox.packed(philox.words_of((key[0], key[1]), row + first, block), limit)


def _uniform_element(entry: Any, row: Any, column: Any, double: bool) -> Any:
    *key, first = entry
    words = philox.words_of((key[0], key[1]), row + first, column >> (1 if double else 2))
    return philox.chosen(philox.integers(words, double=double), column)


_NEED_VALUES = (
    "binomial",
    "multinomial",
    "multinomial.out",
    "poisson",
    "_sample_dirichlet",
    "_standard_gamma",
)
"""Operations whose numbers need loops or values that a graph does not have."""


class ReplacedDraws(TorchDispatchMode):
    """Computes random operations from the numbers of sites, as the dispatcher does in eager mode."""

    def __init__(self, site_of: SiteOf, unreached: list[str]) -> None:
        super().__init__()
        self._site_of, self._unreached = site_of, unreached

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        original = partial(operation, *arguments, **named)
        if (
            torch.Tag.nondeterministic_seeded not in operation.tags
            or named.get("generator") is not None
        ):
            return original()
        name = operation.name().removeprefix("aten::")
        if name in _CREATED:
            given = {key: value for key, value in named.items() if value is not None}
            with self:
                return _CREATED[name](*arguments, **given)
        if name == "randperm":
            found = original()
            site = self._site_of(found, None, of_step=True)
            if site is None:
                return found
            return site.uniform(found, torch.float64).argsort().to(found.dtype)
        if name not in REPLACED or name in _NEED_VALUES or _is_complex(arguments):
            self._unreached.append(name)
            return original()
        return REPLACED[name](self._site_of, original, *arguments, **named)


def _is_complex(arguments: tuple[Any, ...]) -> bool:
    """Return whether an operation would call another one for the real and imaginary parts."""
    return any(isinstance(each, Tensor) and each.is_complex() for each in arguments)


def _filled(create: Callable[..., Tensor], fill: str, bounds: int = 0) -> Callable[..., Tensor]:
    """Return an operation that creates a tensor and fills it; its first arguments are the bounds."""

    def made(*arguments: Any, **options: Any) -> Tensor:
        tensor = create(*arguments[bounds:], **options)
        found: Tensor = getattr(tensor, fill)(*arguments[:bounds])
        return found

    return made


def _integers(create: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
    """Return an operation that draws integers below its last argument, without that in `place`."""

    def made(*arguments: Any, **options: Any) -> Tensor:
        shape = arguments[place]
        bounds = [each for number, each in enumerate(arguments) if number != place % len(arguments)]
        if create is torch.empty:
            options.setdefault("dtype", torch.int64)
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])
        return create(shape, **options).random_(low, high)

    return made


def _bernoulli(p: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(p).bernoulli_(p)


def _bernoulli_like(tensor: Tensor, p: float, **_: Any) -> Tensor:
    return torch.empty_like(tensor).bernoulli_(p)


_CREATED: dict[str, Callable[..., Tensor]] = {
    "rand": _filled(torch.empty, "uniform_"),
    "rand_like": _filled(torch.empty_like, "uniform_"),
    "randn": _filled(torch.empty, "normal_"),
    "randn_like": _filled(torch.empty_like, "normal_"),
    "randint": _integers(torch.empty, -1),
    "randint.low": _integers(torch.empty, -1),
    "randint_like": _integers(torch.empty_like, 0),
    "randint_like.low_dtype": _integers(torch.empty_like, 0),
    "bernoulli": _bernoulli,
    "bernoulli.p": _bernoulli_like,
}
"""Operations that create their result: in eager mode they call one of `REPLACED`."""

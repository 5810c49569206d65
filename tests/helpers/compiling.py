"""torch.compile with another backend than inductor, for steps with `compile=…`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shoal.strategies.random_draws.graphs import keyed_backend

_COMPILE = torch.compile


def compiler_with(name: str) -> Callable[..., Any]:
    """A torch.compile that takes the backend `name` in place of inductor."""
    return partial(_compile, name)


def _compile(name: str, *arguments: Any, backend: Any = "inductor", **options: Any) -> Any:
    found = keyed_backend(name) if backend is keyed_backend() else name
    return _COMPILE(*arguments, backend=found, **options)


def counting() -> dict[str, int]:
    """Numbers of dynamo, "unique_graphs" among them, from now on."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    stats: dict[str, int] = counters["stats"]
    return stats

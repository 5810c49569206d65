"""What ranks compute, compared with one process, and what they refuse, all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any

import pytest
import torch

import shoal
from helpers.ranks import RankError, Ranks


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `function(world, *arguments)` in one process."""
    torch.manual_seed(2**62)  # no seed of a call before, which init would keep
    with shoal.init() as world:
        return function(world, *arguments)


def check_like_one(
    ranks: Ranks, function: Callable[..., Any], strategy: Any, *arguments: Any, rel: float = 1e-12
) -> None:
    """All ranks compute with a strategy what one process computes without."""
    expected = alone(function, None, *arguments)
    for found in ranks.call(function, strategy, *arguments):
        assert found == pytest.approx(expected, rel=rel)


def check_refused(
    ranks: Ranks,
    words: str | Sequence[str],
    function: Callable[..., Any],
    *arguments: Any,
    kind: type[shoal.ShoalError] | UnionType = shoal.StepError,
) -> None:
    """All ranks raise an error of this kind that says these words."""
    for found in ranks.attempt(function, *arguments):
        assert isinstance(found, RankError), found
        assert isinstance(found.error, kind), found.text
        for word in [words] if isinstance(words, str) else words:
            assert word in str(found.error)

"""Trainings on the ranks of one launch, one world after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import shoal
from helpers.reference import SEED, Row, Trained, train


def train_all(backend: str, ways: Sequence[tuple[str, Row, Any]], steps: int) -> list[Trained]:
    """What this rank trained, for each (layout, row, strategy)."""
    torch.set_num_threads(1)
    trained = []
    for layout, row, strategy in ways:
        with shoal.init(layout=layout, backend=backend, seed=SEED, timeout=100) as world:
            trained.append(train(world, row, "", strategy, steps))
    return trained

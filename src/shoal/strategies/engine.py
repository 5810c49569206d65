"""The base of engines with a gradient reducer.

Such an engine runs the forward and backward passes of the micro-batches: locally (local.py), as a
pipeline (pipeline/engine.py) or over RPC (rpc_pipeline/engine.py). Its *reducer* turns the gradients of
this rank into those of the global batch (reducer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.strategies.contracts import Engine
from shoal.strategies.correction import Factor
from shoal.strategies.loop_gradients import CheckedGradients
from shoal.strategies.reducer import Reducer


class ReducerEngine(Engine):
    """Engine that passes the losses or gradients of the micro-batches to a reducer.

    A custom training loop can use it if it may run the model in its place: if `loopable`.
    """

    loopable: bool = False

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.held = reducer.held
        self.module = reducer.held.module
        self.world = reducer.held.world
        self.reports_loss = reducer.reports_loss
        self.waits_because = reducer.waits_because
        if self.loopable:
            self.loop = CheckedGradients(reducer)

    def update(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        """Multiply, step, clear; see the contract."""
        try:
            self.reducer.multiply(factor)
            optimizer.step()
        finally:
            self.reducer.discard()  # a caller that catches an error continues with the next batch

    def discard(self) -> None:
        """Clear the gradients, and drop the sums recorded for their batch."""
        self.reducer.discard()

    def synchronize(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Settle the last step and synchronize the reducer; see the contract."""
        self.settle()
        self.reducer.synchronize()

    def state(self) -> dict[str, Any]:
        """Return the state of the reducer; see the contract."""
        return self.reducer.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the reducer; see the contract."""
        self.reducer.load_state(state)

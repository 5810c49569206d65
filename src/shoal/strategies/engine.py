"""The engine of synchronous training: a runner and a gradient reducer.

The *runner* says how forward and backward of the micro-batches run: here (local.py), as a pipeline
(pipeline/runner.py) or over RPC (rpc_pipeline/runner.py). The *reducer* says how gradients become those
of the global batch (reducer.py). Any of the first goes with what of the second its layout needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from shoal.data.batch import Batch
from shoal.data.micro import Micro
from shoal.strategies.compiled import Compiler
from shoal.strategies.contracts import Engine, Totals, compiles_parts
from shoal.strategies.loop_gradients import CheckedGradients
from shoal.strategies.reducer import Reducer
from shoal.strategies.task import Task


class Runner(ABC):
    """Runs the micro-batches of a batch, and hands their losses or gradients to a reducer.

    Its methods are those of an Engine; see there.
    """

    reducer: Reducer
    loopable: bool = False
    """Whether the user's own loop may run the model in its place."""
    noise_stream: str = "noise"
    flops_unknown: str = ""

    @abstractmethod
    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Run forward and backward of the whole batch; return the reducer's totals. Collective."""

    @abstractmethod
    def infer(self, task: Task, micro: Micro, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the model's output on one micro-batch. Collective."""

    @abstractmethod
    def compile(self, how: str) -> None:
        """Run the forward compiled: "inductor" or "script"."""

    def compile_with(self, compiler: Compiler) -> None:
        """Run the forward compiled by `compiler`; StepError where only parts of it can be compiled."""
        raise compiles_parts(self.reducer.held.module, self.reducer.held.world)

    def move_targets(self, output: Any, micro: Micro) -> Micro:
        """Return the micro-batch on the device of the output."""
        return micro

    def check_model(self) -> None:  # noqa: B027 - most run the model as it is
        """Check once, where the model was changed, that it computes what it did. Collective."""


class SynchronousEngine(Engine):
    """All ranks take each step together: a runner computes gradients, a reducer makes them global."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.reducer = runner.reducer
        self.module = runner.reducer.held.module
        self.world = runner.reducer.held.world
        self.reports_loss = runner.reducer.reports_loss
        self.noise_stream = runner.noise_stream
        self.flops_unknown = runner.flops_unknown
        if runner.loopable:
            self.loop = CheckedGradients(runner.reducer, runner.check_model)

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Let the runner run the batch; see the contract."""
        return self.runner.gradients(task, batch, autocast=autocast, scale=scale)

    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply, step, clear; see the contract."""
        try:
            self.reducer.check_optimizer(optimizer)
            self.reducer.multiply(factor)
            optimizer.step()
        finally:
            self.reducer.discard()  # a caller that catches an error goes on with the next batch

    def discard(self) -> None:
        """Drop the gradients, and what was recorded of the batch that they are of."""
        self.reducer.discard()

    def infer(self, task: Task, micro: Micro, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output of the module as it stands; the caller has chosen mode and no_grad."""
        return self.runner.infer(task, micro, seed, autocast=autocast)

    def move_targets(self, output: Any, micro: Micro) -> Micro:
        """Return the micro-batch on the device of the output; see the contract."""
        return self.runner.move_targets(output, micro)

    def compile(self, how: str) -> None:
        """Run the forward compiled; see the contract."""
        self.runner.compile(how)

    def compile_with(self, compiler: Compiler) -> None:
        """Run the forward compiled by `compiler`; see the contract."""
        self.runner.compile_with(compiler)

    def synchronize(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Let the reducer make the same what differs between ranks; see the contract."""
        self.reducer.synchronize()

    def state(self) -> dict[str, Any]:
        """Return what the reducer keeps; see the contract."""
        return self.reducer.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what the reducer kept; see the contract."""
        self.reducer.load_state(state)

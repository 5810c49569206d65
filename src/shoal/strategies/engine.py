"""The engine of synchronous training: a runner and a gradient reducer.

The *runner* runs the forward and backward passes of the micro-batches: locally (local.py), as a
pipeline (pipeline/runner.py) or over RPC (rpc_pipeline/runner.py). The *reducer* turns the gradients of
this rank into those of the global batch (reducer.py). Each runner works with the reducers of its
layouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.strategies.compiled import Compiler
from shoal.strategies.contracts import Engine, compiles_parts
from shoal.strategies.correction import AnyTotals, Factor
from shoal.strategies.loop_gradients import CheckedGradients
from shoal.strategies.reducer import Reducer
from shoal.strategies.task import Task


class Runner(ABC):
    """Runner of the micro-batches of a batch. Passes their losses or gradients to a reducer.

    It has the methods of an Engine; see Engine.
    """

    reducer: Reducer
    loopable: bool = False
    """Whether a custom training loop may run the model in its place."""
    noise_stream: str = "noise"
    flops_unknown: str = ""

    @abstractmethod
    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> AnyTotals:
        """Run forward and backward passes of the batch; return the reducer's totals. Collective."""

    @abstractmethod
    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the model's output on one micro-batch. Collective."""

    @abstractmethod
    def compile(self, how: str) -> None:
        """Run the forward pass compiled: "inductor", "blocks" or "script"."""

    def compile_with(self, compiler: Compiler) -> None:
        """Run the forward pass compiled by `compiler`; StepError if only parts can be compiled."""
        raise compiles_parts(self.reducer.held.module, self.reducer.held.world)

    def move_targets(self, output: Any, micro: MicroBatch) -> MicroBatch:
        """Return the micro-batch on the device of the output."""
        return micro

    def check_model(self) -> None:  # noqa: B027 - most run the model as it is
        """Check once that a model whose forward was changed gives the same results. Collective."""


class SynchronousEngine(Engine):
    """Engine with which all ranks take each step together, made of a runner and a reducer."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.reducer = runner.reducer
        self.module = runner.reducer.held.module
        self.world = runner.reducer.held.world
        self.reports_loss = runner.reducer.reports_loss
        self.noise_stream = runner.noise_stream
        self.flops_unknown = runner.flops_unknown
        self.waits_because = runner.reducer.waits_because
        if runner.loopable:
            self.loop = CheckedGradients(runner.reducer, runner.check_model)

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> AnyTotals:
        """Run the batch with the runner; see the contract."""
        return self.runner.gradients(task, batch, autocast=autocast, scale=scale)

    def update(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        """Multiply, step, clear; see the contract."""
        try:
            self.reducer.check_optimizer(optimizer)
            self.reducer.multiply(factor)
            optimizer.step()
        finally:
            self.reducer.discard()  # a caller that catches an error continues with the next batch

    def discard(self) -> None:
        """Clear the gradients, and drop the sums recorded for their batch."""
        self.reducer.discard()

    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output of the module. The caller sets the mode and no_grad."""
        return self.runner.infer(task, micro, seed, autocast=autocast)

    def move_targets(self, output: Any, micro: MicroBatch) -> MicroBatch:
        """Return the micro-batch on the device of the output; see the contract."""
        return self.runner.move_targets(output, micro)

    def compile(self, how: str) -> None:
        """Run the forward pass compiled; see the contract."""
        self.runner.compile(how)

    def compile_with(self, compiler: Compiler) -> None:
        """Run the forward pass compiled by `compiler`; see the contract."""
        self.runner.compile_with(compiler)

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

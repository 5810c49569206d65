"""The train state of a model that another tool trains, in a Run around the tool's loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.data import Loader
from shoal.data.step_result import StepResult
from shoal.strategies.other_tools import OtherToolEngine
from shoal.training.several import parts_of
from shoal.training.train_state import TrainState
from shoal.util.errors import StepError


class OtherToolState(TrainState):
    """Counts the steps of the tool's optimizer, each with the batch that the Loader yielded last."""

    engine: OtherToolEngine
    precision = "chosen by another tool"
    may_skip = True

    def __init__(
        self,
        engine: OtherToolEngine,
        optimizer: Optimizer | Sequence[Optimizer],
        schedule: LRScheduler | Sequence[LRScheduler] | None,
        loader: Loader,
    ) -> None:
        self._checked = engine.world.size == 1
        self._said = False
        super().__init__(engine, _each(optimizer, "optimizer"), _each(schedule, "scheduler"))
        for part in parts_of(self.optimizer):
            if hasattr(part, "consolidate_state_dict"):
                raise StepError(
                    given=f"shoal.Run(…, optimizer={type(part).__name__}) of another tool's model",
                    found="each rank has a part of its state in a form of its own",
                    fix="use the plain optimizer, or model = shoal.parallelize(model, world)",
                )
        self._loader = loader
        self.optimizer.register_step_post_hook(self._stepped)

    def check_schedule(self, *, epoch_ended: bool) -> None:
        """Count a batch as processed for which the loop took no step, as a GradScaler may decide.

        The schedule is not checked: some tools step it once for each rank.
        """
        batch = self._loader.batch
        if batch is None:
            return
        if batch.has_more:
            raise StepError(
                given="run.tick() in the loop over the micro-batches of a batch",
                found="a save would count samples that the optimizer has not seen",
                fix="call run.tick() after optimizer.step(), outside the loop over the batch",
            )
        batch.processed = True

    def _stepped(self, *_: Any) -> None:
        """Count a step of the optimizer. Collective."""
        batch, world = self._loader.batch, self.engine.world
        if batch is None:
            return
        world.watchdog.begin_step()
        if not self._checked:  # a forgotten wrapper shows after the first step
            self.engine.check_same()
            self._checked = True
        batch.processed = True
        loss = math.nan
        if batch.loss_sum is None:
            self._say_unknown_loss()
        else:
            total = torch.as_tensor(batch.loss_sum, dtype=torch.float64, device=world.device)
            loss = float(world.all_reduce(total)) / batch.size
        self.count(StepResult(loss, math.nan, batch.size))

    def _say_unknown_loss(self) -> None:
        if not self._said:
            self._said = True
            self.engine.world.print(
                "shoal: the loop does not pass its loss through batch.averaged, so it is recorded as "
                "nan, and gradients may depend on the number of ranks"
            )


def _each(given: Any, attribute: str) -> Any:
    """Return optimizers or schedules without a tool's wrappers, which keep them in `attribute`."""
    if isinstance(given, list | tuple):
        return [_each(one, attribute) for one in given]
    inner = getattr(given, attribute, None)
    return inner if isinstance(inner, Optimizer | LRScheduler) else given

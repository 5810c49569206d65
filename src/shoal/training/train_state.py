"""A model in training with its optimizer and schedule: what a checkpoint holds of it, steps counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal._torch.modules import has_compiled_call
from shoal.data.batch import StepResult
from shoal.strategies.contracts import Engine
from shoal.strategies.dtensor import divided
from shoal.training.state_names import (
    check_model,
    check_optimizer,
    members,
    named,
    numbered,
    parameter_names,
    restored,
    shapes,
    storable,
)
from shoal.util.errors import CheckpointError, StepError

if TYPE_CHECKING:
    from shoal.data.batch import Batch


class TrainState:
    """A parallelized model, its optimizer and schedule, and how many optimizer steps they have taken.

    A Step is one that takes the steps itself. By a plain one a Run saves and counts what your own loop
    does: it counts each `batch.finish` on the model, and the loop steps optimizer and schedule.
    """

    precision = "chosen in the loop"
    """What the events of a run say of the dtype that it computes in."""

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, schedule: LRScheduler | None = None
    ) -> None:
        self.engine = engine
        self.model: nn.Module = engine.module
        parameter_names(self.model, optimizer)  # raises StepError for what no step can drive
        self.optimizer = optimizer
        self.schedule = _check_schedule(schedule, optimizer)
        self.number = 0
        self.last: StepResult | None = None
        self.counting: AbstractContextManager[object] = nullcontext()
        """Forward and backward run in it, so that their FLOPs can be counted."""
        self._epoch_ended = False
        self._follow_schedule_from_here()
        if engine.loop is not None:
            engine.loop.count_in(self)

    def count(self, result: StepResult) -> StepResult:
        """Count an optimizer step that came to `result`."""
        if self.number == self._number_began:
            self._follow_schedule_from_here()  # the script may have loaded its state until now
        self.number += 1
        self.last = result
        return result

    def check_loop(self) -> None:
        """Raise StepError where this can't stand for a model that `batch.backward` trains."""

    def try_loss(self, batch: Batch) -> None:
        """Try the loss function on the first batch of your own loop, where there is one. Collective."""

    def check_schedule(self, *, epoch_ended: bool) -> None:
        """Raise StepError where the loop has stepped the schedule too often, or not once in an epoch.

        Called after each batch; `epoch_ended` says whether an epoch ended with it.
        """
        now = getattr(self.schedule, "last_epoch", None)  # ChainedScheduler has none
        if now is None or self._schedule_began is None:
            return
        steps, stepped = self.number - self._number_began, now - self._schedule_began
        if stepped > steps or (steps and not stepped and self._epoch_ended):
            kind = type(self.schedule).__name__
            raise StepError(
                given=f"shoal.Run(…, model, loader, optimizer=…, schedule={kind})",
                found=f"your loop has called schedule.step() {stepped} times in {steps} optimizer steps"
                + ("" if stepped else ", and an epoch has ended since"),
                fix="schedule.step() once after optimizer.step(), or once after each epoch; to step "
                "it at other times, shoal.Run(…, state={'schedule': schedule})",
            )
        self._epoch_ended = self._epoch_ended or epoch_ended

    def state_dict(self) -> dict[str, Any]:
        """All from which training goes on, the optimizer's state by parameter name. Collective."""
        self.engine.synchronize(self.optimizer)
        return self.form()

    def form(self) -> dict[str, Any]:
        """What `state_dict` returns, but for values that still differ between ranks. Collective."""
        state: dict[str, Any] = {
            "model": storable(self.model.state_dict()),
            "optimizer": named(self.optimizer, self._names),
            "number": self.number,
            "engine": self.engine.state(),
        }
        if self.schedule is not None:
            state["schedule"] = self.schedule.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Raises CheckpointError before anything changes, as `check_state` does.
        """
        self.check_state(state)
        optimizer = numbered(self.optimizer, state["optimizer"], self._names)
        own = self.model.state_dict()
        model = restored(own, {n: value for n, value in state["model"].items() if n in own})
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.engine.load_state(state["engine"])
        self.number = state["number"]
        self._follow_schedule_from_here()

    def template(self) -> dict[str, Any]:
        """Where the tensors of a state are to be read to that this rank holds parts of."""
        parameters = dict(self.model.named_parameters())
        return {
            "model": divided(self.model.state_dict(), torch.empty_like),
            "optimizer": {"state": divided({name: parameters[name] for name in self._names})},
        }

    def elsewhere(self) -> list[tuple[str, ...]]:
        """Where in a state is what other ranks hold and this one does not. Collective."""
        own = self.model.state_dict().keys()
        others = [name for name in self._of_all_ranks(dict.fromkeys(own)) if name not in own]
        return [*(("model", n) for n in others), *(("optimizer", "state", n) for n in others)]

    def elements(self) -> int:
        """How many elements the parameters of the model have, over all ranks. Collective."""
        mine = {name: p.numel() for name, p in self.model.named_parameters()}
        return sum(self._of_all_ranks(mine).values())

    @property
    def compiled(self) -> bool:
        """Whether forward and backward are run by other code than the model's."""
        return has_compiled_call(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the model's parameters."""
        sizes: Counter[torch.dtype] = Counter()
        for parameter in self.model.parameters():
            sizes[parameter.dtype] += parameter.numel()
        return max(sizes, key=sizes.__getitem__, default=torch.float32)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` is of another model, optimizer, schedule or precision.

        Collective: ranks may hold parts of the model, and `state` is of all of it.
        """
        here = self._of_all_ranks(shapes(self.model.state_dict()))
        check_model(self.model, state["model"], here)
        groups = self._of_all_ranks(members(self.optimizer, self._names))
        check_optimizer(self.optimizer, state["optimizer"], groups)
        for part, own in self._options().items():
            if (part in state) != (own is not None):
                raise CheckpointError(
                    given=f"a Step {'with' if own is not None else 'without'} a {part}",
                    found=f"a checkpoint {'with' if part in state else 'without'} one",
                    fix="give the Step or the Run what the run that wrote the checkpoint had "
                    "(schedule=, precision=), or start afresh: shoal.Run('runs/b', …)",
                )

    def _options(self) -> dict[str, object]:
        """What a state may have or lack, by name."""
        return {"schedule": self.schedule}

    @property
    def _names(self) -> list[str]:
        return parameter_names(self.model, self.optimizer)  # groups may have been added

    def _of_all_ranks(self, mine: dict[str, Any]) -> dict[str, Any]:
        world = self.engine.world
        if world.data_size == world.size:  # every rank has the whole model
            return mine
        return {name: value for part in world.gather(mine) for name, value in part.items()}

    def _follow_schedule_from_here(self) -> None:
        self._number_began = self.number
        self._schedule_began: int | None = getattr(self.schedule, "last_epoch", None)
        self._epoch_ended = False


def _check_schedule(schedule: object, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """`schedule` if it can be stepped without a metric and steers `optimizer`."""
    if schedule is None:
        return None
    kind = type(schedule).__name__
    if not isinstance(schedule, LRScheduler):
        found = "it is not a torch.optim.lr_scheduler.LRScheduler"
    elif isinstance(schedule, ReduceLROnPlateau):
        found = "it is stepped with a metric after validation, not with each optimizer step"
    elif schedule.optimizer is not optimizer:
        found = f"it steers another {type(schedule.optimizer).__name__} than the one given"
    else:
        return schedule
    raise StepError(
        given=f"schedule={kind}",
        found=found,
        fix="shoal.LRSchedule(warmup_steps=100)(optimizer, steps), or a scheduler of torch's; a "
        "plateau is "
        "yours to step: plateau.step(shoal.evaluate(step, data)['loss']), "
        "Run(…, state={'plateau': plateau})",
    )

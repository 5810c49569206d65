"""The train state of a model: parameters, optimizer, schedule and step number, for checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal._torch.modules import has_compiled_call
from shoal.data.step_result import StepResult
from shoal.distributed.speed_hints import SpeedHints
from shoal.strategies.contracts import Engine
from shoal.strategies.dtensor import divided, is_divided
from shoal.strategies.optimizer_check import prepare_optimizers
from shoal.training.optimizer_state import (
    Grouping,
    check_optimizer,
    grouping,
    load_optimizer,
    named,
    parameter_names,
)
from shoal.training.several import SeveralSchedules, check_number, kind_of, one_optimizer, parts_of
from shoal.training.state_names import check_model, restored, shapes, storable
from shoal.util.accelerator import is_accelerator
from shoal.util.errors import CheckpointError, StepError

if TYPE_CHECKING:
    from shoal.data.batch import Batch


class TrainState:
    """A parallelized model, its optimizer and schedule, and the number of optimizer steps taken.

    Step is the subclass that takes the steps itself. For a custom training loop, a Run saves a plain
    TrainState: it counts each `batch.finish` on the model, and the loop steps optimizer and schedule.
    """

    precision = "chosen in the loop"
    """The compute dtype in the events of a run."""
    may_skip = False
    """Whether the loop may end a batch without a step that is counted."""

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer | Sequence[Optimizer],
        schedule: LRScheduler | Sequence[LRScheduler] | None = None,
    ) -> None:
        self.engine = engine
        self.model: nn.Module = engine.module
        self.optimizer = one_optimizer(optimizer)
        self._begun = grouping(self.optimizer, parameter_names(self.model, self.optimizer))
        if not engine.independent_steps:
            prepare_optimizers(parts_of(self.optimizer), engine.world)
        self.schedule = _check_schedule(schedule, self.optimizer)
        self.number = 0
        self.last: StepResult | None = None
        self.counting: AbstractContextManager[object] = nullcontext()
        """The context of the forward and backward passes, in which their FLOPs can be counted."""
        self.untried = ""
        """A line on a loss that could not be checked, to print after the first step."""
        self._epoch_ended = False
        self._follow_schedule_from_here()
        if engine.loop is not None:
            engine.loop.count_in(self)

    def count(self, result: StepResult) -> StepResult:
        """Count an optimizer step with this result."""
        if self.number == self._number_began:
            self._follow_schedule_from_here()  # the script may have loaded its state until now
        if self.untried:
            self.engine.world.print(self.untried)
            self.untried = ""
        self.number += 1
        self.last = result
        return result

    def check_loop(self) -> None:
        """Raise StepError if `batch.backward` can't train the model of this state."""

    def try_loss(self, batch: Batch) -> None:
        """Try the loss function, if any, on the first batch of a custom training loop. Collective."""

    def check_schedule(self, *, epoch_ended: bool) -> None:
        """Raise StepError if the loop has stepped the schedule too often, or not at all in an epoch.

        Called after each batch; `epoch_ended` is true for the last batch of an epoch.
        """
        now = getattr(self.schedule, "last_epoch", None)  # ChainedScheduler has none
        if now is None or self._schedule_began is None:
            return
        steps, stepped = self.number - self._number_began, now - self._schedule_began
        if stepped > steps or (steps and not stepped and self._epoch_ended):
            kind = kind_of(self.schedule)
            raise StepError(
                given=f"shoal.Run(…, model, loader, optimizer=…, schedule={kind})",
                found=f"your loop has called schedule.step() {stepped} times in {steps} optimizer steps"
                + ("" if stepped else ", and an epoch has ended since"),
                fix="call schedule.step() once after each optimizer.step(), or once after each epoch; "
                "if you call it at other times, pass shoal.Run(…, state={'schedule': schedule})",
            )
        self._epoch_ended = self._epoch_ended or epoch_ended

    def state_dict(self) -> dict[str, Any]:
        """Return the complete train state, with the optimizer state by parameter name. Collective."""
        self.engine.synchronize(self.optimizer)
        return self.form()

    def form(self) -> dict[str, Any]:
        """Return a state as `state_dict` does, without synchronizing values over ranks. Collective."""
        state: dict[str, Any] = {
            "model": storable(self.model.state_dict()),
            "optimizer": named(self.optimizer, self.model, self._begun),
            "number": self.number,
            "engine": self.engine.state(),
        }
        if self.schedule is not None:
            state["schedule"] = self.schedule.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises CheckpointError before anything changes, as `check_state` does.
        """
        self.check_state(state)
        own = self.model.state_dict()
        model = restored(own, {n: value for n, value in state["model"].items() if n in own})
        self.model.load_state_dict(model)
        load_optimizer(self.optimizer, self.model, state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.engine.load_state(state["engine"])
        self.number = state["number"]
        self._follow_schedule_from_here()

    def template(self) -> dict[str, Any]:
        """Return the tensors to read a state into, of which this rank holds shards."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # An imported state may number them.
        numbered = {str(number): each for number, each in enumerate(parameters)}
        return {
            "model": divided(self.model.state_dict(), torch.empty_like),
            "optimizer": {"state": divided(numbered | dict(self.model.named_parameters()))},
        }

    def elsewhere(self) -> list[tuple[str, ...]]:
        """Return the paths in a state of entries that only other ranks hold. Collective."""
        own = self.model.state_dict().keys()
        others = [name for name in self._of_all_ranks(dict.fromkeys(own)) if name not in own]
        return [*(("model", n) for n in others), *(("optimizer", "state", n) for n in others)]

    def tell_hints(self, waits: str = "") -> None:
        """Print what would be faster on this device; `waits` is why each step waits for its result."""
        self.engine.world.service(SpeedHints).tell(
            float32=self.dtype is torch.float32,
            unfused=kind_of(self.optimizer) if _should_fuse(self.optimizer) else "",
            waits=waits,
        )

    def elements(self) -> int:
        """Return the number of elements of the model's parameters, over all ranks. Collective."""
        mine = {name: p.numel() for name, p in self.model.named_parameters()}
        return sum(self._of_all_ranks(mine).values())

    @property
    def compiled(self) -> bool:
        """True if compiled code runs the forward and backward passes."""
        return any(map(has_compiled_call, self.model.modules()))

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of most of the model: that of its parameters, or of gathered ones."""
        if self.engine.gathered_dtype is not None:
            return self.engine.gathered_dtype
        sizes: Counter[torch.dtype] = Counter()
        for parameter in self.model.parameters():
            sizes[parameter.dtype] += parameter.numel()
        return max(sizes, key=sizes.__getitem__, default=torch.float32)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` is of another model, optimizer, schedule or precision.

        Collective: ranks may hold parts of the model, and `state` covers all of it.
        """
        here = self._of_all_ranks(shapes(self.model.state_dict()))
        check_model(self.model, state["model"], here)
        now = grouping(self.optimizer, parameter_names(self.model, self.optimizer))
        groups = (self._on_all_ranks(now), self._on_all_ranks(self._begun))
        check_optimizer(self.optimizer, state["optimizer"], *groups)
        for part, own in self._options().items():
            if (part in state) != (own is not None):
                raise CheckpointError(
                    given=f"a Step {'with' if own is not None else 'without'} a {part}",
                    found=f"a checkpoint {'with' if part in state else 'without'} one",
                    fix="use the same schedule= and precision= as the run that wrote the checkpoint, "
                    "or start a new run: shoal.Run('runs/b', …)",
                )
        if self.schedule is not None:
            check_number(self.schedule, state["schedule"])

    def _options(self) -> dict[str, object]:
        """The optional entries of a state, by name; None for a missing one."""
        return {"schedule": self.schedule}

    def _on_all_ranks(self, groups: Grouping) -> Grouping:
        return groups._replace(members=self._of_all_ranks(groups.members))

    def _of_all_ranks(self, mine: dict[str, Any]) -> dict[str, Any]:
        world = self.engine.world
        if world.data_size == world.size:  # every rank has the whole model
            return mine
        return {name: value for part in world.gather(mine) for name, value in part.items()}

    def _follow_schedule_from_here(self) -> None:
        self._number_began = self.number
        self._schedule_began: int | None = getattr(self.schedule, "last_epoch", None)
        self._epoch_ended = False


def could_fuse(optimizer: Optimizer) -> bool:
    """Return whether the user could pass fused=True, which updates many parameters in one kernel."""
    groups = optimizer.param_groups
    return (
        any(not group.get("fused") for group in groups)
        and all("fused" in group and not group.get("differentiable") for group in groups)
        and all(p.is_floating_point() for group in groups for p in group["params"])
    )


def _should_fuse(optimizer: Optimizer) -> bool:
    """Return whether fused=True would work, and on an accelerator.

    torch's fused optimizers take no sharded and plain parameters in one group.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    return could_fuse(optimizer) and all(
        all(is_accelerator(p.device) for p in group) and len(set(map(is_divided, group))) == 1
        for group in groups
    )


def _check_schedule(schedule: object, optimizer: Optimizer) -> LRScheduler | None:
    """Return `schedule`, or several as one, if it needs no metric and controls `optimizer`."""
    if schedule is None:
        return None
    if isinstance(schedule, list | tuple):
        several = [each for one in schedule if (each := _check_schedule(one, optimizer)) is not None]
        return SeveralSchedules(several) if len(several) > 1 else next(iter(several), None)
    kind = type(schedule).__name__
    if not isinstance(schedule, LRScheduler):
        found = "it is not a torch.optim.lr_scheduler.LRScheduler"
    elif isinstance(schedule, ReduceLROnPlateau):
        found = "it is stepped with a metric after validation, not with each optimizer step"
    elif not any(schedule.optimizer is part for part in parts_of(optimizer)):
        found = f"its {type(schedule.optimizer).__name__} is not the one given: {kind_of(optimizer)}"
    else:
        return schedule
    raise StepError(
        given=f"schedule={kind}",
        found=found,
        fix="pass shoal.LRSchedule(warmup_steps=100)(optimizer, steps), or a torch scheduler; step "
        "ReduceLROnPlateau yourself: plateau.step(shoal.evaluate(step, data)['loss']), and pass "
        "Run(…, state={'plateau': plateau})",
    )

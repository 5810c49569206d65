"""The guard of a Step's losses: records bad steps, and rolls the run back after several in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shoal.telemetry.events import Events, Plain
from shoal.training.bad_steps import BadStep, BadStepRule, BadSteps
from shoal.util.errors import StepError

if TYPE_CHECKING:
    from shoal.data import Loader
    from shoal.training.run_state import RestorePoint
    from shoal.training.step import Step
    from shoal.training.train_state import TrainState


class Rewind(Protocol):
    """Restores a run from a checkpoint and saves it again: `Run` has it."""

    def __call__(self, newest: int | None, change: Callable[[], None], /) -> RestorePoint | None:
        """Restore a checkpoint of step `newest` or earlier, `change` the state, and replace it.

        Returns None if there is no such checkpoint.
        """
        ...


class LossGuard:
    """Follows the bad steps of one Step, which the Step itself skips."""

    def __init__(
        self,
        name: str,
        step: Step,
        first: TrainState,
        loader: Loader,
        options: BadSteps,
        events: Events,
        rewind: Rewind,
    ) -> None:
        self._name = name
        self._step = step
        self._first = first
        self._loader = loader
        self._events = events
        self._rewind = rewind
        self._rule = step.skip_bad_steps(BadStepRule(options))

    def tick(self) -> None:
        """Record bad steps; after several in a row, roll back. Collective.

        Raises StepError, on all ranks, if the run can't be rolled back.
        """
        rule = self._rule
        found, rule.found = rule.found, []
        for each in found:
            self._record(each)
        if not rule.in_a_row:
            rule.good = self._first.number
        elif len(rule.in_a_row) >= rule.options.patience:
            self._roll_back()

    def close(self) -> None:
        """Leave the Step."""
        self._step.bad_steps = None

    def _record(self, bad: BadStep) -> None:
        world = self._loader.world
        if world.is_rank_zero:
            start, stop, _ = bad.batch
            fields: dict[str, Plain] = {"name": self._name, "step": bad.number, "reason": bad.reason}
            self._events.write("bad_step", fields | {"loss": bad.loss, "left_out": [[start, stop]]})
        world.print(f"shoal: step {bad.number:,} was skipped: {bad.reason}")

    def _roll_back(self) -> None:
        rule, at = self._rule, self._step.number
        batches, count = rule.in_a_row, rule.rollbacks + 1
        if count > rule.options.rollbacks:
            raise self._error(at, f"the run was rolled back {rule.rollbacks} times before")

        def change() -> None:
            rule.in_a_row, rule.rollbacks = [], count
            self._loader.leave_out(batches)

        restored = self._rewind(rule.good, change)
        if restored is None:
            raise self._error(at, "there is no checkpoint from before these steps")
        if self._loader.world.is_rank_zero:
            left_out: list[Plain] = [[each.start, each.stop] for each in batches]
            fields: dict[str, Plain] = {"step": at, "restored": restored.step, "left_out": left_out}
            self._events.write("rollback", fields)
        self._loader.world.print(
            f"shoal: rolled back from step {at:,} to step {restored.step:,}, without the samples of "
            f"{len(batches)} bad steps ({count} of {rule.options.rollbacks} rollbacks)"
        )

    def _error(self, at: int, found: str) -> StepError:
        last = self._rule.in_a_row[-1]
        return StepError(
            given=f"{len(self._rule.in_a_row)} bad steps in a row, the last one step {at:,} on samples "
            f"{last.start:,} to {last.stop - 1:,}",
            found=f"{found}; the parameters are those from before these steps",
            fix="lower the learning rate or clip gradients (clip=1.0); save more often "
            "(run.tick(every=100)); or allow more: shoal.BadSteps(rollbacks=10)",
        )

"""One training run in a directory: restore, tick and save, with progress and events."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.checkpoint import AnyPath, BackgroundSave
from shoal.data import Loader
from shoal.distributed.failure import note_step
from shoal.telemetry.profiler.window import check_length, check_window
from shoal.telemetry.step_timer import CHECKPOINT, UPDATE
from shoal.telemetry.trackers.protocol import Curves, Tracker
from shoal.training.guards.create import create_guards, loss_guards
from shoal.training.guards.options import Guards
from shoal.training.logged_values import LogQueue, check_trackers, plain_values
from shoal.training.named_states import train_states
from shoal.training.predicted_steps import planned_steps
from shoal.training.preemption import PreemptionHandler, StoppedExit, StopReason
from shoal.training.progress_bar import ProgressBar
from shoal.training.run_directory import RunDirectory, local_path
from shoal.training.run_events import RunEvents
from shoal.training.run_monitor import RunMonitor
from shoal.training.run_state import RestorePoint, RunState, Stateful, check_options, settings
from shoal.training.save_policy import LAST_WAIT, Every, SavePolicy, check_every
from shoal.training.step import Step
from shoal.util.clock import CLOCK
from shoal.util.errors import CheckpointError, StepError


class Run:
    """One training run in one directory: its checkpoints, events and progress.

    Use it as a context manager, on all ranks. The directory gets `checkpoints/step-N/` and
    `events/rank-R.jsonl`. `step` is the number of steps of the first Step, or of calls of
    `batch.finish` for the first model.

    While the Run is open, SIGTERM, SIGUSR1, SIGUSR2 or Ctrl-C on any rank makes all ranks save in the
    same tick and exit: with code 75, which requests a restart, or 130 after Ctrl-C.

    Args:
        directory: Run directory, local or on a network file system; created if necessary.
        model: A Step, or a parallelized model for a custom training loop. For several models (two for a
            GAN), a dict with a name for each.
        loader: Loader whose position the checkpoints hold.
        optimizer: Optimizer of a model that is not in a Step, or a list of its optimizers; for several
            models, a dict with the same names. Default: None.
        schedule: Scheduler of a model that is not in a Step, or a list; a dict for several models. The
            loop steps it, once after each optimizer step or once after each epoch; the Run saves and
            restores it. Default: None.
        state: Other objects with `state_dict` and `load_state_dict`, by name. Their state must be the
            same on all ranks: if it differs, a save raises CheckpointError. Default: None.
        config: Plain values that checkpoints record for users: learning rates, paths. Default: None.
        checkpoints: Another directory for the checkpoints, or a URL of a file system that fsspec
            supports (`s3://bucket/run`). `None` is `checkpoints/` in the run directory. Default: None.
        keep: Number of latest checkpoints to keep, 1 or more. Default: 3.
        keep_every: Also keep the checkpoints of every `keep_every`-th step. `None` keeps no others.
            Default: None.
        must_save: End the run if a background save fails. Otherwise the next `tick` reports it and
            training continues. Default: False.
        trackers: Trackers that receive the values of `log` and `World.log`; () for none. `None` is
            TensorBoard if it is installed. Default: None.
        profile: First and last step that torch's profiler records, for a timeline of all ranks (`shoal
            report runs/a --trace 100:105`). Default: None.
        guards: Checks for silent data corruption and bad losses while the Run is open. `None` checks
            nothing. Default: None.
        plan: File with the output of `shoal plan --json`. Rank 0 warns once if steps take over 20 %
            longer than the first configuration predicts, with the part and a likely cause, and again if
            they get another 20 % slower; at the end, it prints both times. Default: None.

    Attributes:
        step: Number of optimizer steps since the start of training.
        steps: Steps by name; a single one is "step".
        directory: Run directory, a path.
        world: World of the loader.

    Raises:
        StepError: If `model`, `optimizer` or `schedule` do not fit each other, `profile` is out of
            range, the strategy has no state that `guards` could compare, or `plan` is not a plan for
            these ranks, this layout and this global batch.
        DataError: If `loader` is not a Loader.
        CheckpointError: On all ranks, if a directory can't be written, another run is open in it,
            `state` or `config` can't be saved, or a model's state_dict has an entry that a checkpoint
            can't hold.
        AgreementError: On all ranks, if the ranks have different data.

    Examples:
        >>> import tempfile, torch
        >>> def loss(output, batch):
        ...     return torch.nn.functional.mse_loss(output, batch[1], reduction="sum"), len(output)
        >>> with tempfile.TemporaryDirectory() as directory, shoal.init() as world:
        ...     model = shoal.parallelize(torch.nn.Linear(4, 1), world)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     step = shoal.Step(model, optimizer, shoal.Task(loss))
        ...     loader = shoal.Loader((torch.ones(8, 4), torch.ones(8, 1)), world, batch_size=4)
        ...     with shoal.Run(directory, step, loader, trackers=()) as run:
        ...         run.restore()
        ...         for batch in loader.epochs(1):
        ...             result = step(batch)
        ...             run.tick(every=1)  # doctest: +ELLIPSIS
        50.0 % · step 1 · epoch 0.50/1 · loss ...
        100 % · step 2 · epoch 1.00/1 · loss ...
    """

    def __init__(
        self,
        directory: str | Path,
        model: Step | nn.Module | Mapping[str, Step | nn.Module],
        loader: Loader,
        *,
        optimizer: Optimizer
        | Sequence[Optimizer]
        | Mapping[str, Optimizer | Sequence[Optimizer]]
        | None = None,
        schedule: LRScheduler
        | Sequence[LRScheduler]
        | Mapping[str, LRScheduler | Sequence[LRScheduler]]
        | None = None,
        state: Mapping[str, Stateful] | None = None,
        config: Mapping[str, Any] | None = None,
        checkpoints: str | Path | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        must_save: bool = False,
        trackers: Sequence[Tracker] | None = None,
        profile: tuple[int, int] | None = None,
        guards: Guards | None = None,
        plan: str | Path | None = None,
    ) -> None:
        call = f"shoal.Run(…, profile={profile})"
        window = None if profile is None else check_length(check_window(profile, call), call)
        local_path(directory)
        self.train_states = train_states(model, optimizer, schedule, loader)
        check_options(loader, {} if state is None else state, {} if config is None else config)
        self.loader, self.world = loader, loader.world
        check_trackers(trackers)
        self.state = dict(state or {})
        loader.compare_ranks()
        planned = planned_steps(plan, loader)
        self._config = settings(config or {})
        self.contents = RunState(self.world, self.train_states, loader, self.state, self._config)
        self.files = RunDirectory(
            directory, self.world, checkpoints=checkpoints, keep=keep, keep_every=keep_every
        )
        self.directory, self.events = self.files.path, self.files.events
        self._curves = Curves(self.directory.absolute(), trackers, first=self.world.is_rank_zero)
        self._saves = SavePolicy(
            self.world, self.events, self.directory, saved=self._curves.saved, must=must_save
        )
        self._progress = ProgressBar.of(self.world)
        self._observer = RunMonitor(
            self.world, self.directory, self.train_states, loader, self.events, window
        )
        self._logged = LogQueue(self.events, self._curves)
        self.world.run_log.attach(self.log, self.files.absolute)
        self._begun = self._closed = False
        self._recording = RunEvents(self.events, self.train_states, loader, planned)
        self._first = self._recording.numbers()
        self._guards = create_guards(self.train_states, guards, self.events)
        self._guards += loss_guards(self.train_states, guards, self.events, loader, self._roll_back)
        self._saved: tuple[tuple[dict[str, int], int], AnyPath, BackgroundSave[AnyPath]] | None = None
        self.world.before_closing(self.close)
        self._stopping = PreemptionHandler(self.world)
        self._stopping.start()

    @property
    def steps(self) -> dict[str, Step]:
        """The Steps of this Run, keyed by name. A single Step has the name "step"."""
        return {name: each for name, each in self.train_states.items() if isinstance(each, Step)}

    @property
    def step(self) -> int:
        """Optimizer steps taken since the start of training, by the first Step or model."""
        return next(iter(self.train_states.values())).number

    def restore(self) -> RestorePoint | None:
        """Resume from the latest complete checkpoint, if there is one. Collective.

        Rank 0 prints which damaged checkpoints were skipped, and why. If there are only interrupted
        saves, it prints their names. On the same number of ranks, random states are restored too, and
        the run ends bit-identical to an uninterrupted one. On a different number of ranks, the data
        continue at the exact next sample.

        Returns:
            The step, the position in the data, the epoch and the path of the checkpoint; None if there
            is no checkpoint yet.

        Raises:
            CheckpointError: If there are checkpoints but none is valid, or if they are of another
                model.
            DataError: If the data or their order differ from the checkpoint's.
        """
        self._check_open()
        restored = self._restore()
        self._recording.rewind()
        return restored

    def _restore(self, newest: int | None = None) -> RestorePoint | None:
        self._saves.hear(wait=True)
        loaded = self.files.restore(self.contents.template(), self.contents.elsewhere(), newest)
        self._saved = None
        if loaded is None:
            if saves := ", ".join(self.files.checkpoints.interrupted):
                self.world.print(
                    f"no complete checkpoint in {self.files.checkpoints.directory}, only interrupted "
                    f"saves ({saves}): training starts from the beginning"
                )
            return None
        for skipped in loaded.skipped:
            self.world.print(f"skipped {skipped.path}: {skipped.reason}")
        restored = self.contents.load(loaded, f"a Run in {self.directory}")
        self._recording.replay(restored.position)
        self._first = self._recording.numbers()
        self._curves.begins = restored.step
        self._recording.restored(restored)
        return restored

    def _roll_back(self, newest: int | None, change: Callable[[], None]) -> RestorePoint | None:
        """Restore a checkpoint of step `newest` or earlier, `change` the state, and replace it.

        A kill before the new checkpoint is complete leaves the old ones, as if there was no rollback.
        """
        with self.world.timeline.during(CHECKPOINT), self.world.preparing():
            restored = self._restore(newest)
            self._recording.rewind()
            if restored is not None:
                change()
                self.save()
                self.files.checkpoints.remove_after(restored.step)
        return restored

    def tick(self, *, every: Every | None = None) -> None:
        """Record the steps on a batch, show progress, and save if due. Collective.

        Call it after each batch. The step waits only while the state is copied. The checkpoint is
        written in the background, and a later `tick` reports the result.

        Args:
            every: Interval between saves: a number of optimizer steps of the first Step, a timedelta by
                rank 0's clock, or a `shoal.YoungDaly`, which chooses the interval. `None` does not
                save. Default: None.

        Raises:
            SystemExit: After a save, if a signal on any rank requested a stop.
            StepError: If no Step or `batch.finish` has processed a batch, or the Run is closed; on all
                ranks, if a run with `BadSteps` can't be rolled back.
            CorruptionError: On all ranks, if `guards` find replicas that differ.
            CheckpointError: With `must_save`, if a save failed; if `every` is not an interval.
        """
        timeline = self.world.timeline
        before = timeline.enter(UPDATE)
        try:
            self._tick(every)
        finally:
            timeline.enter(before)

    def _tick(self, every: Every | None) -> None:
        self._check_open()
        if every is not None:
            check_every(every, "run.tick(every={})")
        self._saves.hear()
        if self._saves.failed:
            self._stopping.request("a save that failed", kind="failed")
        if not self._begun:
            self._begin()
            self._observer.begin()
        now = CLOCK.wall()
        batch = self.loader.batch
        if batch is not None:
            self._recording.check_steps()
        for each in self.train_states.values():
            each.check_schedule(epoch_ended=batch is not None and batch.ends_epoch)
        moved = self._recording.tick(now)
        for guard in self._guards:
            guard.tick()  # before a save, which would keep what it finds
        self._logged.write(wait=False)
        self._observer.tick()
        if self._progress is not None and self._progress.due(now):
            self._progress.show(self.step, self.loader, self.contents.means.shown(), now)
        reason = self._stopping.due()
        if reason is not None:
            self._leave(reason)
        # A rollback has just saved; and it needs a checkpoint from before the bad steps in a row.
        good = self.loader.batch is not None and not any(s.in_bad_steps for s in self.steps.values())
        if every is not None and moved and good and self._saves.due(every, self.step):
            self.save(wait=False)

    def save(self, *, to: str | None = None, wait: bool = True) -> AnyPath:
        """Commit a complete checkpoint of the run. Collective.

        If no step was taken since the last save, it returns that checkpoint. If the Run has user state,
        which may have changed, it saves again and replaces that checkpoint.

        Args:
            to: Name of a directory next to `checkpoints/`, such as "best": the checkpoint replaces the
                previous one there, and `restore` does not read it. `None` saves into `checkpoints/`.
                Default: None.
            wait: If False, the call returns once the state has been copied, and the directory appears
                when the background save has committed. Default: True.

        Returns:
            The directory of the checkpoint; for a checkpoint at a URL, `str(directory)` is the URL.

        Raises:
            CheckpointError: On all ranks, if the checkpoint can't be written, user state differs
                between ranks, the directory has checkpoints of an earlier run, or a newer attempt has
                taken over.
            StepError: If the Run is closed.
        """
        with self.world.timeline.during(CHECKPOINT):
            return self._save(to, wait=wait)

    def _save(self, to: str | None, *, wait: bool) -> AnyPath:
        self._check_open()
        self._settle()
        self.files.check_unused()
        self.files.check_owned()
        at = (self._recording.numbers(), self.loader.consumed)
        if to is None and self._saved is not None and self._saved[0] == at and not self.state:
            _, path, job = self._saved
            if not wait:
                return path  # even if the save fails: not all ranks may know yet
            job.join()
            if not job.failed:
                return path
        checkpoints = self.files.checkpoints if to is None else self.files.checkpoints_in(to)
        self._logged.write(wait=True)
        self.events.flush()  # so that a failure from here on loses no event of the steps in it
        self._curves.flush()
        with self.world.preparing():  # one rank may take long to write, and the others wait for it
            job = self._saves.start(checkpoints, self.step, lambda: self.contents.take(at[1]))
            path = checkpoints.where(self.step)
            if to is None:
                self._saved = (at, path, job)
            if not wait:
                return path
            try:
                return job.wait()
            finally:
                self._saves.forget(job)

    def _settle(self) -> None:
        """Look at late results and record their steps. Raises StepError for one that is not finite."""
        for each in self.train_states.values():
            each.engine.settle()
        self._recording.write_settled()

    def note(self, kind: str, values: Mapping[str, Any]) -> None:
        """Record a custom event, with the step and the position.

        Args:
            kind: Kind of the event, such as "evaluation".
            values: A dict of numbers or strings; other values are recorded as strings.

        Raises:
            StepError: If `values` is not a mapping whose keys are strings.
        """
        plain = plain_values(kind, values)
        self.events.write(kind, {"step": self.step, "position": self.loader.position, **plain})

    def log(self, values: Mapping[str, Any]) -> None:
        """Record numbers of the current step: as an event, and on rank 0 in the trackers.

        The number of a tensor on an accelerator is recorded by a later `tick`, when it has been copied.

        Args:
            values: Floats, or tensors of one element, by name.

        Raises:
            StepError: If the Run is closed, or a value is not a number.
        """
        self._check_open()
        self._logged.add(values, self.step, self.loader.position)

    def mean(self, *, window: int | None = None, **values: Any) -> dict[str, float]:
        """Add numbers of the last step, and return their means over the epoch so far.

        Call it after each step and before `tick`. Checkpoints hold the sums, so that a resumed run
        returns the same means. The first step of an epoch begins new ones. Skipped steps do not count.

        Args:
            window: Number of last steps to average over, in place of the epoch. Default: None.
            values: Numbers of the global batch, the same on all ranks, by name. A number is weighted by
                the count of the step's loss; a pair is a sum and its count. Default: none to add.

        Returns:
            The means by name; NaN where no step counts yet.

        Raises:
            StepError: If a value is not a finite number, the step has a value of this name already, no
                step was taken since the last `tick`, or `window` is not an integer, 1 or more.
        """
        self._check_open()
        if values:
            self.contents.means.add(values, window, ticked=not self._recording.moved)
            self._saved = None  # it lacks the values
        return self.contents.means.read(window)

    def _leave(self, reason: StopReason) -> NoReturn:
        """Save, and end this process with the exit code of the reason."""
        if reason.kind == "failed":
            self._saves.hear(wait=True)  # not all ranks may know by now
            self._saves.check()
        path = self.save()
        self.note(reason.kind, {"by": reason.what, "on": reason.rank, "path": path})
        self.world.print(
            f"{reason}: saved step {self.step:,} in {path}; the same command resumes from there"
        )
        raise StoppedExit(reason)

    def close(self) -> None:
        """Wait for a running save, write the remaining events, restore the signal handlers.

        Raises:
            CheckpointError: With `must_save`, if a save failed.
            StepError: If the late result of the last step is not finite.
        """
        self._end(None, sys.exception())

    def _end(self, error: BaseException | None, reason: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        late = None
        if reason is None:
            try:
                self._settle()
            except Exception as found:  # the device may have failed
                error = reason = late = found
        self._saves.hear(wait=True, within=None if error is None else LAST_WAIT)
        self._stopping.stop()  # not before: a signal would cut the save short
        self._observer.end(failed=not (reason is None or isinstance(reason, StoppedExit)))
        for guard in self._guards:
            guard.close()
        self._logged.write(wait=reason is None)
        if self._begun:
            self._recording.end(reason)
        elif error is None and reason is None:
            self._recording.tell_no_tick(self.directory, self._first, saved=self._saved is not None)
        self.events.close()
        self._curves.close()
        self.world.run_log.detach(self.log)
        self.files.release()
        if self._progress is not None:
            self._progress.close(self.step, self.loader, self.contents.means.shown(), CLOCK.wall())
        if reason is not None:
            note_step(reason, self.step)
        if late is not None:
            raise late
        if error is None:
            self._saves.check()
            self.files.check_present()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error, error)

    def _check_open(self) -> None:
        if self._closed:
            raise StepError(
                given=f"a Run in {self.directory} after its `with` block, or after close()",
                found="its events are closed",
                fix="call restore, tick and save inside `with shoal.Run(…) as run:`",
            )
        if not self.world.run_log.is_newest(self.log):
            raise CheckpointError(
                given=f"a Run in {self.directory}",
                found="a Run that this process opened there later has taken the directory over",
                fix="close a Run before you open another in its directory, or use another directory: "
                "shoal.Run('runs/b', …)",
            )

    def _begin(self) -> None:
        self.files.check_unused()
        # A value that no checkpoint can hold must raise now, not at the first save, which may come
        # with a preemption. One rank may take long over the check, as over a save.
        with self.world.timeline.during(CHECKPOINT), self.world.preparing():
            self.files.checkpoints.check_state(self.contents.form(), self.contents.info())
        for each in self.train_states.values():
            each.tell_hints()
        self._begun = True
        self.world.watchdog.begin_step()
        # By rank 0's clock on all ranks: it identifies the attempt.
        began = self.world.broadcast(round(CLOCK.wall(), 6))
        self._recording.start(began, self._config)

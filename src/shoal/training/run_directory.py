"""The files of a run: its checkpoints, its events, the lock, and the attempt number."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from shoal.checkpoint import (
    Agreement,
    AnyPath,
    Checkpoints,
    Fence,
    FencedFiles,
    RestoredCheckpoint,
    Tree,
    how_to_remove,
    is_url,
    lasting,
    masked_url,
    path_from,
    take_over,
)
from shoal.distributed.world import World
from shoal.telemetry.events import Events, path_of
from shoal.util.errors import CheckpointError

_FOLDER = re.compile(r"\w[\w-]*", re.ASCII)
_OWN = {
    "attempts",
    "checkpoints",
    "events",
    "lock",
    "report",
    "tensorboard",
    "traces",
    "wandb",
}
"""The other names in a run directory."""


class RunDirectory:
    """The directory of a run, which no other attempt uses while it is open.

    `checkpoints` is another directory or a URL for the checkpoints and the numbers of attempts; None is
    `directory` itself. The constructor creates the directory if necessary, locks it and takes a number
    for the attempt. Collective.

    Raises CheckpointError, on all ranks, if a directory can't be written or another run is open in it.
    """

    def __init__(
        self,
        directory: str | Path,
        world: World,
        *,
        checkpoints: str | Path | None,
        keep: int,
        keep_every: int | None,
    ) -> None:
        self.path = local_path(directory)
        self.absolute = self.path.absolute()  # the working directory may change
        self._agreement = Agreement(world)
        self._place: AnyPath = self._agreement.together(
            f"shoal.Run({str(directory)!r}, …)", lambda: path_from(checkpoints or self.path)
        )
        self.fence = Fence(lasting(self._place) / "attempts")
        self.checkpoints = Checkpoints(
            self._place / "checkpoints",
            world,
            keep=keep,
            keep_every=keep_every,
            files=FencedFiles(self.fence),
        )
        self.checkpoints.check()
        job, attempt = world.placement.job, world.placement.attempt
        self._lock = take_over(self.path, self.fence, world, job=job, attempt=attempt)
        events = path_of(self.path, world.rank)
        self.events = self._agreement.together(f"{events} for events", lambda: Events(events))
        self._siblings: dict[str, Checkpoints] = {}
        self._continues = False

    def checkpoints_in(self, folder: str) -> Checkpoints:
        """Return the checkpoints in `folder`, next to the usual ones; CheckpointError for its name."""
        if folder not in self._siblings:
            _check_folder(folder)
            self._siblings[folder] = self.checkpoints.sibling(folder)
        return self._siblings[folder]

    def restore(
        self, template: Tree, elsewhere: Collection[str], newest: int | None
    ) -> RestoredCheckpoint | None:
        """Load the latest complete checkpoint, with which the run continues; None if there is none.

        With `newest`, those of later steps do not count.
        """
        loaded = self.checkpoints.restore(template, elsewhere, newest)
        self._continues = True
        return loaded

    def check_unused(self) -> None:
        """Raise CheckpointError if there are checkpoints of a run that this one does not continue.

        The next restore would take the latest complete checkpoint of either run.
        """
        if self._continues:
            return
        there = self.checkpoints.newest()
        if there is not None:
            raise CheckpointError(
                given=f"training from the start in {self._place}",
                found=f"checkpoints of an earlier run (the latest: {there.name}), which the next "
                "restore would load as checkpoints of this run",
                fix="call run.restore() before the first batch, or use another directory; or, to "
                f"start a new run, {how_to_remove(self._place)}",
            )
        self._continues = True

    def check_owned(self) -> None:
        """Raise CheckpointError on all ranks if the directory or the run is no longer this attempt's.

        Collective.
        """
        given = f"saving in {self.path}"
        self._agreement.together(given, self.check_present)
        self._agreement.together(given, self.fence.check)

    def check_present(self) -> None:
        """Raise CheckpointError if the directory has been removed since it was opened.

        A concurrent save may have created it again, without its earlier contents.
        """
        if not any((self.absolute / name).exists() for name in ("lock", "events")):
            raise CheckpointError(
                given=f"a Run in {self.path}",
                found=f"{self.absolute} was removed while the run was open: its checkpoints and "
                "events are lost",
                fix="start the run again, in a directory that no clean-up removes; to keep the model "
                "that is in memory, call shoal.export(model, 'model.safetensors')",
            )

    def release(self) -> None:
        """Let another attempt take the directory over."""
        if self._lock is not None:
            self._lock.release()


def local_path(given: str | Path) -> Path:
    """Return the directory of a run; raise CheckpointError for other values."""
    if not isinstance(given, str | os.PathLike):
        raise CheckpointError(
            given=f"shoal.Run({type(given).__name__}, …)",
            found="the first argument is a directory",
            fix="shoal.Run('runs/a', step, loader)",
        )
    if is_url(given):
        raise CheckpointError(
            given=f"shoal.Run({masked_url(str(given))!r}, …)",
            found="events and the lock need a directory; only checkpoints can be elsewhere",
            fix="shoal.Run('runs/a', …, checkpoints='s3://bucket/a')",
        )
    return Path(given)


def _check_folder(name: object) -> None:
    if isinstance(name, str) and _FOLDER.fullmatch(name) and name not in _OWN:
        return
    raise CheckpointError(
        given=f"run.save(to={name!r})",
        found="not a valid name of a directory next to checkpoints/: letters, digits, _ and -, and "
        f"none of {', '.join(sorted(_OWN))}",
        fix="run.save(to='best')",
    )

"""Saving and restoring, agreed by all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.async_save import BackgroundSave, BackgroundSaver
from shoal.checkpoint.collective_errors import Agreement, Ranks
from shoal.checkpoint.directory_names import TRASH, step_of
from shoal.checkpoint.disk_and_remote import store_in
from shoal.checkpoint.filesystem import Files
from shoal.checkpoint.paths import AnyPath, how_to_remove, lasting, open_file
from shoal.checkpoint.state_tree import (
    Tree,
    encode_checkpoint,
    names_in,
    put_together,
    take_apart,
)
from shoal.checkpoint.store import (
    DamageError,
    Manifest,
    Store,
    damage,
    is_complete,
    manifest_of,
)
from shoal.checkpoint.tensor_index import STATE, read_tensor_index
from shoal.util.arguments import check_integer
from shoal.util.errors import CheckpointError


@dataclass(frozen=True)
class SkippedDirectory:
    """A directory that a restore did not use, and the reason."""

    path: AnyPath
    reason: str


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A restored checkpoint.

    `rank_state` is None if another number of ranks saved the checkpoint. `skipped` lists the newer
    checkpoints that are damaged, newest first. The caller of the restore prints them.
    """

    path: AnyPath
    step: int
    state: Tree
    rank_state: Tree | None
    info: dict[str, Any]
    skipped: tuple[SkippedDirectory, ...]


Wanted = tuple[Tree | None, Collection[str]]
"""The arguments of a restore on one rank: the template, and the paths that it does not read."""


class Checkpoints:
    """The checkpoints of a run, below one directory that all ranks see.

    All methods are collective, and an error on one rank is the same CheckpointError on all. One save
    runs at a time; another save or a restore waits for it.
    """

    def __init__(
        self,
        directory: AnyPath,
        world: Ranks,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        files: Files | None = None,
    ) -> None:
        """Keep the newest `keep` complete checkpoints, all newer ones, and each `keep_every`-th."""
        check_integer(CheckpointError, "", "keep", keep, 1)
        if keep_every is not None:
            check_integer(CheckpointError, "", "keep_every", keep_every, 1, usual=10_000)
        self.directory = directory
        self._world = world
        self._agreement = Agreement(world)
        self._keep = keep
        self._keep_every = keep_every
        self._files = files or Files()
        # The working directory may change, even while a save runs in the background.
        self._store: Store[Any] = store_in(lasting(directory), self._files)
        self._only_last = False
        self.background = BackgroundSaver(world)
        # Steps whose files this process has seen verified, by writing or by reading them.
        self._verified: set[int] = set()
        self.interrupted: tuple[str, ...] = ()
        """Names of the interrupted saves that the last restore found; on rank 0 only."""

    def check(self) -> None:
        """Raise CheckpointError unless every rank can write into the directory."""
        self._agreement.together(
            f"{self.directory} for checkpoints", lambda: self._store.probe(self._world.rank)
        )

    def sibling(self, name: str) -> Checkpoints:
        """Return the checkpoints in the directory `name` next to this one.

        They keep only the last saved one, of any step. Each of the two waits for the saves of the
        other.
        """
        made = Checkpoints(self.directory.parent / name, self._world, keep=1, files=self._files)
        made._store = store_in(self._store.directory.parent / name, self._files)
        made._only_last = True
        made.background = self.background
        return made

    def newest(self) -> AnyPath | None:
        """Return the newest directory that may be a checkpoint, complete or not."""
        given = f"checkpoints in {self.directory}"
        rank = self._world.rank
        found = self._agreement.together(given, lambda: [] if rank else self._store.candidates())
        name = self._world.broadcast(found[0].name if found else None)
        return None if name is None else self.directory / name

    def where(self, step: int) -> AnyPath:
        """Return the directory of the save of `step` that was started last, once it exists."""
        return self.directory / self._store.where(step).name  # type: ignore[no-any-return]

    def check_state(self, state: Tree, info: Mapping[str, Any]) -> None:
        """Raise CheckpointError if these can't be saved; write and copy nothing."""
        given = f"checkpoints in {self.directory}"
        self._agreement.together(given, lambda: encode_checkpoint(state, {}, info, self._world.rank))

    def save(
        self,
        step: int,
        state: Tree,
        rank_state: Tree,
        info: Mapping[str, Any],
        *,
        join: bool = False,
    ) -> AnyPath:
        """Save a checkpoint, wait until it is on the disk, and return its directory.

        The arguments are those of `start`.
        """
        return self.start(step, state, rank_state, info, join=join).wait()

    def start(
        self,
        step: int,
        state: Tree,
        rank_state: Tree,
        info: Mapping[str, Any],
        *,
        join: bool = False,
    ) -> BackgroundSave[AnyPath]:
        """Copy the state and save it in the background; the result of the save is its directory.

        When this returns, the state may change. If the previous save is still running, this call waits
        for it. `state` is the same on all ranks except for the shards of its DTensors. With `join`,
        its dicts may have different keys on different ranks, and the union is saved. `rank_state`
        belongs to this rank. `info` holds plain values only, and rank 0's are saved. Raises
        CheckpointError, before anything is written, for values that can't be stored. A checkpoint
        of the same step is replaced once the new one is complete.
        """
        # DCP imports sympy, which takes half a second: import it only for a save.
        from shoal.checkpoint.save import SaveAttempt

        given = f"a checkpoint of step {step} in {self.directory}"
        attempt = SaveAttempt(
            step,
            self._world,
            self._store,
            self.background,
            state,
            rank_state,
            info,
            given=given,
            join=join,
        )

        def finish() -> AnyPath:
            name = attempt.finish()
            self._verified.add(step)
            if self._world.rank == 0:
                self._retire(step)
            return self.directory / name

        return self.background.start(finish)

    def restore(
        self,
        template: Tree | None = None,
        elsewhere: Collection[str] = (),
        newest: int | None = None,
    ) -> RestoredCheckpoint | None:
        """Load the latest complete checkpoint; return None if there are no checkpoints.

        With `newest`, those of later steps do not count.
        Tensors are loaded on the CPU. Where `template` has a tensor of the same path and shape, that
        tensor is filled in place (a DTensor by its shards) and appears in the result. Where it has a
        DTensor in place of a dict of tensors of its shape (the optimizer state of a parameter),
        these are sharded like it. Otherwise the template is ignored. Tensors whose path, or the path
        of a dict around them, is in `elsewhere` are not read: they are on the meta device. Raises
        CheckpointError if there are checkpoints and none is complete.
        """
        given = f"checkpoints in {self.directory}"
        self.background.wait()
        found = self._world.broadcast(
            self._agreement.together(
                given, lambda: self._survey(newest) if self._world.rank == 0 else None
            )
        )
        skipped: list[SkippedDirectory] = []
        for name, text, invalid in found:
            path = self._store.directory / name
            if text is None:
                skipped.append(SkippedDirectory(self.directory / name, invalid))
                continue
            manifest = Manifest.parse(text.encode())
            reason = self._damage(path, manifest)
            if reason is not None:
                skipped.append(SkippedDirectory(self.directory / name, reason))
                continue
            loaded = self._load(path, manifest, (template, elsewhere), tuple(skipped))
            self._verified.add(loaded.step)
            return loaded
        if skipped:
            listing = "; ".join(f"{one.path.name}: {one.reason}" for one in skipped)
            raise CheckpointError(
                given=given,
                found=f"none is complete: {listing}",
                fix=f"to start a new run, {how_to_remove(self.directory, '/step-*')} "
                "(or choose another directory)",
            )
        return None

    def _retire(self, saved: int) -> None:
        try:
            found = self._store.candidates()
            oldest = self._oldest_kept(found)
            for path in found:
                step = step_of(path)
                old = step != saved if self._only_last else step < oldest
                if old and (self._keep_every is None or step % self._keep_every):
                    self._store.remove(path)
        except (OSError, CheckpointError) as error:
            # The new checkpoint is safe, so training need not stop. Nor does a newer attempt
            # end training here: only rank 0 runs this, and the next save reports it on all ranks.
            warnings.warn(f"an old checkpoint can't be removed: {error}", stacklevel=3)

    def _oldest_kept(self, found: list[Any]) -> int:
        """Return the step before which checkpoints can be removed; 0 if all are kept.

        An attempt that ends after one save has verified two checkpoints: that one and the one it
        restored. It judges older checkpoints by the sizes of their files.
        """
        kept = sorted(self._verified, reverse=True)[: self._keep]
        if len(kept) < min(2, self._keep):
            return 0
        for path in found:
            if len(kept) < self._keep and step_of(path) < kept[-1] and is_complete(path):
                kept.append(step_of(path))
        return kept[-1] if len(kept) == self._keep else 0

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of steps after `step`."""

        def remove() -> None:
            for path in self._store.candidates() if self._world.rank == 0 else ():
                if step_of(path) > step:
                    self._store.remove(path)

        self._agreement.together(f"checkpoints in {self.directory}", remove)
        self._verified = {each for each in self._verified if each <= step}

    def _survey(self, newest: int | None) -> list[tuple[str, str | None, str]]:
        """Return the name of each candidate with its manifest, or with None and the reason."""
        left = self._store.leftovers()
        self.interrupted = tuple(path.name for path in left if not path.name.endswith(TRASH))
        with suppress(OSError):
            # A restore works without tidying: the directory may be another user's, or read-only.
            self._store.tidy()
        found: list[tuple[str, str | None, str]] = []
        for path in self._store.candidates():
            if newest is not None and step_of(path) > newest:
                continue
            try:
                found.append((path.name, manifest_of(path).render().decode(), ""))
            except DamageError as error:
                found.append((path.name, None, str(error)))
        return found

    def _damage(self, path: AnyPath, manifest: Manifest) -> str | None:
        world = self._world
        mine = self._agreement.together(
            f"the checkpoint {path}", lambda: damage(path, manifest, share=world.rank, of=world.size)
        )
        found = world.gather(mine)
        seen = ((reason, rank) for rank, reason in enumerate(found) if reason is not None)
        return next((f"{reason} (seen by rank {rank})" for reason, rank in seen), None)

    def _load(
        self, path: AnyPath, manifest: Manifest, wanted: Wanted, skipped: tuple[SkippedDirectory, ...]
    ) -> RestoredCheckpoint:
        from shoal.checkpoint.tensors import load_tensors

        shown = self.directory / path.name
        given = f"the checkpoint {shown}"
        content, targets = self._agreement.together(
            given, lambda: self._targets(path, manifest, wanted)
        )
        read = {name: tensor for name, tensor in targets.items() if not tensor.is_meta}

        def load() -> RestoredCheckpoint:
            load_tensors(path, content["tensors"], read)
            own = self._own(content, manifest)
            return RestoredCheckpoint(
                path=shown,
                step=manifest.step,
                state=put_together(content["state"], targets),
                rank_state=None if own is None else put_together(own, targets),
                info=put_together(manifest.info, {}),
                skipped=skipped,
            )

        return self._agreement.together(given, load)

    def _targets(
        self, path: AnyPath, manifest: Manifest, wanted: Wanted
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        from shoal.checkpoint.tensors import allocate

        template, elsewhere = wanted
        with open_file(path / STATE) as file:
            content = read_tensor_index(file.read(), manifest)
        offered = {} if template is None else take_apart(template, "state").tensors
        targets: dict[str, torch.Tensor] = {}
        for name in names_in([content["state"], self._own(content, manifest)]):
            row = content["tensors"][name]
            tensor = offered.get(name)
            if elsewhere and any(path in elsewhere for path in _paths(name)):
                tensor = allocate(row, device="meta")
            elif tensor is None or list(tensor.shape) != row["shape"]:
                tensor = allocate(row, like=offered.get(name.rpartition("/")[0]))
            targets[name] = tensor
        return content, targets

    def _own(self, content: dict[str, Any], manifest: Manifest) -> Any:
        same_size = manifest.world_size == self._world.size
        return content["rank_state"][self._world.rank] if same_size else None


def _paths(name: str) -> Iterator[str]:
    """Yield the path of a tensor, then those of the dicts around it."""
    parts = name.split("/")
    for end in range(len(parts), 0, -1):
        yield "/".join(parts[:end])

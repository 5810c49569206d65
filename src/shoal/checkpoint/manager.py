"""Saving and restoring, agreed by all ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shoal.checkpoint.async_save import Aside, BackgroundSave
from shoal.checkpoint.collective_errors import Agreement, Ranks, first_failure
from shoal.checkpoint.commit import store_in
from shoal.checkpoint.directory_names import step_of
from shoal.checkpoint.filesystem import Files
from shoal.checkpoint.paths import AnyPath, how_to_remove, lasting, open_file
from shoal.checkpoint.state_tree import Parts, Tree, joined, names_in, put_together, take_apart
from shoal.checkpoint.store import (
    DamageError,
    FileRecord,
    Manifest,
    Store,
    damage,
    is_complete,
    manifest_of,
)
from shoal.checkpoint.tensor_index import STATE, read_tensor_index
from shoal.util.errors import CheckpointError
from shoal.util.text import masked

if TYPE_CHECKING:
    from shoal.checkpoint.tensors import Plan


@dataclass(frozen=True)
class Skipped:
    """A directory that a restore passed over, and why."""

    path: AnyPath
    reason: str


@dataclass(frozen=True)
class Loaded:
    """A restored checkpoint.

    `rank_state` is None when it was saved by another number of ranks. `skipped` are the newer ones
    that were found damaged, newest first: whoever restores prints them.
    """

    path: AnyPath
    step: int
    state: Tree
    rank_state: Tree | None
    info: dict[str, Any]
    skipped: tuple[Skipped, ...]


Wanted = tuple[Tree | None, Collection[str]]
"""What a rank restores: a template, and what it leaves to others."""


@dataclass(frozen=True)
class _Contents:
    """What a save writes besides the tensors, encoded; the `size` of those, in bytes, on all ranks; and
    why this rank's could not be taken over."""

    given: str
    step: int
    state: Any
    rank_state: Any
    info: Any
    table: dict[str, Any]
    join: bool
    size: int
    failure: CheckpointError | None


class _Written(NamedTuple):
    """What a rank has come to: the record of its file, its own state, its part of a joined one."""

    record: FileRecord | CheckpointError
    rank_state: Any
    state: Any


class Checkpoints:
    """The checkpoints of a run, below one directory that all ranks see.

    All methods are collective, and a failure on one rank is the same CheckpointError on all. One save
    at a time is under way; all else waits for it.
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
        """Keep the newest `keep` ones known to be whole, everything newer than these, and those of
        every `keep_every`-th step.
        """
        if type(keep) is not int or keep < 1:
            raise CheckpointError(
                given=f"keep={keep!r}",
                found="that is no number of checkpoints to keep",
                fix="keep=1 or more",
            )
        if keep_every is not None and (type(keep_every) is not int or keep_every < 1):
            raise CheckpointError(
                given=f"keep_every={keep_every!r}",
                found="the checkpoints of every so many steps are kept: 1 or more",
                fix="keep_every=10_000, or leave it out",
            )
        self.directory = directory
        self._world = world
        self._agreement = Agreement(world)
        self._keep = keep
        self._keep_every = keep_every
        self._files = files or Files()
        # The working directory may change, also while a save is under way aside.
        self._store: Store[Any] = store_in(lasting(directory), self._files)
        self._sole = False
        self.aside = Aside(world)
        # Steps whose files this process has seen verified, by writing or by reading them.
        self._verified: set[int] = set()

    def check(self) -> None:
        """Raise CheckpointError unless every rank can write into the directory."""
        self._agreement.together(
            f"{self.directory} for checkpoints", lambda: self._store.probe(self._world.rank)
        )

    def beside(self, name: str) -> Checkpoints:
        """Those in the directory `name` beside this one: only the one saved last is kept, whatever its
        step. They wait for each other's saves."""
        made = Checkpoints(self.directory.parent / name, self._world, keep=1, files=self._files)
        made._store = store_in(self._store.directory.parent / name, self._files)
        made._sole = True
        made.aside = self.aside
        return made

    def newest(self) -> AnyPath | None:
        """The newest directory that may be a checkpoint, whole or not."""
        given = f"checkpoints in {self.directory}"
        rank = self._world.rank
        found = self._agreement.together(given, lambda: [] if rank else self._store.candidates())
        name = self._world.broadcast(found[0].name if found else None)
        return None if name is None else self.directory / name

    def where(self, step: int) -> AnyPath:
        """The directory of the save of `step` that was started last, once it is there."""
        return self.directory / self._store.where(step).name  # type: ignore[no-any-return]

    def check_state(self, state: Tree, info: Mapping[str, Any]) -> None:
        """Raise CheckpointError where these are not what can be saved; nothing is written or copied."""
        given = f"checkpoints in {self.directory}"
        self._agreement.together(given, lambda: self._take_apart(state, {}, info))

    def save(
        self,
        step: int,
        state: Tree,
        rank_state: Tree,
        info: Mapping[str, Any],
        *,
        join: bool = False,
    ) -> AnyPath:
        """Save; when this returns, the checkpoint is on the disk. Returns its directory.

        As `start`, and waits.
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
        """Take the state over, and save it while training goes on; the job gives the directory.

        When this returns, the state may change. Waits for the save before, if that is under way.
        `state` is the same on all ranks but for the shards of its DTensors; with `join` its dicts may
        have different keys, which are joined. `rank_state` is this rank's own, `info` holds plain
        values only, rank 0's are kept. What can't be stored is refused before anything is written. A
        checkpoint of the same step is replaced; until the new one is whole the old one stays.
        """
        # DCP brings sympy and half a second, which is for those who save.
        from shoal.checkpoint.tensors import chunks_of

        given = f"a checkpoint of step {step} in {self.directory}"
        self.aside.wait()
        self.aside.prepare()
        self._store.expect(step)
        parts, own_parts, info_json = self._agreement.together(
            given, lambda: self._take_apart(state, rank_state, info)
        )
        tensors = parts.tensors | own_parts.tensors
        plan = self._planned(given, tensors)
        while not self.aside.fits:  # a rank has ended since, whose part others have to write
            self.aside.prepare()
            plan = self._planned(given, tensors)
        staging = self.aside.staging
        taken = self._agreement.attempt(given, lambda: staging.fill(chunks_of(plan, tensors)))
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        contents = _Contents(
            given, step, parts.json, own_parts.json, info_json, plan.table, join, size, taken
        )
        return self.aside.start(lambda: self._write(contents))

    def _planned(self, given: str, tensors: dict[str, torch.Tensor]) -> Plan:
        """The plan of the save before where it fits all ranks' tensors, else a new one; collective."""
        from shoal.checkpoint.tensors import form_of, global_plan, local_plan

        form = form_of(tensors)
        last = self.aside.plan
        same = last is not None and last.form == form
        if last is None or not all(self._world.gather(same)):
            rank = self._world.rank
            mine = self._agreement.together(given, lambda: local_plan(tensors, first=rank == 0))
            all_plans = self._world.gather(mine)
            last = self._agreement.together(given, lambda: global_plan(form, all_plans, rank, _file_of))
            self.aside.plan = last
        return last

    def restore(self, template: Tree | None = None, elsewhere: Collection[str] = ()) -> Loaded | None:
        """Load the newest checkpoint that is whole; None if there is none at all.

        Tensors come back on the CPU. Where `template` has a tensor of the same path and shape, that
        one is filled in place (DTensors by their shards) and appears in the result; where it has a
        DTensor in the place of what holds tensors of its shape (moments of a parameter), these are
        divided like it; otherwise the template is ignored. Tensors whose path, or that of a dict
        around them, is in `elsewhere` are not read: they come back on the meta device. Raises
        CheckpointError if there are checkpoints and none is whole.
        """
        given = f"checkpoints in {self.directory}"
        self.aside.wait()
        found = self._world.broadcast(
            self._agreement.together(given, lambda: self._survey() if self._world.rank == 0 else None)
        )
        skipped: list[Skipped] = []
        for name, text, invalid in found:
            path = self._store.directory / name
            if text is None:
                skipped.append(Skipped(self.directory / name, invalid))
                continue
            manifest = Manifest.parse(text.encode())
            reason = self._damage(path, manifest)
            if reason is not None:
                skipped.append(Skipped(self.directory / name, reason))
                continue
            loaded = self._load(path, manifest, (template, elsewhere), tuple(skipped))
            self._verified.add(loaded.step)
            return loaded
        if skipped:
            listing = "; ".join(f"{one.path.name}: {one.reason}" for one in skipped)
            raise CheckpointError(
                given=given,
                found=f"none is whole: {listing}",
                fix=f"to start afresh, {how_to_remove(self.directory, '/step-*')} "
                "(or choose another directory)",
            )
        return None

    def _take_apart(
        self, state: Tree, rank_state: Tree, info: Mapping[str, Any]
    ) -> tuple[Parts, Parts, Any]:
        parts = take_apart(state, "state")
        own_parts = take_apart(rank_state, "rank", str(self._world.rank))
        described = take_apart(masked(dict(info)), "info")
        if described.tensors:
            raise CheckpointError(
                given=f"the info of a checkpoint, at {next(iter(described.tensors))}",
                found="a tensor or an array",
                fix="put it into the state",
            )
        return parts, own_parts, described.json

    def _write(self, contents: _Contents) -> AnyPath:
        """Aside: write this rank's file, and on rank 0 commit when all have; the directory."""
        outcome = self._agreement.attempt(contents.given, lambda: self._write_all(contents))
        if isinstance(outcome, CheckpointError):
            raise outcome
        self._verified.add(contents.step)
        if self._world.rank == 0:
            self._retire(contents.step)
        return self.directory / outcome

    def _write_all(self, contents: _Contents) -> str | CheckpointError:
        """The name of the directory, or the failure of one rank, on all of them."""
        rank, step, given = self._world.rank, contents.step, contents.given
        begun = None
        if rank == 0:
            begun = self._agreement.attempt(
                given, lambda: self._store.begin(step, contents.size, self._world.size)
            )
        begun = self.aside.tell(begun)
        if begun is not None:
            return begun  # type: ignore[no-any-return]
        record: FileRecord | CheckpointError | None = contents.failure
        if record is None:
            blocks = self.aside.staging.blocks()
            record = self._agreement.attempt(
                given, lambda: self._store.write(step, _file_of(rank), blocks)
            )
        part = contents.state if contents.join else None
        mine = _Written(record, contents.rank_state, part)
        written = self._agreement.attempt(given, lambda: self.aside.collect(mine))
        outcome = self._commit(contents, written) if rank == 0 else None
        return self.aside.tell(outcome)  # type: ignore[no-any-return]

    def _commit(
        self, contents: _Contents, written: list[_Written] | CheckpointError
    ) -> str | CheckpointError:
        if isinstance(written, CheckpointError):  # one has ended
            self._store.discard(contents.step)
            return written
        failure = first_failure([part.record for part in written])
        if failure is not None:
            self._store.discard(contents.step)
            return failure

        def commit() -> str:
            step = contents.step
            records: dict[str, Any] = {_file_of(rank): part.record for rank, part in enumerate(written)}
            state = contents.state
            for part in written:
                state = joined(state, part.state)
            content = {
                "state": state,
                "rank_state": [part.rank_state for part in written],
                "tensors": contents.table,
            }
            text = json.dumps(content, separators=(",", ":"), allow_nan=False)
            try:
                records[STATE] = self._store.write(step, STATE, [text.encode()])
                # One may have ended since, with its part written: the world is smaller then.
                self._store.seal(step, Manifest(step, len(written), contents.info, records))
            except Exception:
                self._store.discard(step)
                raise
            return str(self._store.publish(step).name)

        return self._agreement.attempt(contents.given, commit)

    def _retire(self, saved: int) -> None:
        try:
            found = self._store.candidates()
            oldest = self._oldest_kept(found)
            for path in found:
                step = step_of(path)
                old = step != saved if self._sole else step < oldest
                if old and (self._keep_every is None or step % self._keep_every):
                    self._store.remove(path)
        except (OSError, CheckpointError) as error:
            # The new one is safe, so this is no reason to stop. Nor is a newer attempt, here: of it
            # the next save tells all ranks, and this is rank 0 alone.
            warnings.warn(f"an old checkpoint can't be removed: {error}", stacklevel=3)

    def _oldest_kept(self, found: list[Any]) -> int:
        """The step before which none is needed any more; 0 where all are.

        An attempt that ends after one save has seen two whole ones, that one and the one restored.
        Older ones, of which it has seen none, then count by the sizes of their files.
        """
        kept = sorted(self._verified, reverse=True)[: self._keep]
        if len(kept) < min(2, self._keep):
            return 0
        for path in found:
            if len(kept) < self._keep and step_of(path) < kept[-1] and is_complete(path):
                kept.append(step_of(path))
        return kept[-1] if len(kept) == self._keep else 0

    def _survey(self) -> list[tuple[str, str | None, str]]:
        """Of each candidate its name and its manifest, or None and why that is invalid."""
        with suppress(OSError):
            # Reading needs no tidy directory: it may be someone else's, or read-only.
            self._store.tidy()
        found: list[tuple[str, str | None, str]] = []
        for path in self._store.candidates():
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
        self, path: AnyPath, manifest: Manifest, wanted: Wanted, skipped: tuple[Skipped, ...]
    ) -> Loaded:
        from shoal.checkpoint.tensors import load_tensors

        told = self.directory / path.name
        given = f"the checkpoint {told}"
        content, targets = self._agreement.together(
            given, lambda: self._targets(path, manifest, wanted)
        )
        read = {name: tensor for name, tensor in targets.items() if not tensor.is_meta}
        failure = load_tensors(path, content["tensors"], read)

        def assemble() -> Loaded:
            if failure is not None:
                raise failure
            own = self._own(content, manifest)
            return Loaded(
                path=told,
                step=manifest.step,
                state=put_together(content["state"], targets),
                rank_state=None if own is None else put_together(own, targets),
                info=put_together(manifest.info, {}),
                skipped=skipped,
            )

        return self._agreement.together(given, assemble)

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


def _file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _paths(name: str) -> Iterator[str]:
    """The path of a tensor, and those of the dicts around it."""
    parts = name.split("/")
    for end in range(len(parts), 0, -1):
        yield "/".join(parts[:end])

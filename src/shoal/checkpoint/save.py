"""One save, from its values to the commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shoal.checkpoint.async_save import BackgroundSaver
from shoal.checkpoint.collective_errors import Agreement, Ranks, RankZeroAgreement, outcome_of
from shoal.checkpoint.state_tree import Tree, encode_checkpoint, joined
from shoal.checkpoint.store import FileRecord, Manifest, Store
from shoal.checkpoint.tensor_index import STATE
from shoal.checkpoint.tensors import WritePlan, chunks_of, file_of, form_of, global_plan, local_plan


class RankPart(NamedTuple):
    """The part of a checkpoint from one rank: the record of its file, its rank state, and its state.

    `state` is None unless the dicts of all ranks are joined.
    """

    record: FileRecord
    rank_state: Any
    state: Any


class SaveAttempt:
    """One save: it begins on the caller's thread, and `finish` runs in the background.

    The constructor waits for the previous save, checks the values, decides which rank writes which
    tensors, and copies those of this rank. When it returns, the values may change. With `join`, the
    dicts of `state` may have other keys on each rank.

    `finish` calls `write`, `collect` and `commit`, which raise the errors of their rank; `write` raises
    those of the copy, so that training does not wait until all ranks have copied. The constructor and
    `finish` are collective, and raise the same CheckpointError on all ranks, about `given`.
    """

    def __init__(
        self,
        step: int,
        world: Ranks,
        store: Store[Any],
        background: BackgroundSaver,
        state: Tree,
        rank_state: Tree,
        info: Mapping[str, Any],
        *,
        given: str,
        join: bool,
    ) -> None:
        self._step = step
        self._world = world
        self._store = store
        self._background = background
        self._given = given
        self._join = join
        background.wait()
        background.prepare()
        store.expect(step)
        self._together = Agreement(world).together
        parts, own_parts, self._info = self._together(
            given, lambda: encode_checkpoint(state, rank_state, info, world.rank)
        )
        self._state, self._rank_state = parts.json, own_parts.json
        tensors = parts.tensors | own_parts.tensors
        plan = self._plan(tensors)
        while not background.fits:  # a rank has ended since, and others have to write its tensors
            background.prepare()
            plan = self._plan(tensors)
        self._table = plan.table
        self._bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._copied = outcome_of(lambda: background.staging.fill(chunks_of(plan, tensors)))
        # In the background the world may lose ranks and renumber the others.
        self._rank, self._size = world.rank, world.size
        self._ranks = RankZeroAgreement(background, self._rank, given)

    def _plan(self, tensors: dict[str, torch.Tensor]) -> WritePlan:
        """Return the plan of the previous save if it fits the tensors of all ranks, or a new plan."""
        form = form_of(tensors)
        plan = self._background.plan
        same = plan is not None and plan.form == form
        if plan is None or not all(self._world.gather(same)):
            rank, together = self._world.rank, self._together
            mine = together(self._given, lambda: local_plan(tensors, first=rank == 0))
            all_plans = self._world.gather(mine)
            plan = together(self._given, lambda: global_plan(form, all_plans, rank))
            self._background.plan = plan
        return plan

    def finish(self) -> str:
        """Write, collect and commit; return the name of the checkpoint's directory."""
        self._ranks.decide(self._make_room)
        part = outcome_of(self.write)
        return self._ranks.decide(lambda: self.commit(self.collect(part)))

    def _make_room(self) -> None:
        if self._rank == 0:
            self._store.begin(self._step, self._bytes, self._size)

    def write(self) -> RankPart:
        """Write the tensors of this rank."""
        self._copied.result()
        blocks = self._background.staging.blocks()
        record = self._store.write(self._step, file_of(self._rank), blocks)
        return RankPart(record, self._rank_state, self._state if self._join else None)

    def collect(self, part: Future[RankPart]) -> list[RankPart]:
        """Return the parts of all ranks on rank 0, and an empty list on the others."""
        with self._discarded_on_error():
            return self._ranks.collect(part)

    def commit(self, parts: list[RankPart]) -> str:
        """On rank 0, write the values and the manifest; return the directory's name.

        The checkpoint exists once the manifest is written; an error before that discards it.
        """
        if self._rank != 0:
            return ""
        state = self._state
        with self._discarded_on_error():
            for part in parts:
                state = joined(state, part.state)
            content = {
                "state": state,
                "rank_state": [part.rank_state for part in parts],
                "tensors": self._table,
            }
            text = json.dumps(content, separators=(",", ":"), allow_nan=False)
            records = {file_of(rank): part.record for rank, part in enumerate(parts)}
            records[STATE] = self._store.write(self._step, STATE, [text.encode()])
            # A rank may have ended since it wrote its part: the world is smaller then.
            self._store.seal(self._step, Manifest(self._step, len(parts), self._info, records))
        published = self._store.publish(self._step)
        self._store.confirm(published)
        return str(published.name)

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if self._rank == 0:
                self._store.discard(self._step)
            raise

"""Records of one run of a script, as the hooks of its ranks wrote them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from shoal.tools.verify.operations import TracedOperation, read_operation

GENERATORS = ("python", "numpy", "torch")
ACCELERATE = "BatchSamplerShard"
"""Accelerate's class of samplers, which give each rank some batches of another sampler."""
TIMED_OUT = 124
"""The exit code of a run that did not end within its time limit."""


@dataclass(frozen=True, kw_only=True)
class ObserverOptions:
    """The directory of the records, the script's root, and the steps at which ranks end.

    The operations of step `trace_at` are recorded too. Each shoal.Loader gets `micro_batches` times as
    many micro-batches. With `losses`, the loss of each step is recorded too.
    """

    folder: str
    root: str
    stop_after: int
    kill_at: int | None = None
    trace_at: int | None = None
    micro_batches: int = 1
    losses: bool = False


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A tensor, or one shard of it, by its checksum, its norm and one fixed projection.

    `place` is the place of a shard's first element in the full tensor, None for a full tensor.
    """

    checksum: str
    norm: float
    projection: float
    place: tuple[int, ...] | None = None


class LoaderKey(NamedTuple):
    """The key of a loader on all ranks: its place, and its number among the loaders of this place.

    The place has the lines of the script's calls, the innermost first. Ranks may build other loaders
    elsewhere.
    """

    place: str
    number: int


Pass: TypeAlias = tuple[LoaderKey, int]
"""A loader, and the number of a pass over it."""


@dataclass(frozen=True, kw_only=True)
class DeliveredBatch:
    """The indices of one batch: which loader, and the number of the pass over it."""

    loader: LoaderKey
    epoch: int
    indices: tuple[Any, ...]
    training: bool


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One call of Optimizer.step on one rank.

    `parameters_before`, `optimizer_before`, `buffers_before` and `generators` are checksums of the
    state before the step; `parameters` and `gradients` are by name, after and before it.
    `scheduler_steps` are the most steps of one scheduler since the last step of its optimizer, which is
    this one. `unclipped` are the gradients before the first clipping, empty if none were clipped.
    `distributed` is false if the rank had no process group. Of DistributedDataParallel, `wrapped` are
    the names of its parameters, `outside` the lines that call the modules of others,
    `wrapper_calls` the calls since the last step, and `synchronized` whether the last of them was
    outside of `no_sync`. `forward_line` called the model; `reduce_line` called a reduction over ranks
    after the last backward pass, `early_line` before it.
    """

    step: int
    parameters_before: str
    optimizer_before: str
    buffers_before: str
    generators: Mapping[str, str]
    lr: tuple[float, ...]
    gradients: Mapping[str, Sketch]
    parameters: Mapping[str, Sketch]
    batches: tuple[DeliveredBatch, ...]
    scheduler_steps: int
    scheduler_line: str = ""
    unclipped: Mapping[str, Sketch] = field(default_factory=dict)
    clip_line: str = ""
    line: str = ""
    forward_line: str = ""
    reduce_line: str = ""
    early_line: str = ""
    distributed: bool = True
    wrapped: frozenset[str] = frozenset()
    outside: Mapping[str, str] = field(default_factory=dict)
    wrapper_calls: int = 0
    synchronized: bool = True

    @property
    def sharded(self) -> bool:
        """Whether this rank holds shards of parameters."""
        return any(value.place is not None for value in self.parameters.values())

    @property
    def samples(self) -> tuple[Any, ...]:
        """The indices with which this rank trained since its last step."""
        return tuple(i for batch in self.batches if batch.training for i in batch.indices)

    @property
    def computed(self) -> Mapping[str, Sketch]:
        """The gradients before they were clipped, which may hide their scale."""
        return {**self.gradients, **self.unclipped}


@dataclass(frozen=True, kw_only=True)
class LossRecord:
    """The loss of one optimizer step on one rank.

    It is that of a StepResult (`shoal`), whose `count` is its divisor, or the sum over `count` backward
    passes.
    """

    loss: float
    count: float
    shoal: bool


@dataclass(frozen=True, kw_only=True)
class LoaderRecord:
    """A DataLoader or shoal.Loader: its dataset's size, its sampler, and the line that built it.

    `part` is the number of the part of each global batch that this rank gets from a shoal.Loader; ranks
    with the same number read the same samples. `samples` has the indices of a subset in its innermost
    dataset, None if the loader is for all of the dataset or if they are not known. `draws_observed` is
    false if the dataset could draw from global generators unseen. `micro_batches` is that of a
    shoal.Loader. `dataset` has the same number for the same innermost dataset.
    """

    loader: LoaderKey
    size: int | None
    sampler: str
    shuffle: bool
    drop_last: bool
    line: str
    replacement: bool = False
    part: int | None = None
    samples: tuple[int, ...] | None = None
    draws_observed: bool = True
    micro_batches: int = 1
    dataset: int | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class DrawRecord:
    """A draw from a global generator while a dataset read a sample."""

    generator: str
    line: str
    worker: int | None


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file that a rank replaced, by its path in the script's directory, after `step` steps."""

    path: str
    step: int
    line: str


@dataclass(frozen=True, kw_only=True)
class ReducedMetric:
    """This rank's part of a tensor that an evaluation after `step` steps sums or averages over ranks.

    `outputs` are sums over the model's outputs that this rank evaluated before.
    """

    step: int
    line: str
    values: tuple[float, ...]
    outputs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class CalledFunction:
    """The first call of a function at one line of the script, in the order of the calls.

    `what` is one of `shoal.tools.verify.observed_calls.CALLS`.
    """

    what: str
    line: str


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The records of one rank in one attempt.

    `complete` holds (loader, epoch) of each pass that reached its end. `delivered` holds all
    batches. `layers` maps a kind of layer (`dropout`, `batch norm`) to the class's name. `operations`
    are those of the traced step.
    """

    rank: int
    steps: tuple[StepRecord, ...] = ()
    losses: tuple[LossRecord, ...] = ()
    loaders: Mapping[LoaderKey, LoaderRecord] = field(default_factory=dict)
    delivered: tuple[DeliveredBatch, ...] = ()
    complete: frozenset[Pass] = frozenset()
    draws: tuple[DrawRecord, ...] = ()
    files: tuple[WrittenFile, ...] = ()
    metrics: tuple[ReducedMetric, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    set_epoch_calls: int = 0
    scheduled: bool = False
    notes: tuple[str, ...] = ()
    operations: tuple[TracedOperation, ...] = ()
    calls: tuple[CalledFunction, ...] = ()

    def called(self, *whats: str) -> str:
        """Return the line of the last of these calls that was new, or ""."""
        return next((call.line for call in reversed(self.calls) if call.what in whats), "")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run of the script: its ranks in their order, and how it ended."""

    name: str
    size: int
    ranks: tuple[RankRecord, ...]
    code: int = 0

    def global_samples(self, position: int) -> list[Any]:
        """Return the indices of all ranks in the step at this position, sorted.

        Of ranks that read the same part of the global batch, one counts.
        """
        found: list[Any] = []
        readers: dict[tuple[LoaderKey, int], int] = {}
        for rank in self.ranks:
            for batch in rank.steps[position].batches:
                loader = rank.loaders.get(batch.loader)
                part = None if loader is None else loader.part
                first = part is None or readers.setdefault((batch.loader, part), rank.rank) == rank.rank
                if batch.training and first:
                    found += batch.indices
        return sorted(found, key=repr)

    def tensors(self, position: int, kind: str) -> dict[str, Sketch]:
        """Return the full tensors of all ranks in the step at this position.

        `kind` is "parameters", or "computed" for gradients. Shards are put together. The checksum of a
        tensor in several shards is that of its shards.
        """
        shards: dict[str, dict[tuple[int, ...] | None, Sketch]] = {}
        for rank in self.ranks:
            for name, value in getattr(rank.steps[position], kind).items():
                shards.setdefault(name, {}).setdefault(value.place, value)
        return {
            name: _join([found[place] for place in sorted(found, key=repr)])
            for name, found in shards.items()
        }

    @property
    def separate(self) -> bool:
        """Whether several ranks took steps without a process group."""
        steps = [step for rank in self.ranks for step in rank.steps]
        return self.size > 1 and bool(steps) and not any(step.distributed for step in steps)

    def alone(self) -> RunRecord:
        """Return this run, or only its first rank if the ranks had no process group."""
        return replace(self, size=1, ranks=self.ranks[:1]) if self.separate else self

    @property
    def length(self) -> int:
        """The number of steps that all ranks took."""
        return min((len(rank.steps) for rank in self.ranks), default=0)


def _join(shards: Sequence[Sketch]) -> Sketch:
    return Sketch(
        checksum=" ".join(shard.checksum for shard in shards),
        norm=math.hypot(*(shard.norm for shard in shards)),
        projection=sum(shard.projection for shard in shards),
    )


def read_run(folder: Path, *, name: str, size: int, code: int) -> RunRecord:
    """Return the records that the ranks of a run wrote into `folder`."""
    ranks = tuple(_rank(rank, list(_events(folder, rank))) for rank in range(size))
    return RunRecord(name=name, size=size, ranks=ranks, code=code)


def _events(folder: Path, rank: int) -> Iterator[Any]:
    for path in sorted(folder.glob(f"rank-{rank}.*jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # a killed process leaves half a line


def _rank(rank: int, events: list[Any]) -> RankRecord:
    by_kind: dict[str, list[Any]] = {}
    for event in events:
        by_kind.setdefault(event.pop("event"), []).append(event)
    loaders = [_loader(event) for event in by_kind.get("loader", [])]
    batches = [_batch(event) for event in by_kind.get("batch", [])]
    steps = [_step(event) for event in by_kind.get("step", [])]
    draws = [DrawRecord(**event) for event in by_kind.get("draw", [])]
    return RankRecord(
        rank=rank,
        steps=tuple(steps),
        losses=tuple(LossRecord(**event) for event in by_kind.get("loss", [])),
        loaders={loader.loader: loader for loader in loaders},
        delivered=tuple(batches),
        complete=frozenset((LoaderKey(*e["loader"]), e["epoch"]) for e in by_kind.get("complete", [])),
        draws=tuple(draws),
        files=tuple(WrittenFile(**event) for event in by_kind.get("file", [])),
        metrics=tuple(_metric(event) for event in by_kind.get("metric", [])),
        layers={event["kind"]: event["name"] for event in by_kind.get("layer", [])},
        set_epoch_calls=len(by_kind.get("set_epoch", [])),
        scheduled="scheduler" in by_kind,
        operations=tuple(read_operation(event) for event in by_kind.get("operation", [])),
        calls=tuple(CalledFunction(**event) for event in by_kind.get("call", [])),
        notes=tuple(dict.fromkeys(event["text"] for event in by_kind.get("note", []))),
    )


def _loader(event: Any) -> LoaderRecord:
    samples = None if event["samples"] is None else tuple(event["samples"])
    plain = {"loader": LoaderKey(*event["loader"]), "samples": samples}
    return LoaderRecord(**{**event, **plain})


def _batch(event: Any) -> DeliveredBatch:
    plain = {"loader": LoaderKey(*event["loader"]), "indices": tuple(event["indices"])}
    return DeliveredBatch(**{**event, **plain})


def _metric(event: Any) -> ReducedMetric:
    plain = {key: tuple(event[key]) for key in ("values", "outputs")}
    return ReducedMetric(**{**event, **plain})


def _step(event: Any) -> StepRecord:
    sketches = {
        key: {
            name: Sketch(checksum=c, norm=n, projection=p, place=None if at is None else tuple(at))
            for name, (c, n, p, at) in event[key].items()
        }
        for key in ("gradients", "parameters", "unclipped")
    }
    batches = tuple(_batch(batch) for batch in event["batches"])
    plain = {"lr": tuple(event["lr"]), "wrapped": frozenset(event["wrapped"]), "batches": batches}
    return StepRecord(**{**event, **sketches, **plain})

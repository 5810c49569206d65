"""Causes of refuted properties. A cause is reported only if its evidence was observed."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.tools.verify.cause_table import SCHEDULER, STATES, because
from shoal.tools.verify.observations import (
    ACCELERATE,
    GENERATORS,
    DrawRecord,
    LoaderRecord,
    RankRecord,
    RunRecord,
    StepRecord,
)
from shoal.tools.verify.operations import ROUNDING, LikelyCause, OperationDifference


@dataclass(frozen=True, kw_only=True)
class ScriptSource:
    """The script's name and text."""

    name: str
    text: str

    def line(self, *calls: str) -> str:
        """Return `file:line` of the first call of one of these names, or the file's name."""
        found = find_calls(self.text, calls)
        return f"{self.name}:{found[0]}" if found else self.name


def repeat_cause(first: RunRecord, second: RunRecord, source: ScriptSource) -> LikelyCause | None:
    """Return which generator the script draws from and seeds differently in each run."""
    a, b = first.ranks[0], second.ranks[0]
    for generator in GENERATORS:
        line = find_global_draw(source.text, generator, 1)
        if a.steps[0].generators[generator] != b.steps[0].generators[generator] and line is not None:
            return because("unseeded {} generator", f"{source.name}:{line}", of=generator)
    for key, loader in a.loaders.items():
        if key in b.loaders and loader.seed != b.loaders[key].seed:
            return because("generator of the loader seeded differently in each run", loader.line)
    return None


def hash_order_cause(source: ScriptSource) -> LikelyCause:
    """Return the cause for runs that are equal with the same PYTHONHASHSEED only."""
    return because("hash order", source.line("hash", "set", "frozenset"))


def file_order_cause(run: RunRecord, source: ScriptSource) -> LikelyCause:
    """Return the cause for runs that are equal with the same order of directory entries only."""
    lines = {call.line for call in run.ranks[0].calls if call.what == "listdir"}
    return because("file order", lines.pop() if len(lines) == 1 else source.name)


class Restart(NamedTuple):
    """A run without a kill and its restart, which begins after `offset` steps of it."""

    baseline: RunRecord
    again: RunRecord
    offset: int
    source: ScriptSource

    def missing(self, state: str, detail: str = "") -> LikelyCause | None:
        """Return how the restart lost a state, None if the script saves and restores it."""
        name, what, calls = STATES[state]
        saved = _called(self.baseline, f"{calls} saved") if calls else ""
        restored = _called(self.again, f"{calls} restored") if calls else ""
        if saved and restored:
            return self._copied_cause(state, restored)
        if saved:
            line = _called(self.again, "load") or self.source.line("load")
            return because("{} not restored", line, what, of=name)
        line = _called(self.baseline, "save")
        line = line or self.source.line("save", "save_pretrained", "save_state")
        return because("{} not in the checkpoint", line, what.format(detail), of=name)

    def _copied_cause(self, state: str, line: str) -> LikelyCause | None:
        """Return that another rank continues with the generator state of rank 0, if it does."""
        before = [rank.steps[self.offset].generators.get(state) for rank in self.baseline.ranks]
        after = [rank.steps[0].generators.get(state) for rank in self.again.ranks]
        copied = [now == before[0] != own for own, now in zip(before[1:], after[1:], strict=True)]
        if after[0] == before[0] and any(copied):
            return because("generator state of rank 0 restored on all ranks", line)
        return None

    def state_cause(self, kind: str, position: int, rank: int) -> LikelyCause | None:
        """Return why this kind of state differs at this position, None if an operation must tell."""
        if kind == "learning rates":
            return self._rate_cause(first=position == 0)
        if kind == "samples":
            return self._samples_cause(position, rank)
        return self.missing(kind) if kind in ("optimizer states", "buffers") else None

    def _rate_cause(self, *, first: bool) -> LikelyCause | None:
        calls = [call.what for call in self.again.ranks[0].calls]
        built = "scheduler built" in calls
        if first and built and "optimizer restored" in calls[: calls.index("scheduler built")]:
            line = _called(self.again, "scheduler built")
            return because("scheduler built after the optimizer was restored", line)
        if built:
            return self.missing("learning rates")
        return self.missing("optimizer states") or self.missing("rate")

    def _samples_cause(self, position: int, rank: int) -> LikelyCause | None:
        """Return why samples differ: those of another step show a lost position, others another order.

        The first samples of another epoch show either.
        """
        before, after = self.baseline.ranks[rank], self.again.ranks[rank]
        generators = {each.seed for each in after.loaders.values() if each.sampler == "RandomSampler"}
        known = any(step.samples == after.steps[position].samples for step in before.steps)
        starts = _starts_a_pass(before, self.offset + position) and _starts_a_pass(after, position)
        # With a lost position, the restart is longer.
        restored = starts and self.offset + self.again.length == self.baseline.length
        if known and not restored:
            return None if starts and generators else self.missing("samples")
        if None in generators:
            return self.missing("torch")
        return self.missing("loader") if known and generators else None

    def operation_cause(self, found: OperationDifference) -> LikelyCause | None:
        """Return why an operation of the same step differs."""
        if found.drawn:
            return self.missing(found.drawn[0])
        if found.part == "argument" and found.detail.startswith(("True", "False")):
            return None  # the mode of a module, which checkpoints do not have
        return self.missing(found.part, found.detail) if found.part in STATES else None


def _called(run: RunRecord, what: str) -> str:
    return next((line for rank in run.ranks if (line := rank.called(what))), "")


def _starts_a_pass(rank: RankRecord, position: int) -> bool:
    """Return whether a step used the first batch of a pass over a loader."""
    first = rank.steps[position].batches[:1]
    passes = {(batch.loader, batch.epoch): batch for batch in reversed(rank.delivered)}
    return any(passes.get((batch.loader, batch.epoch)) == batch for batch in first)


def sampler_cause(loader: LoaderRecord, repeated: int, size: int, alone: bool) -> LikelyCause | None:
    """Return why an epoch repeats or leaves out samples; `alone` if some ranks read nothing."""
    distributed = "Distributed" in loader.sampler
    # Padding repeats fewer samples than there are ranks.
    padded = loader.size is not None and repeated <= -loader.size % size
    for holds, name in (
        (repeated and distributed and padded, "DistributedSampler padding"),
        (
            repeated and distributed and loader.shuffle and not padded,
            "different seed or epoch of the samplers on the ranks",
        ),
        (repeated and loader.sampler == ACCELERATE, "padding of Accelerate's sampler"),
        (
            repeated and not distributed and loader.sampler != ACCELERATE and size > 1,
            "no distributed sampler",
        ),
        (not repeated and loader.drop_last, "drop_last"),
        (not repeated and alone, "not all ranks read their samples"),
    ):
        if holds:
            return because(name, loader.line)
    return None


def order_cause(loader: LoaderRecord, set_epoch_calls: int) -> LikelyCause | None:
    """Return why two epochs have the same order."""
    if "Distributed" in loader.sampler and not set_epoch_calls:
        return because("set_epoch forgotten", loader.line)
    if loader.sampler == "RandomSampler":
        return because("generator seeded again in each epoch", loader.line)
    return None


def draw_cause(draw: DrawRecord, source: ScriptSource) -> LikelyCause:
    """Return the line of a draw from a global generator."""
    file, _, first = draw.line.rpartition(":")
    line = None
    if file == source.name:
        line = find_global_draw(source.text, draw.generator, int(first))
    place = draw.line if line is None else f"{file}:{line}"
    return because("global {} draw in Dataset.__getitem__", place, of=draw.generator)


def replica_cause(run: RunRecord, position: int, source: ScriptSource) -> LikelyCause | None:
    """Return why ranks hold different parameters after this step, the first at which they do."""
    steps = [rank.steps[position] for rank in run.ranks]
    first = steps[0]
    names = [
        name
        for name in first.gradients
        if len({step.gradients[name].checksum for step in steps if name in step.gradients}) > 1
    ]
    wrapped = first.wrapped.intersection(names)
    some = 0 < len(names) < len(first.gradients)
    reduces = bool(first.reduce_line or first.early_line)
    step_line = first.line or source.name
    for holds, name, line in (
        (
            any(step.parameters_before != first.parameters_before for step in steps),
            "initial parameters depend on the rank",
            _seed_line(run) or source.line("torch.manual_seed", "seed_everything", "set_seed"),
        ),
        (any(step.lr != first.lr for step in steps), "learning rates depend on the rank", step_line),
        (wrapped and not first.wrapper_calls, "model called without its wrapper", first.forward_line),
        (
            wrapped and not first.synchronized,
            "last micro-batch in no_sync",
            run.ranks[0].called("no_sync") or first.forward_line,
        ),
        (
            first.wrapped and names and not wrapped,
            "parameters outside of DistributedDataParallel",
            next((first.outside[name] for name in names if name in first.outside), step_line),
        ),
        (
            not first.wrapped and some and first.reduce_line,
            "not all gradients averaged",
            first.reduce_line,
        ),
        (
            not first.wrapped and names and first.early_line and not first.reduce_line,
            "gradients averaged before the last micro-batch",
            first.early_line,
        ),
        (
            not first.wrapped and not reduces and names,
            "gradients not averaged",
            step_line,
        ),
    ):
        if holds:
            return because(name, line, ", ".join(names[:3]))
    return None


def _seed_line(run: RunRecord) -> str:
    """Return the line that seeds torch differently on two ranks, or ""."""
    by_rank = [[each for each in rank.calls if each.what.startswith("seed ")] for rank in run.ranks]
    equal = [each.line for each in by_rank[0] if all(each in calls for calls in by_rank)]
    shared = {line for lines in equal for line in lines.split(" < ")}
    other = (each.line.split(" < ") for each in by_rank[0] if each.line not in equal)
    lines = next(other, [])
    return next((line for line in lines if line not in shared), "")


def world_size_cause(
    kind: str, a: RunRecord, b: RunRecord, position: int, source: ScriptSource
) -> LikelyCause | None:
    """Return why a run on another number of ranks differs in this step, if the records tell."""
    loaders = list(b.ranks[0].loaders.values())
    line = loaders[0].line if loaders else source.name
    samples = [len(run.global_samples(0)) for run in (a, b)]
    if position == 0 and samples[0] * b.size == samples[1] * a.size and samples[0] != samples[1]:
        return because("batch size per rank", line)
    if kind.startswith("learning rates") and _rates_are_ahead(a, b):
        line = b.ranks[0].called("scheduler built") or source.name
        return because(SCHEDULER, line, ", and do not pass it to `Accelerator.prepare`")
    if not kind.startswith(("gradients", "parameters")):
        return None
    steps = [rank.steps[position] for rank in b.ranks]
    first = steps[0]
    if first.sharded:
        equal = kind.startswith("gradients") and _have_equal_norms(steps)
        return because("gradients clipped by the norm of a shard", first.line) if equal else None
    if any(step.parameters != first.parameters for step in steps):
        return replica_cause(b, position, source)
    # Gradients that are averaged already are equal on all ranks.
    if any(step.unclipped != first.unclipped for step in steps) and first.reduce_line:
        return because("gradients clipped before they are averaged", first.clip_line or source.name)
    ratio = b.size / a.size
    line = first.reduce_line or b.ranks[0].called("backward") or source.name
    if _are_scaled(a, b, position, ratio):
        return because("gradients summed over ranks", line)
    if _are_scaled(a, b, position, 1 / ratio):
        return because("gradients divided by the number of ranks twice", line)
    uneven = [_is_uneven(a, step) or _is_uneven(b, step) for step in range(position + 1)]
    if position and uneven[-1] and not any(uneven[:-1]):
        return because("mean of means", b.ranks[0].called("backward") or source.name)
    return None


def _rates_are_ahead(a: RunRecord, b: RunRecord) -> bool:
    """Return whether the learning rates of `b` are those of `a` after as many more steps as ranks."""
    rates = [[step.lr for step in run.ranks[0].steps] for run in (a, b)]
    later = rates[0][:: b.size // a.size] if b.size % a.size == 0 else []
    common = min(len(later), len(rates[1]))
    return len(set(later[:common])) > 2 and later[:common] == rates[1][:common]


def _have_equal_norms(steps: Sequence[StepRecord]) -> bool:
    """Return whether the shards that each rank holds have gradients of the same norm altogether."""
    norms: dict[Any, float] = {}
    for step in steps:
        shards = {name: each for name, each in step.gradients.items() if each.place is not None}
        places = frozenset((name, each.place) for name, each in shards.items())
        norms[places] = math.hypot(*(each.norm for each in shards.values()))
    return len(norms) > 1 and 0 < max(norms.values()) <= min(norms.values()) * (1 + ROUNDING)


def _is_uneven(run: RunRecord, position: int) -> bool:
    """Return whether micro-batches of this step have different sizes."""
    batches = [batch for rank in run.ranks for batch in rank.steps[position].batches]
    return len({len(batch.indices) for batch in batches if batch.training}) > 1


def _are_scaled(a: RunRecord, b: RunRecord, position: int, ratio: float) -> bool:
    """Return whether each gradient of the second run is that of the first, or that times the ratio."""
    left, right = a.tensors(position, "computed"), b.tensors(position, "computed")
    limit = 10 * ROUNDING * max((value.norm for value in left.values()), default=0.0)
    scaled = 0
    for name, value in left.items():
        other = right.get(name)
        if other is None:
            return False
        gaps = [
            abs(value.norm * factor - other.norm) + abs(value.projection * factor - other.projection)
            for factor in (1.0, ratio)
        ]
        if min(gaps) > limit:
            return False
        scaled += gaps[0] > limit
    return scaled > 0


def operation_cause(
    found: OperationDifference,
    *,
    restart: Restart | None,
    ranks: bool,
    layers: Mapping[str, str],
    source: ScriptSource,
    trained: str = "",
) -> LikelyCause | None:
    """Return the cause at an operation that differs after a restart, between `ranks`, or runs.

    `trained` is the line that set the training mode last, if the module made no difference before.
    """
    if restart is not None:
        return restart.operation_cause(found)
    line = found.line or source.name
    if ranks and "batch_norm" in found.operation and trained:
        return because("BatchNorm no longer frozen", trained)
    if ranks and "batch_norm" in found.operation:
        line = source.line("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
        return because("BatchNorm over the local batch", line)
    if ranks and found.part == "generator" and "dropout" in layers and found.module:
        return because("dropout drawn per rank", source.line(layers["dropout"]))
    if found.drawn:
        if ranks:
            return because("random numbers drawn per rank", line)
        return because("unseeded {} generator", line, of=found.drawn[0])
    name = {
        "argument": "value depends on the rank" if ranks else "value from outside of torch",
        "input": "tensor from outside of torch's operations",
        "mean": "mean of means",
        "operation": "other operations are called",
        "output": "operation depends on the rank or on other samples"
        if ranks
        else "operation is not deterministic",
    }[found.part]
    return because(name, line, found.detail)


GLOBAL_DRAWS = {
    "numpy": ("np.random.", "numpy.random."),
    "python": ("random.",),
    "torch": ("torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial"),
}


def find_calls(source: str, names: Collection[str]) -> list[int]:
    """Return the lines that call a function with one of these names, with or without a module."""
    found = []
    for node in _calls(source):
        called = ast.unparse(node.func)
        if called in names or called.split(".")[-1] in names:
            found.append(node.lineno)
    return sorted(found)


def find_global_draw(source: str, generator: str, after: int) -> int | None:
    """Return the first line from `after` that draws from a global generator, or None."""
    for node in sorted(_calls(source), key=lambda call: call.lineno):
        called = ast.unparse(node.func)
        explicit = any(word.arg == "generator" for word in node.keywords)
        if node.lineno >= after and not explicit and called.startswith(GLOBAL_DRAWS[generator]):
            return node.lineno
    return None


def _calls(source: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))

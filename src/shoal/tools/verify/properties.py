"""Decisions about the properties of a script, from the records of its runs. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from shoal.tools.verify.cause_table import SCHEDULER, because
from shoal.tools.verify.causes import (
    Restart,
    ScriptSource,
    draw_cause,
    order_cause,
    repeat_cause,
    replica_cause,
    sampler_cause,
    world_size_cause,
)
from shoal.tools.verify.metrics import first_metric
from shoal.tools.verify.observations import (
    ACCELERATE,
    TIMED_OUT,
    LoaderKey,
    Pass,
    RankRecord,
    RunRecord,
    Sketch,
    StepRecord,
)
from shoal.tools.verify.operations import (
    ROUNDING,
    DifferingStep,
    LikelyCause,
    PropertyFinding,
    held,
    refuted,
    undecided,
)

TENSORS = ("parameters", "optimizer states", "gradients", "buffers", "updates")
"""The kinds of state that operations make."""

REPEATABLE = "repeatable"
RESUME = "resume bit-equal"
SAMPLES = "each sample once per epoch"
ORDER = "new order in each epoch"
DRAWS = "samples independent of rank and worker"
EVALUATION = "evaluation counts each sample once"
WORLD = "independent of the number of ranks"
REPLICAS = "same parameters on all ranks"
SCHEDULE = "one scheduler step per optimizer step at most"
FILES = "each file written by one rank"
MICRO_BATCHES = "independent of the number of micro-batches"


def decide_repeatable(first: RunRecord, second: RunRecord, source: ScriptSource) -> PropertyFinding:
    """Compare two runs of the same command, bit by bit."""
    found = first_difference(first, second)
    if found is None:
        return held(REPEATABLE, 2)
    step, kind = found
    evidence = f"step {step}: {kind} differ between two runs of the same command"
    cause = repeat_cause(first, second, source)
    return refuted(REPEATABLE, evidence, cause, _differing_step(first, second, (step, step), kind))


def _differing_step(
    first: RunRecord, second: RunRecord, steps: tuple[int, int], kind: str
) -> DifferingStep | None:
    if not kind.startswith(TENSORS):
        return None
    return DifferingStep(first=first.name, second=second.name, steps=steps)


def first_difference(first: RunRecord, second: RunRecord) -> tuple[int, str] | None:
    """Return the first step whose records differ between two runs, and the first kind of state."""
    for position in range(min(first.length, second.length)):
        for a, b in zip(first.ranks, second.ranks, strict=True):
            kind = differing_state(a.steps[position], b.steps[position])
            if kind:
                return a.steps[position].step, kind
    if first.length != second.length and TIMED_OUT not in (first.code, second.code):
        return min(first.length, second.length) + 1, "the numbers of steps"
    return None


def differing_state(a: StepRecord, b: StepRecord) -> str:
    """Return the first kind of state that differs, in the order in which a step uses it; or "".

    Generators that no sample, model or layer uses may differ without an effect. Samples are not known
    in a step before which Accelerate has read them.
    """
    for differs, kind in (
        (a.parameters_before != b.parameters_before, "parameters"),
        (a.optimizer_before != b.optimizer_before, "optimizer states"),
        (a.lr != b.lr, "learning rates"),
        (a.samples and b.samples and a.samples != b.samples, "samples"),
        (a.gradients != b.gradients, "gradients"),
        (a.buffers_before != b.buffers_before, "buffers"),
        (a.parameters != b.parameters, "updates"),
    ):
        if differs:
            return kind
    return ""


def decide_resume(
    baseline: RunRecord, restarts: Sequence[RunRecord], source: ScriptSource
) -> PropertyFinding:
    """Compare runs that were killed and started again with the run that was not."""
    if not restarts:
        return undecided(RESUME, "no run was killed")
    before = [step.parameters_before for step in baseline.ranks[0].steps]
    reason = ""
    for again in restarts:
        if again.code not in (0, TIMED_OUT) or not again.length:
            evidence = (
                f"the restart after a kill took {again.length} steps and exited with {again.code}"
            )
            return refuted(RESUME, evidence)
        start = again.ranks[0].steps[0]
        if start.parameters_before == before[0]:
            reason = "the restart began from the initial parameters: the script restores nothing"
            continue
        if start.parameters_before not in before:
            evidence = "the restored parameters are equal to none of the run without a kill"
            return refuted(RESUME, evidence)
        offset = before.index(start.parameters_before)
        found = _resumed_difference(baseline, again, offset)
        if found is not None:
            position, kind, rank = found
            step = offset + position + 1
            evidence = (
                f"resumed at step {offset + 1}; step {step}: {kind} differ from the run without a kill"
            )
            replicas = _replica_difference(baseline)
            if replicas is not None:  # a checkpoint of one rank lacks the parameters of the others
                return refuted(RESUME, evidence, replica_cause(baseline, replicas[0], source))
            restart = Restart(baseline, again, offset, source)
            cause = restart.state_cause(kind, position, rank)
            where = _differing_step(baseline, again, (step, step - offset), kind)
            return refuted(RESUME, evidence, cause, where)
    if reason:
        return undecided(RESUME, reason)
    return held(RESUME, len(restarts))


def _resumed_difference(
    baseline: RunRecord, again: RunRecord, offset: int
) -> tuple[int, str, int] | None:
    """Return the first step after the restart that differs, the kind of state, and the rank."""
    for rank, (a, b) in enumerate(zip(baseline.ranks, again.ranks, strict=True)):
        for position, (x, y) in enumerate(zip(a.steps[offset:], b.steps, strict=False)):
            kind = differing_state(x, y)
            if kind:
                return position, kind, rank
    return None


def decide_counts(
    runs: Sequence[RunRecord], source: ScriptSource, *, training: bool
) -> PropertyFinding:
    """Count the samples of each complete pass over a loader, in training or outside, over all ranks."""
    name = SAMPLES if training else EVALUATION
    complete = 0
    divided = _divided_loaders(runs)
    for run in runs:
        seen = 0
        for loader, epoch in _passes(run, training=training):
            known = [rank.loaders[loader] for rank in run.ranks if loader in rank.loaders]
            record = known[0] if known else None
            size = _size(run.ranks, loader)
            if record is None or size is None or record.replacement:
                continue
            if run.size > 1 and loader in divided:
                continue
            by_rank = [_order(rank, loader, epoch) for rank in _readers(run.ranks, loader)]
            if not training and all(Counter(by_rank[0]) == Counter(read) for read in by_rank):
                by_rank = by_rank[:1]  # each rank evaluates everything: redundant, and not wrong
            counts = Counter(index for read in by_rank for index in read)
            alone = _is_read_alone(run.ranks, (loader, epoch))
            ended = alone or all((loader, epoch) in rank.complete for rank in run.ranks)
            repeated = sum(counts.values()) - len(counts)
            missing = size - len(counts) if ended else 0
            if repeated and not missing and not training and record.sampler == ACCELERATE:
                evidence = f"Accelerate's sampler repeated {repeated} of {size} samples, which "
                evidence += "`gather_for_metrics` leaves out"
                return undecided(name, evidence)
            if repeated or missing:
                evidence = (
                    f"{run.name}: epoch {epoch + 1} read {sum(counts.values())} samples of "
                    f"{size}: {repeated} repeated, {missing} missing"
                )
                return refuted(name, evidence, sampler_cause(record, repeated, run.size, alone))
            seen += ended or len(counts) == size
        complete += bool(seen)
    if complete:
        return held(name, complete)
    how = "with" if training else "without"
    return undecided(name, f"no pass over a DataLoader {how} training was complete")


def _passes(run: RunRecord, *, training: bool) -> list[Pass]:
    found: dict[Pass, bool] = {}
    for rank in run.ranks:
        for batch in rank.delivered:
            found[batch.loader, batch.epoch] = batch.training
    return [key for key, value in found.items() if value == training]


def _is_read_alone(ranks: Sequence[RankRecord], key: Pass) -> bool:
    """Return whether some ranks completed a pass, and others read nothing of it and trained on."""
    readers = [rank for rank in ranks if any((b.loader, b.epoch) == key for b in rank.delivered)]
    if not 0 < len(readers) < len(ranks) or any(key not in rank.complete for rank in readers):
        return False
    last = readers[0].delivered[-1]
    return last.training and (last.loader, last.epoch) != key


def _readers(ranks: Sequence[RankRecord], loader: LoaderKey) -> list[RankRecord]:
    """Return the ranks that read different samples: one for each part of the global batch."""
    found: dict[int, RankRecord] = {}
    for number, rank in enumerate(ranks):
        record = rank.loaders.get(loader)
        part = None if record is None else record.part
        found.setdefault(number if part is None else part, rank)
    return list(found.values())


def _size(ranks: Sequence[RankRecord], loader: LoaderKey) -> int | None:
    """Return how many samples the loaders of all ranks are for, None if it is not known.

    Ranks may have different subsets of a dataset, and read its samples together. Indices of datasets
    that differ otherwise do not tell which samples are the same.
    """
    records = [rank.loaders[loader] for rank in ranks if loader in rank.loaders]
    subsets = [record.samples for record in records if record.samples is not None]
    if subsets and len(subsets) == len(records):
        return len(set().union(*subsets))
    sizes = {record.size for record in records if record.size is not None}
    return sizes.pop() if len(sizes) == 1 else None


def _divided_loaders(runs: Sequence[RunRecord]) -> set[LoaderKey]:
    """Return the loaders of datasets that the script divides, whose indices do not tell their samples.

    The sizes on all ranks add up to the same number on different numbers of ranks.
    """
    totals: dict[LoaderKey, dict[int, int]] = {}
    for run in runs:
        for loader, record in run.ranks[0].loaders.items():
            sizes = [rank.loaders[loader].size for rank in run.ranks if loader in rank.loaders]
            if record.samples is None and record.part is None and None not in sizes:
                totals.setdefault(loader, {})[run.size] = sum(size or 0 for size in sizes)
    return {key for key, sums in totals.items() if len(sums) > 1 and len(set(sums.values())) == 1}


def decide_order(runs: Sequence[RunRecord]) -> PropertyFinding:
    """Compare the orders of the first two epochs of each training loader that shuffles."""
    compared = 0
    for run in runs:
        rank = run.ranks[0]
        shuffled = [passes for passes in _epochs(run) if rank.loaders[passes[0][0]].shuffle]
        for first, second in (passes[:2] for passes in shuffled if len(passes) > 1):
            orders = [_order(rank, *key) for key in (first, second)]
            if orders[0] == orders[1] and len(orders[0]) > 2:
                evidence = f"{run.name}: epochs 1 and 2 read the samples in the same order"
                cause = order_cause(rank.loaders[first[0]], rank.set_epoch_calls)
                return refuted(ORDER, evidence, cause)
        compared += any(len(passes) > 1 for passes in shuffled)
    if compared:
        return held(ORDER, compared)
    return undecided(ORDER, "no DataLoader that shuffles completed two epochs")


def _epochs(run: RunRecord) -> list[list[Pass]]:
    """Return the complete training passes over each loader of the first rank, in their order.

    Loaders of one dataset that are built at the same place, for one pass each, count as one loader.
    """
    rank = run.ranks[0]
    passes = _passes(run, training=True)
    complete = [key for key in passes if key in rank.complete and key[0] in rank.loaders]
    number = Counter(loader for loader, _ in complete)
    found: dict[Any, list[Pass]] = {}
    for loader, epoch in complete:
        dataset = rank.loaders[loader].dataset
        single = number[loader] == 1 and dataset is not None
        found.setdefault((loader.place, dataset) if single else loader, []).append((loader, epoch))
    return list(found.values())


def _order(rank: RankRecord, loader: LoaderKey, epoch: int) -> list[Any]:
    read = (batch for batch in rank.delivered if (batch.loader, batch.epoch) == (loader, epoch))
    return [index for batch in read for index in batch.indices]


def decide_draws(runs: Sequence[RunRecord], source: ScriptSource) -> PropertyFinding:
    """Look for draws from global generators while a dataset reads a sample."""
    for run in runs:
        for rank in run.ranks:
            for draw in rank.draws:
                where = "the main process" if draw.worker is None else f"worker {draw.worker}"
                evidence = f"{run.name}: rank {rank.rank}, {where}: __getitem__ drew from the global "
                evidence += f"{draw.generator} generator"
                return refuted(DRAWS, evidence, draw_cause(draw, source))
    used = [rank.loaders.get(b.loader) for run in runs for rank in run.ranks for b in rank.delivered]
    unseen = any(record is not None and not record.draws_observed for record in used)
    read = sum(any(rank.delivered for rank in run.ranks) for run in runs)
    if read and not unseen:
        return held(DRAWS, read)
    evidence = (
        "the draws of iterable datasets and shards are not observed"
        if unseen
        else "no DataLoader was used whose samples can be observed"
    )
    return undecided(DRAWS, evidence)


def decide_replicas(runs: Sequence[RunRecord], source: ScriptSource) -> PropertyFinding:
    """Compare the parameters of all ranks after each step."""
    several = [run for run in runs if run.size > 1 and run.length]
    if not several:
        return undecided(REPLICAS, "no run had several ranks and took a step")
    for run in several:
        found = _replica_difference(run)
        if found is not None:
            position, evidence = found
            evidence = f"{run.name}, step {run.ranks[0].steps[position].step}: {evidence}"
            return refuted(REPLICAS, evidence, replica_cause(run, position, source))
    held_by = Counter(
        (run.name, name, value.place)
        for run in several
        for rank in run.ranks
        for name, value in rank.steps[0].parameters.items()
    )
    if all(count == 1 for count in held_by.values()):
        return undecided(REPLICAS, "no two ranks hold the same part of a parameter")
    return held(REPLICAS, len(several))


def _replica_difference(run: RunRecord) -> tuple[int, str] | None:
    """Return the first step after which two ranks hold different values of the same parameter."""
    for position in range(run.length):
        holders: dict[tuple[str, tuple[int, ...] | None], tuple[int, Sketch]] = {}
        for rank in run.ranks:
            for name, value in rank.steps[position].parameters.items():
                first, known = holders.setdefault((name, value.place), (rank.rank, value))
                if known.checksum != value.checksum:
                    return position, f"{name} differs between ranks {first} and {rank.rank}"
    return None


def decide_schedule(runs: Sequence[RunRecord]) -> PropertyFinding:
    """Count the calls of each scheduler's `step` between two steps of its optimizer."""
    scheduled = [run for run in runs if any(rank.scheduled for rank in run.ranks)]
    for run in scheduled:
        for rank in run.ranks:
            for step in rank.steps:
                if step.scheduler_steps > 1:
                    evidence = f"{run.name}, rank {rank.rank}, before step {step.step}: "
                    evidence += f"{step.scheduler_steps} scheduler steps in one optimizer step"
                    return refuted(SCHEDULE, evidence, because(SCHEDULER, step.scheduler_line))
    if scheduled:
        return held(SCHEDULE, len(scheduled))
    return undecided(SCHEDULE, "the script's code stepped no scheduler of torch")


def decide_files(runs: Sequence[RunRecord]) -> PropertyFinding:
    """Look for files that several ranks replaced between the same two steps."""
    observed = 0
    for run in runs:
        writers: dict[tuple[str, int], int] = {}
        for rank in run.ranks if run.size > 1 else ():
            for file in rank.files:
                first = writers.setdefault((file.path, file.step), rank.rank)
                if first != rank.rank:
                    evidence = f"{run.name}: ranks {first} and {rank.rank} wrote {file.path} "
                    evidence += f"after {file.step} steps"
                    return refuted(
                        FILES, evidence, because("each rank writes the same file", file.line)
                    )
        observed += bool(writers)
    if observed:
        return held(FILES, observed)
    return undecided(FILES, "no run on several ranks wrote a file in its directory")


def decide_micro_batches(baseline: RunRecord, changed: RunRecord | None) -> PropertyFinding:
    """Compare a run with more micro-batches with the first run."""
    if changed is None:
        return undecided(MICRO_BATCHES, "the script uses no shoal.Loader")
    if changed.code not in (0, TIMED_OUT) or not changed.length:
        return undecided(MICRO_BATCHES, "the script ends with an error with twice the micro-batches")
    numbers = [
        [loader.micro_batches for loader in run.ranks[0].loaders.values()]
        for run in (baseline, changed)
    ]
    if numbers[0] == numbers[1]:
        return undecided(MICRO_BATCHES, "the batches are too small to be split further")
    largest = 0.0
    for position in range(min(baseline.length, changed.length)):
        kind, difference = _difference_up_to_rounding(baseline, changed, position)
        if kind:
            return refuted(MICRO_BATCHES, f"{changed.name}: step {position + 1}: {kind}")
        largest = max(largest, difference)
    evidence = f"up to rounding: largest relative difference {largest:.1e}"
    return held(MICRO_BATCHES, 2, evidence)


def decide_world_size(
    runs: Sequence[RunRecord], source: ScriptSource, repetition: RunRecord | None = None
) -> PropertyFinding:
    """Compare runs on different numbers of ranks with the first.

    Metrics are compared on the ranks of the `repetition` of the last run.
    """
    reference, *others = runs
    largest, bits = 0.0, True
    divided = _divided_loaders(runs)
    for run in others:
        again = repetition if run is others[-1] else None
        metric = None if again is None else first_metric(reference, run, again)
        length = min(reference.length, run.length)
        for position in range(length if metric is None else min(length, metric.step)):
            step = run.ranks[0].steps[position]
            kind, difference = _difference_up_to_rounding(reference, run, position, divided)
            if kind:
                evidence = f"{reference.name} and {run.name}: step {step.step}: {kind}"
                cause = world_size_cause(kind, reference, run, position, source)
                step_numbers = step.step, step.step
                where = _differing_step(reference, run, step_numbers, kind)
                return refuted(WORLD, evidence, cause, where)
            largest = max(largest, difference)
            bits = bits and run.tensors(position, "parameters") == reference.tensors(
                position, "parameters"
            )
        if metric is not None:
            evidence = f"{reference.name} and {run.name}: after step {metric.step}: a metric is "
            evidence += f"{metric.values}, from equal outputs of the model"
            return refuted(WORLD, evidence, because("metric computed per rank", metric.line))
    if not others or not all(run.length for run in runs):
        return undecided(WORLD, "fewer than two numbers of ranks took a step")
    how = "equal in all bits" if bits else f"up to rounding: largest relative difference {largest:.1e}"
    return held(WORLD, len(runs), how)


def _difference_up_to_rounding(
    a: RunRecord, b: RunRecord, position: int, divided: Collection[LoaderKey] = ()
) -> tuple[str, float]:
    x, y = a.ranks[0].steps[position], b.ranks[0].steps[position]
    samples = [a.global_samples(position), b.global_samples(position)]
    comparable = x.parameters.keys() == y.parameters.keys() and not x.sharded and not y.sharded
    if position == 0 and comparable and x.parameters_before != y.parameters_before:
        return "initial parameters differ", 0.0
    if len(samples[0]) != len(samples[1]):
        return f"{len(samples[0])} samples on {a.size} and {len(samples[1])} on {b.size} ranks", 0.0
    if samples[0] != samples[1] and not any(batch.loader in divided for batch in y.batches):
        return "different samples", 0.0
    if x.lr != y.lr:
        return f"learning rates {x.lr} and {y.lr}", 0.0
    largest = 0.0
    gradients = a.tensors(position, "computed")
    slope = ROUNDING * max((value.norm for value in gradients.values()), default=0.0)
    for kind in ("gradients", "parameters"):
        key = "computed" if kind == "gradients" else kind
        left, right = a.tensors(position, key), b.tensors(position, key)
        scale = max((value.norm for value in left.values()), default=0.0) or 1.0
        for name, value in left.items():
            if kind == "parameters" and name in gradients and gradients[name].norm < slope:
                continue  # Adam scales a gradient up that is nothing but rounding
            other = right.get(name)
            if other is None:
                return f"{kind}: {name} is missing on {b.size} ranks", 0.0
            gap = max(abs(value.norm - other.norm), abs(value.projection - other.projection)) / scale
            if not gap <= ROUNDING:
                return f"{kind} of {name} differ by {gap:.1e}", 0.0
            largest = max(largest, gap)
    return "", largest


def cause_of(findings: Sequence[PropertyFinding]) -> list[LikelyCause]:
    """Return the distinct causes of the refuted properties, in their order."""
    return list(dict.fromkeys(finding.cause for finding in findings if finding.cause is not None))

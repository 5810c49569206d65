"""The audit of a script: runs its variants, and makes a document of the answers.

A second pass runs two variants again and finds the operation that differs.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.tools.verify import properties
from shoal.tools.verify.causes import (
    Restart,
    ScriptSource,
    file_order_cause,
    hash_order_cause,
    operation_cause,
)
from shoal.tools.verify.observations import TIMED_OUT, RunRecord
from shoal.tools.verify.operations import (
    PropertyFinding,
    Trace,
    first_operation,
    first_operation_by_rows,
    same_step,
)
from shoal.tools.verify.properties import RESUME, WORLD, cause_of
from shoal.tools.verify.variants import Variant, VerifyRequest, last_output, run_killed, run_variant
from shoal.util.document import Document, KeyNumbers, Section, Table, Text, to_plain
from shoal.util.errors import LaunchError
from shoal.util.packages import versions


def locate_operation(
    request: VerifyRequest,
    finding: PropertyFinding,
    variants: Mapping[str, Variant],
    records: Mapping[str, RunRecord],
    source: ScriptSource,
    announce: Callable[[Variant], None],
) -> PropertyFinding:
    """Run two variants again, record the operations of the step that differs, and compare them.

    Args:
        request: The script.
        finding: A finding, returned unchanged if no step is known in which tensors differ.
        variants: The runs so far, by name.
        records: Their records, by name.
        source: The script's text.
        announce: Called with each run before it starts.

    Returns:
        The finding, with the operation and its cause if the evidence of one was observed.
    """
    difference = finding.difference
    if difference is None:
        return finding
    traces: list[list[Trace]] = []
    for name, step in zip((difference.first, difference.second), difference.steps, strict=True):
        # A name of its own: it is the name of the run's directory.
        variant = replace(
            variants[name], name=f"{name}, operations for '{finding.name}'", trace_at=step
        )
        announce(variant)
        run = run_variant if variant.kill_at is None else run_killed
        traces.append([rank.operations for rank in run(request, variant).ranks])
    first, second = traces
    runs = [records[name] for name in (difference.first, difference.second)]
    restart = None
    if finding.name == RESUME:
        offset = difference.steps[0] - difference.steps[1]
        restart = Restart(runs[0], runs[1], offset, source)
        ends = [same_step(*pair) for pair in zip(first, second, strict=True)]
        first, second = [a for a, _ in ends], [b for _, b in ends]
    compare = first_operation if len(first) == len(second) else first_operation_by_rows
    found = compare(first, second)
    line = runs[1].ranks[0].steps[difference.steps[1] - 1].line
    if found is None:
        unknown = f"cause not known; {finding.evidence}, before {line}"
        return finding if finding.cause else replace(finding, evidence=unknown)
    cause = finding.cause or operation_cause(
        found,
        restart=restart,
        ranks=finding.name == WORLD,
        layers={**runs[0].ranks[0].layers, **runs[1].ranks[0].layers},
        source=source,
    )
    return replace(finding, evidence=f"{finding.evidence}; {found}", operation=found, cause=cause)


Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The answers for one script, and the runs and versions that they are from."""

    command: str
    runs: tuple[str, ...]
    findings: tuple[PropertyFinding, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]

    @property
    def refuted(self) -> int:
        """The number of refuted properties."""
        return sum(finding.verdict == "refuted" for finding in self.findings)


def audit_script(request: VerifyRequest, progress: Progress) -> AuditReport:
    """Run a script in its variants and decide its properties.

    Args:
        request: The script and the variants.
        progress: Called with the name of each run before it starts.

    Returns:
        The answer for each property.

    Raises:
        LaunchError: If the script fails by itself, or takes no optimizer step that can be observed.
    """
    text = Path(request.script).read_text(encoding="utf-8", errors="replace")
    source = ScriptSource(name=request.script, text=text)
    done: list[str] = []
    variants: dict[str, Variant] = {}
    records: dict[str, RunRecord] = {}

    def announce(variant: Variant) -> None:
        progress(variant.name)
        variants[variant.name] = variant
        at = "" if variant.kill_at is None else f" before step {variant.kill_at}"
        done.append(f"{variant.name}{at}")

    def start(variant: Variant) -> RunRecord:
        announce(variant)
        record = records[variant.name] = run_variant(request, variant)
        check_run(request, record)
        return record

    most = max(request.ranks)
    sizes = sorted(set(request.ranks))
    by_size = [start(Variant(name=name_ranks(size), size=size)) for size in sizes]
    baseline = by_size[-1]
    # Another hash seed and order of files are what the next start of the same command may have.
    repeat = Variant(name=f"{name_ranks(most)}, again", size=most, hash_seed=2, reverse_files=True)
    second = start(repeat)
    repeatable = properties.decide_repeatable(baseline, second, source)
    if repeatable.verdict == "refuted":
        repeatable = _isolate(repeatable, repeat, baseline, source, start)
    restarts = []
    if repeatable.verdict == "held":
        for number, step in enumerate(kill_steps(baseline.length, request.kills), start=1):
            variant = Variant(name=f"{name_ranks(most)}, kill {number}", size=most, kill_at=step)
            announce(variant)
            records[variant.name] = run_killed(request, variant)
            restarts.append(records[variant.name])
    resume = properties.decide_resume(baseline, restarts, source)
    if repeatable.verdict != "held":
        reason = "two runs without a kill differ already"
        resume = replace(resume, verdict="not decidable", evidence=reason)
    changed = _run_with_more_micro_batches(request, baseline, announce)
    by_size = [run.alone() for run in by_size]
    runs = [*by_size, second.alone()]
    findings: tuple[PropertyFinding, ...] = (
        repeatable,
        resume,
        *_decide(runs, by_size, source, properties.decide_micro_batches(baseline, changed)),
    )
    findings = tuple(
        locate_operation(request, finding, variants, records, source, announce) for finding in findings
    )
    return AuditReport(
        command=shlex.join((request.script, *request.args)),
        runs=tuple(done),
        findings=findings,
        notes=_notes(runs, request),
        versions=versions(),
    )


def _decide(
    runs: list[RunRecord],
    by_size: list[RunRecord],
    source: ScriptSource,
    micro_batches: PropertyFinding,
) -> tuple[PropertyFinding, ...]:
    """Return the findings about samples, ranks, schedules and files."""
    return (
        properties.decide_counts(runs, source, training=True),
        properties.decide_order(runs),
        properties.decide_draws(runs, source),
        properties.decide_counts(runs, source, training=False),
        properties.decide_world_size(by_size, source),
        properties.decide_replicas(runs, source),
        micro_batches,
        properties.decide_schedule(runs),
        properties.decide_files(runs),
    )


def _run_with_more_micro_batches(
    request: VerifyRequest, baseline: RunRecord, announce: Callable[[Variant], None]
) -> RunRecord | None:
    """Return a run like the baseline with twice the micro-batches, None without a shoal.Loader."""
    if all(loader.part is None for loader in baseline.ranks[0].loaders.values()):
        return None
    name = f"{name_ranks(baseline.size)}, twice the micro-batches"
    variant = Variant(name=name, size=baseline.size, micro_batches=2)
    announce(variant)
    return run_variant(request, variant)


def kill_steps(length: int, kills: int) -> list[int]:
    """Return the steps before which runs are killed: spread over the run, none in its first two."""
    steps = [max(3, length * (kills + number + 1) // (2 * kills + 1)) for number in range(kills)]
    return sorted({step for step in steps if step <= length})


def check_run(request: VerifyRequest, run: RunRecord) -> None:
    """Raise LaunchError if a run failed or took no step that could be observed."""
    given = f"shoal verify {shlex.join((request.script, *request.args))} ({run.name})"
    notes = "; ".join(dict.fromkeys(note for rank in run.ranks for note in rank.notes))
    output = last_output(request, run.name)
    if run.code == TIMED_OUT and not run.length:
        found = f"no step in {request.limit:g} seconds"
        raise LaunchError(given=given, found=found, fix="give a longer --limit, or a smaller problem")
    if run.code and run.code != TIMED_OUT:
        found = (
            f"the script failed with exit code {run.code}{f'; it {notes}' if notes else ''}:\n{output}"
        )
        raise LaunchError(given=given, found=found, fix=_advice(notes, output, request))
    if not run.length:
        reason = f"; it {notes}" if notes else ""
        found = f"the script ended without a call of Optimizer.step in its ranks{reason}"
        fix = _advice(notes, output, request)
        raise LaunchError(given=given, found=found, fix=fix)


def _advice(notes: str, output: str, request: VerifyRequest) -> str:
    if "starts processes itself" in notes:
        return "let `shoal verify` start the ranks: run one rank per process"
    if "reads standard input" in notes:
        return "pass the values as arguments: shoal verify script.py --name value"
    if any(word in output.lower() for word in ("nvidia", "cuda", "gpu")):
        return "use a machine with a GPU, or the script's option for the CPU"
    return f"run it by itself first: shoal run -n {request.ranks[0]} {request.script}"


def _isolate(
    finding: PropertyFinding,
    repeat: Variant,
    baseline: RunRecord,
    source: ScriptSource,
    start: Callable[[Variant], RunRecord],
) -> PropertyFinding:
    """Run again with the hash seed, then with the order of files of the first run."""
    for changed, cause in (
        (replace(repeat, name=f"{repeat.name}, same hash seed", hash_seed=1), hash_order_cause),
        (replace(repeat, name=f"{repeat.name}, same files", reverse_files=False), file_order_cause),
    ):
        if properties.first_difference(baseline, start(changed)) is None:
            return replace(finding, cause=cause(source))
    return finding


def name_ranks(size: int) -> str:
    """Return the name of a run on this many ranks."""
    return "1 rank" if size == 1 else f"{size} ranks"


def _notes(runs: list[RunRecord], request: VerifyRequest) -> tuple[str, ...]:
    found = [f"the script {note}" for run in runs for rank in run.ranks for note in rank.notes]
    short = [run.name for run in runs if run.code == TIMED_OUT]
    if short:
        found.append(f"ended after {request.limit:g} seconds: {', '.join(short)}")
    return tuple(dict.fromkeys(found))


def audit_document(report: AuditReport) -> Document:
    """Return the answers, then the causes and the runs."""
    held = sum(finding.verdict == "held" for finding in report.findings)
    unknown = len(report.findings) - held - report.refuted
    answers = Table(
        caption="Properties",
        head=("property", "answer", "evidence"),
        rows=[(each.name, each.answer, each.evidence) for each in report.findings],
    )
    causes = [
        Text(text=f"{each.line}: {each.name}", advice=f"change: {each.change}", whole=True)
        for each in cause_of(report.findings)
    ]
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    runs = KeyNumbers(pairs=[("runs", "; ".join(report.runs)), ("versions", versions)])
    notes = [Text(text=f"note: {note}") for note in report.notes]
    return Document(
        title=f"shoal verify {report.command}",
        # It claims no more than the runs showed.
        verdict=f"{report.command}: {held} properties held, {report.refuted} refuted, {unknown} not "
        "decidable",
        sections=[
            Section(heading="Answers", blocks=[answers]),
            Section(heading="Causes", blocks=causes),
            Section(heading="Runs", blocks=[*notes, runs]),
        ],
        values={
            **to_plain(report),
            "findings": [{**to_plain(each), "answer": each.answer} for each in report.findings],
        },
    )

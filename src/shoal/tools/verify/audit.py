"""The audit of a script: runs its variants, and makes a document of the answers.

A second pass runs two variants again and finds the operation that differs.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.launcher.signals import Interrupted
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
    OperationDifference,
    PropertyFinding,
    Trace,
    first_operation,
    first_operation_by_rows,
    last_line,
    undecided,
)
from shoal.tools.verify.progress import VerifyProgress
from shoal.tools.verify.properties import (
    DRAWS,
    EVALUATION,
    FILES,
    MICRO_BATCHES,
    ORDER,
    REPEATABLE,
    REPLICAS,
    RESUME,
    SAMPLES,
    SCHEDULE,
    WORLD,
    cause_of,
)
from shoal.tools.verify.run_servers import RunServers, TimeLimitError
from shoal.tools.verify.variants import Variant, VerifyRequest, last_output, run_killed, run_variant
from shoal.util.document import Document, Section, Table, Text, to_plain
from shoal.util.errors import LaunchError
from shoal.util.packages import versions

PROPERTIES = (
    REPEATABLE,
    RESUME,
    SAMPLES,
    ORDER,
    DRAWS,
    EVALUATION,
    WORLD,
    REPLICAS,
    MICRO_BATCHES,
    SCHEDULE,
    FILES,
)
"""In the order of the report."""
FIRST_SEED, OTHER_SEED = 1, 2
"""Hash seeds of all runs, and of the repetition."""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The answers for one script, and the runs and versions that they are from.

    `stopped` says why the audit ended before all properties were decided, "" if it did not.
    """

    command: str
    runs: tuple[str, ...]
    findings: tuple[PropertyFinding, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    stopped: str = ""

    @property
    def refuted(self) -> int:
        """The number of refuted properties."""
        return sum(finding.verdict == "refuted" for finding in self.findings)


def audit_script(request: VerifyRequest, servers: RunServers, progress: VerifyProgress) -> AuditReport:
    """Run a script in its variants and decide its properties.

    Args:
        request: The script and the variants.
        servers: The processes that start the runs, which may end the audit early.
        progress: Shows each run, and each property as soon as it is decided.

    Returns:
        The answer for each property: `not decided` for those that the audit did not reach.

    Raises:
        LaunchError: If the script fails by itself, or takes no optimizer step that can be observed.
    """
    audit = _Audit(request, servers, progress)
    try:
        audit.run()
    except (TimeLimitError, Interrupted) as stop:
        servers.stopped = stop
    return audit.report(servers.reason)


class _Audit:
    """The runs of an audit so far, and the properties that they have decided."""

    def __init__(self, request: VerifyRequest, servers: RunServers, progress: VerifyProgress) -> None:
        self._request, self._servers, self._progress = request, servers, progress
        text = Path(request.script).read_text(encoding="utf-8", errors="replace")
        self._source = ScriptSource(name=request.script, text=text)
        self._started: list[str] = []
        self._variants: dict[str, Variant] = {}
        self._records: dict[str, RunRecord] = {}
        self._traces: dict[tuple[str, int], list[Trace]] = {}
        self._runs: list[RunRecord] = []
        """One run for each number of ranks, then the repetition."""
        self._separate = False
        """Whether a run had several ranks without a process group."""
        self._found: dict[str, PropertyFinding] = {}
        self._decided: set[str] = set()

    def run(self) -> None:
        """Run all variants."""
        request = self._request
        self._servers.expect(FIRST_SEED, OTHER_SEED)
        for size in sorted(set(request.ranks)):
            if not self._separate:
                self._observe(Variant(name=name_ranks(size), size=size, hash_seed=FIRST_SEED))
        if not self._runs:
            self._observe(Variant(name=name_ranks(1), size=1, hash_seed=FIRST_SEED))
        baseline = self._runs[-1]
        most = baseline.size
        # Another hash seed and order of files are what the next start of the same command may have.
        name = f"{name_ranks(most)}, again"
        repeat = Variant(name=name, size=most, hash_seed=OTHER_SEED, reverse_files=True)
        second = self._observe(repeat)
        self._decide(*self._decisions(), final=True)
        repeatable = properties.decide_repeatable(baseline, second, self._source)
        self._decide(repeatable, final=True)
        if repeatable.verdict == "refuted":
            self._isolate(repeatable, repeat, baseline)
        self._restart(baseline, repeatable)
        changed = None
        if any(loader.part is not None for loader in baseline.ranks[0].loaders.values()):
            name = f"{name_ranks(most)}, twice the micro-batches"
            changed = self._start(replace(self._variants[baseline.name], name=name, micro_batches=2))
        finding = properties.decide_micro_batches(baseline, changed)
        self._decide(finding, final=self._servers.stopped is None)
        self._check_stopped()
        for name in PROPERTIES:
            self._locate_operation(self._found[name])

    def _start(self, variant: Variant) -> RunRecord:
        """Run a variant and return its records, only the first ones if the audit is stopped."""
        name, kill = variant.name, variant.kill_at
        at = "" if kill is None or variant.trace_at else f" before step {kill}"
        self._started.append(f"{name}{at}")
        self._variants[name] = variant
        steps = variant.trace_at or self._request.steps
        restarts = partial(self._progress.run_starts, name, steps, restarted=True)
        run = run_variant if kill is None else partial(run_killed, restarts=restarts)
        self._progress.run_starts(name, steps if kill is None else kill - 1)
        record = self._records[name] = run(self._request, variant, self._servers)
        return record

    def _observe(self, variant: Variant) -> RunRecord:
        """Run the script, and decide what the run refutes."""
        record = self._start(variant)
        # Scripts that run at the same time in one directory may fail, or read each other's files.
        self._separate = self._separate or record.separate
        if self._servers.stopped is None and not record.separate:
            check_run(self._request, record)
        if record.length and not record.separate:
            self._runs.append(record)
            self._decide(*self._decisions(), final=False)
        self._check_stopped()
        return record

    def _check_stopped(self) -> None:
        if self._servers.stopped is not None:
            raise self._servers.stopped

    def _decisions(self) -> Iterator[PropertyFinding]:
        """Yield what the runs so far say about the properties that no other run decides."""
        runs, source = self._runs, self._source
        yield properties.decide_counts(runs, source, training=True)
        yield properties.decide_order(runs)
        yield properties.decide_draws(runs, source)
        yield properties.decide_counts(runs, source, training=False)
        if self._separate:
            reason = "the script makes no process group: each rank is a separate run"
            yield undecided(WORLD, reason)
        else:
            sizes = len(set(self._request.ranks))
            repetition = runs[sizes] if len(runs) > sizes else None
            yield properties.decide_world_size(runs[:sizes], source, repetition)
        yield properties.decide_replicas(runs, source)
        yield properties.decide_schedule(runs)
        yield properties.decide_files(runs)

    def _decide(self, *findings: PropertyFinding, final: bool) -> None:
        """Keep findings, and show those that are decided: no further run takes a refutation back."""
        for finding in findings:
            self._found[finding.name] = finding  # a later run may show an earlier reason
            if finding.name not in self._decided and (final or finding.verdict == "refuted"):
                self._decided.add(finding.name)
                self._progress.decided(finding)

    def _isolate(self, finding: PropertyFinding, repeat: Variant, baseline: RunRecord) -> None:
        """Run again with the hash seed, then with the order of files of the first run."""
        seed, files = (f"{repeat.name}, same {what}" for what in ("hash seed", "files"))
        for changed, cause in (
            (replace(repeat, name=seed, hash_seed=FIRST_SEED), hash_order_cause(self._source)),
            (
                replace(repeat, name=files, reverse_files=False),
                file_order_cause(baseline, self._source),
            ),
        ):
            record = self._start(changed)
            self._check_stopped()
            check_run(self._request, record)
            if properties.first_difference(baseline, record) is None:
                self._found[finding.name] = replace(finding, cause=cause)
                return

    def _restart(self, baseline: RunRecord, repeatable: PropertyFinding) -> None:
        """Decide whether runs that are killed resume."""
        restarts: list[RunRecord] = []
        if repeatable.verdict == "held":
            steps = kill_steps(baseline.length, self._request.kills)
            for number, step in enumerate(steps, start=1):
                name = f"{name_ranks(baseline.size)}, kill {number}"
                record = self._start(Variant(name=name, size=baseline.size, kill_at=step))
                if self._servers.stopped is None or record.length:
                    restarts.append(record)
                    resume = properties.decide_resume(baseline, restarts, self._source)
                    self._decide(resume, final=False)
                self._check_stopped()
        resume = properties.decide_resume(baseline, restarts, self._source)
        if repeatable.verdict != "held":
            reason = "two runs without a kill differ already"
            resume = replace(resume, verdict="not decidable", evidence=reason)
        self._decide(resume, final=True)

    def _locate_operation(self, finding: PropertyFinding) -> None:
        """Compare the operations of the step in which tensors differ, if there is one."""
        difference = finding.difference
        if difference is None:
            return
        names = difference.first, difference.second
        first, second = map(self._trace, names, difference.steps)
        runs = [self._records[name] for name in names]
        restart = None
        if finding.name == RESUME:
            offset = difference.steps[0] - difference.steps[1]
            restart = Restart(runs[0], runs[1], offset, self._source)
        if len(first) == len(second):
            found = first_operation(first, second, restarted=restart is not None)
        else:
            found = first_operation_by_rows(first, second)
        evidence, cause = finding.evidence, finding.cause
        if found is not None:
            evidence = f"{evidence}; {found}"
        elif cause is None:
            line = runs[1].ranks[0].steps[difference.steps[1] - 1].line
            evidence = f"cause not known; {evidence}, before {line}"
        if cause is not None and cause.name == "gradients clipped by the norm of a shard":
            used = runs[1].ranks[0].steps[difference.steps[1] - 1].gradients.values()
            line = last_line(second[0], {each.checksum for each in used})
            cause = replace(cause, line=line or cause.line)
        # The line of a draw that was observed is better than that of the first in the script's text.
        guessed = cause is not None and cause.name == "unseeded torch generator"
        if found is not None and (cause is None or (guessed and found.part == "generator")):
            cause = operation_cause(
                found,
                restart=restart,
                ranks=finding.name == WORLD,
                layers={**runs[0].ranks[0].layers, **runs[1].ranks[0].layers},
                source=self._source,
                trained=self._trained_line(found, names[1], difference.steps[1]),
            )
        self._found[finding.name] = replace(finding, evidence=evidence, operation=found, cause=cause)

    def _trained_line(self, found: OperationDifference, name: str, step: int) -> str:
        """Return the line that set the training mode last before a step of a run, "" if the module of
        an operation has no gradient in the step before, which made no difference.
        """
        steps = self._records[name].ranks[0].steps[: step - 1]
        weight = steps[-1].gradients.get(f"{found.module}.weight") if steps else None
        traced = self._records[self._traced_name(name, step)]
        return traced.ranks[0].called("train mode") if weight is not None and weight.norm else ""

    def _trace(self, name: str, step: int) -> list[Trace]:
        """Return the operations of each rank in one step of a run, which runs again for them once."""
        if (name, step) not in self._traces:
            # A name of its own: it is the name of the run's directory.
            traced = self._traced_name(name, step)
            record = self._start(replace(self._variants[name], name=traced, trace_at=step))
            self._check_stopped()
            self._traces[name, step] = [rank.operations for rank in record.ranks]
        return self._traces[name, step]

    def _traced_name(self, name: str, step: int) -> str:
        after = "" if self._variants[name].kill_at is None else " after the restart"
        return f"{name}, operations of step {step}{after}"

    def report(self, stopped: str) -> AuditReport:
        """Return the answers, and for properties without one why the audit was `stopped`."""
        findings = []
        for name in PROPERTIES:
            finding = self._found.get(name, PropertyFinding(name=name, verdict="not decided"))
            if name not in self._decided:
                far = f"; {finding.answer} so far" if finding.verdict == "held" else ""
                finding = replace(finding, verdict="not decided", evidence=f"{stopped}{far}")
            findings.append(finding)
        request = self._request
        return AuditReport(
            command=shlex.join((request.script, *request.args)),
            runs=tuple(self._started),
            findings=tuple(findings),
            notes=_notes(self._runs, request, self._started[-1:] if stopped else []),
            versions=versions(),
            stopped=stopped,
        )


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
        raise LaunchError(given=given, found=found, fix=_advice(notes, output, run.size, request))
    if not run.length:
        reason = f"; it {notes}" if notes else ""
        found = f"the script ended without a call of Optimizer.step in its ranks{reason}"
        fix = _advice(notes, output, run.size, request)
        if not notes:
            fix += ", or verify without its checkpoints, if it has resumed a finished training"
        raise LaunchError(given=given, found=found, fix=fix)


def _advice(notes: str, output: str, size: int, request: VerifyRequest) -> str:
    if "starts processes itself" in notes:
        return "let `shoal verify` start the ranks: run one rank per process"
    if "reads standard input" in notes:
        return "pass the values as arguments: shoal verify script.py --name value"
    if any(word in output.lower() for word in ("nvidia", "cuda", "gpu")):
        return "use a machine with a GPU, or the script's option for the CPU"
    return f"run it by itself first: shoal run -n {size} {request.script}"


def name_ranks(size: int) -> str:
    """Return the name of a run on this many ranks."""
    return "1 rank" if size == 1 else f"{size} ranks"


def _notes(runs: list[RunRecord], request: VerifyRequest, stopped: list[str]) -> tuple[str, ...]:
    """Return what the script does that matters, and the runs that took too long."""
    found = [f"the script {note}" for run in runs for rank in run.ranks for note in rank.notes]
    short = [run.name for run in runs if run.code == TIMED_OUT and run.name not in stopped]
    if short:
        found.append(f"ended after {request.limit:g} seconds: {', '.join(short)}")
    return tuple(dict.fromkeys(found))


def audit_document(report: AuditReport) -> Document:
    """Return the answers, then the causes and the runs."""
    counts = Counter(finding.verdict for finding in report.findings)
    verdict = f"{report.command}: {counts['held']} properties held, {counts['refuted']} refuted, "
    verdict += f"{counts['not decidable']} not decidable"
    if report.stopped:
        verdict += f", {counts['not decided']} not decided ({report.stopped})"
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
    runs = [Text(text=f"runs: {'; '.join(report.runs)}"), Text(text=f"versions: {versions}")]
    notes = [Text(text=f"note: {note}") for note in report.notes]
    return Document(
        title=f"shoal verify {report.command}",
        # It claims no more than the runs showed.
        verdict=verdict,
        sections=[
            Section(heading="Answers", blocks=[answers]),
            Section(heading="Causes", blocks=causes),
            Section(heading="Runs", blocks=[*notes, *runs]),
        ],
        values={
            **to_plain(report),
            "findings": [{**to_plain(each), "answer": each.answer} for each in report.findings],
        },
    )

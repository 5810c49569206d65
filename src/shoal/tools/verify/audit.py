"""The audit of a script: runs its variants and collects the answers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.tools.verify import properties
from shoal.tools.verify.bisection import locate_operation
from shoal.tools.verify.causes import ScriptSource, file_order_cause, hash_order_cause
from shoal.tools.verify.findings import PropertyFinding
from shoal.tools.verify.observations import TIMED_OUT, RunRecord
from shoal.tools.verify.variants import Variant, VerifyRequest, last_output, run_killed, run_variant
from shoal.util.errors import LaunchError
from shoal.util.packages import versions

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

    def announce(variant: Variant) -> None:
        progress(variant.name)
        variants[variant.name] = variant
        at = "" if variant.kill_at is None else f" before step {variant.kill_at}"
        done.append(f"{variant.name}{at}")

    def start(variant: Variant) -> RunRecord:
        announce(variant)
        record = run_variant(request, variant)
        check_run(request, record)
        return record

    most = max(request.ranks)
    sizes = sorted(set(request.ranks))
    by_size = [start(Variant(name=_ranks(size), size=size)) for size in sizes]
    baseline = by_size[-1]
    # Another hash seed and order of files are what the next start of the same command may have.
    repeat = Variant(name=f"{_ranks(most)}, again", size=most, hash_seed=2, reverse_files=True)
    second = start(repeat)
    repeatable = properties.decide_repeatable(baseline, second, source)
    if repeatable.verdict == "refuted":
        repeatable = _isolate(repeatable, repeat, baseline, source, start)
    restarts = []
    if repeatable.verdict == "held":
        for number, step in enumerate(kill_steps(baseline.length, request.kills), start=1):
            variant = Variant(name=f"{_ranks(most)}, kill {number}", size=most, kill_at=step)
            announce(variant)
            restarts.append(run_killed(request, variant))
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
        properties.decide_samples(runs, source),
        properties.decide_order(runs),
        properties.decide_draws(runs, source),
        properties.decide_evaluation(runs, source),
        properties.decide_world_size(by_size, source),
        properties.decide_replicas(runs, source),
        properties.decide_micro_batches(baseline, changed),
        properties.decide_schedule(runs),
        properties.decide_files(runs),
    )
    findings = tuple(
        locate_operation(request, finding, variants, source, announce) for finding in findings
    )
    return AuditReport(
        command=shlex.join((request.script, *request.args)),
        runs=tuple(done),
        findings=findings,
        notes=_notes(runs, request),
        versions=versions(),
    )


def _run_with_more_micro_batches(
    request: VerifyRequest, baseline: RunRecord, announce: Callable[[Variant], None]
) -> RunRecord | None:
    """Return a run like the baseline with twice the micro-batches, None without a shoal.Loader."""
    if all(loader.part is None for loader in baseline.ranks[0].loaders.values()):
        return None
    name = f"{_ranks(baseline.size)}, twice the micro-batches"
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


def _ranks(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"


def _notes(runs: list[RunRecord], request: VerifyRequest) -> tuple[str, ...]:
    found = [f"the script {note}" for run in runs for rank in run.ranks for note in rank.notes]
    short = [run.name for run in runs if run.code == TIMED_OUT]
    if short:
        found.append(f"ended after {request.limit:g} seconds: {', '.join(short)}")
    return tuple(dict.fromkeys(found))

"""The second pass of an audit: runs two variants again and finds the operation that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.tools.verify.causes import DROPOUT, GUESSED, ScriptSource, batch_norm_cause
from shoal.tools.verify.findings import LikelyCause, PropertyFinding
from shoal.tools.verify.operations import OperationDifference, first_operation, first_operation_by_rows
from shoal.tools.verify.properties import REPEATABLE, RESUME, WORLD
from shoal.tools.verify.variants import Variant, VerifyRequest, run_killed, run_variant

DRAWS = {
    REPEATABLE: ("unseeded torch generator", "seed torch with the same number in each run"),
    RESUME: ("generator state not in the checkpoint", "save and restore `torch.get_rng_state()`"),
    WORLD: (
        "random numbers drawn per rank",
        "draw by sample, as Shoal does, or expect statistical equality only",
    ),
}

OUTSIDE = {
    "argument": (
        "value from outside of torch",
        "compute it from the seed, the step or the sample: it is {}",
    ),
    "input": (
        "tensor from outside of torch's operations",
        "seed or save the source of this tensor: {}",
    ),
    "mean": (
        "mean of means",
        "divide the sum of the losses by the number of samples or tokens of all ranks",
    ),
    "operation": (
        "other operations are called",
        "do not branch on the rank, the time, or the order of a set",
    ),
}
"""Causes of differences in a part of an operation."""


def locate_operation(
    request: VerifyRequest,
    finding: PropertyFinding,
    variants: Mapping[str, Variant],
    source: ScriptSource,
    announce: Callable[[Variant], None],
) -> PropertyFinding:
    """Run two variants again, record the operations of the step that differs, and compare them.

    Args:
        request: The script.
        finding: A finding, returned unchanged if no step is known in which tensors differ.
        variants: The runs so far, by name.
        source: The script's text.
        announce: Called with each run before it starts.

    Returns:
        The finding, with the operation and a cause at its line if one was found.
    """
    difference = finding.difference
    if difference is None:
        return finding
    traces = []
    for name, step in zip((difference.first, difference.second), difference.steps, strict=True):
        # A name of its own: it is the name of the run's directory.
        variant = replace(
            variants[name], name=f"{name}, operations for '{finding.name}'", trace_at=step
        )
        announce(variant)
        run = run_variant if variant.kill_at is None else run_killed
        traces.append([rank.operations for rank in run(request, variant).ranks])
    first, second = traces
    compare = first_operation if len(first) == len(second) else first_operation_by_rows
    found = compare(first, second)
    if found is None:
        return finding
    return replace(
        finding,
        evidence=f"{finding.evidence}; {found}",
        operation=found,
        cause=operation_cause(finding.name, found, finding.cause, source),
    )


def operation_cause(
    name: str, found: OperationDifference, known: LikelyCause | None, source: ScriptSource
) -> LikelyCause:
    """Return the cause at an operation, or the known cause unless it is a guess."""
    if known is not None and known.name not in GUESSED:
        return known
    if "batch_norm" in found.operation and name == WORLD:
        return batch_norm_cause(source)
    if found.part == "generator":
        if known is not None and known.name == DROPOUT:
            return known
        cause, change = DRAWS[name]
    elif found.part in OUTSIDE:
        cause, change = OUTSIDE[found.part]
    elif name == WORLD:
        cause = "operation depends on the rank or on other samples"
        change = "compute the output of each sample from this sample only"
    else:
        cause = "operation is not deterministic"
        change = "call `torch.use_deterministic_algorithms(True)`, or replace the operation"
    line = found.line or source.name
    return LikelyCause(name=cause, line=line, change=change.format(found.detail))

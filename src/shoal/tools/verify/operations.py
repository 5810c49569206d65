"""Records of operations, the first that differs between two runs, and the findings of an audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any, Literal

ROUNDING = 1e-4
"""Largest relative difference that counts as rounding, in float32."""
ROUNDING_STEPS = 8
"""The same in units of the relative spacing of the dtype, for dtypes with a larger spacing."""

MEANS = ("mean", "loss", "cross_entropy")
"""Words in the names of operations whose scalar output is a mean over samples."""

READ = "input", "aten._local_scalar_dense.default"
"""The difference of an operation that only reads a number."""

Part = Literal["operation", "argument", "input", "generator", "output", "mean"]


@dataclass(frozen=True, kw_only=True)
class TracedTensor:
    """A tensor by its checksum.

    `rows` has one projection for each entry of its first dimension; None for large or unusual tensors.
    `spacing` is the relative spacing of its dtype. `name` is the name of a parameter or buffer.
    """

    checksum: str
    shape: tuple[int, ...]
    rows: tuple[float, ...] | None = None
    spacing: float = 0.0
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class TracedOperation:
    """One operation that torch dispatched.

    `phase` is `forward`, `backward` or `update`. `arguments` are the arguments that are not tensors.
    `generator` is the checksum of the generator's state, if the operation draws from it. `drawn` are
    Python's and NumPy's generators from which the script drew since the operation before. `outputs` is
    empty if they are not known yet, as after a collective.
    """

    operation: str
    phase: str
    module: str = ""
    line: str = ""
    inputs: tuple[TracedTensor, ...] = ()
    arguments: tuple[str, ...] = ()
    outputs: tuple[TracedTensor, ...] = ()
    generator: str = ""
    drawn: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OperationDifference:
    """The first operation that differs between two runs.

    `part` is the first part of it that differs: another operation, an argument, an input, the state of
    the generator, or only the output. It is `mean` if the output is a mean over samples, and the mean
    over all ranks differs. `detail` has the two values of an argument, or names an input. `drawn` are
    the generators from which the script drew for this operation.
    """

    operation: str
    phase: str
    module: str
    line: str
    part: Part
    detail: str = ""
    drawn: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        return f"{self.phase}{where}, {self.operation}: {self._reason}"

    @property
    def _reason(self) -> str:
        return {
            "operation": f"another operation in the second run: {self.detail}",
            "argument": f"the argument is {self.detail}",
            "input": f"{self.detail} differs, and no operation before it made the difference",
            "generator": "equal inputs, another state of the generator",
            "output": "equal inputs, different output",
            "mean": "equal inputs, but the mean of its outputs over the ranks is another value",
        }[self.part]


def read_operation(event: dict[str, Any]) -> TracedOperation:
    """Return the record of an event."""
    tensors = {
        key: tuple(
            TracedTensor(
                checksum=value["checksum"],
                shape=tuple(value["shape"]),
                rows=None if value["rows"] is None else tuple(value["rows"]),
                spacing=value["spacing"],
                name=value["name"],
            )
            for value in event[key]
        )
        for key in ("inputs", "outputs")
    }
    plain = {key: tuple(event[key]) for key in ("arguments", "drawn")}
    return TracedOperation(**{**event, **tensors, **plain})


Trace = Sequence[TracedOperation]


def same_step(first: Trace, second: Trace) -> tuple[Trace, Trace]:
    """Return the ends of two traces that call the same operations at the same lines, before the update.

    The traced step of a restart follows the start of the script, that of the other run the step before.
    """
    computed = [[each for each in trace if each.phase != "update"] for trace in (first, second)]
    count = 0
    for x, y in zip(reversed(computed[0]), reversed(computed[1]), strict=False):
        if (x.operation, x.phase, x.line) != (y.operation, y.phase, y.line):
            break
        count += 1
    return computed[0][len(computed[0]) - count :], computed[1][len(computed[1]) - count :]


def last_line(trace: Trace, tensors: Collection[str]) -> str:
    """Return the line of the last operation before the update that made one of these tensors, or ""."""
    made = (
        record.line
        for record in reversed(trace)
        if record.phase != "update" and any(each.checksum in tensors for each in record.outputs)
    )
    return next((line for line in made if line), "")


def first_operation(
    first: Sequence[Trace], second: Sequence[Trace], *, restarted: bool = False
) -> OperationDifference | None:
    """Compare two runs with the same number of ranks, bit by bit, rank by rank.

    A difference reaches the other ranks in a later collective, so the earliest one counts. Of a run and
    its restart, the ends of the traces are compared; None if the difference begins before these.
    """
    found: list[tuple[int, OperationDifference | None]] = []
    for a, b in zip(first, second, strict=True):
        ends = same_step(a, b) if restarted else (a, b)
        for position, (x, y) in enumerate(zip_longest(*ends)):
            difference = _difference(x, y)
            # A number that is read makes a difference where it is used, if anywhere.
            if difference is not None and (difference.part, difference.operation) != READ:
                older = restarted and difference.part == "input" and _have_common_origin(a, x, b, y)
                found.append((position, None if older else difference))
                break
    return min(found, key=lambda entry: entry[0])[1] if found else None


def _have_common_origin(a: Trace, x: TracedOperation, b: Trace, y: TracedOperation) -> bool:
    """Return whether inputs that differ were computed from equal tensors, or at the same line."""
    return any(
        not _origins(a, x, one.checksum).isdisjoint(_origins(b, y, other.checksum))
        for one, other in zip(x.inputs, y.inputs, strict=False)
        if one.checksum != other.checksum
    )


def _origins(trace: Trace, user: TracedOperation, tensor: str) -> set[str | tuple[str, str]]:
    """Return the tensors from which the operations before `user` made one, and these operations."""
    found: set[str | tuple[str, str]] = {tensor}
    for record in reversed(list(takewhile(lambda each: each is not user, trace))):
        if any(output.checksum in found for output in record.outputs):
            found |= {each.checksum for each in record.inputs}
            found.add((record.operation, record.line))
    return found


def _difference(x: TracedOperation | None, y: TracedOperation | None) -> OperationDifference | None:
    if x is None or y is None:
        present = x or y
        return None if present is None else _differs(present, "operation", "none")
    if x.operation != y.operation:
        return _differs(x, "operation", y.operation)
    for left, right in zip_longest(x.arguments, y.arguments):
        if left != right:
            return _differs(y, "argument", f"{left} in the first run, {right} in the second")
    for number, (one, other) in enumerate(zip_longest(x.inputs, y.inputs), start=1):
        if one is None or other is None or one.checksum != other.checksum:
            name = one.name if one is not None else ""
            return _differs(y, "input", f"input {number}" + (f" ({name})" if name else ""))
    if [out.checksum for out in x.outputs] != [out.checksum for out in y.outputs]:
        return _differs(y, "output" if x.generator == y.generator else "generator", "")
    return None


def _differs(record: TracedOperation, part: Part, detail: str) -> OperationDifference:
    return OperationDifference(
        operation=record.operation,
        phase=record.phase,
        module=record.module,
        line=record.line,
        part=part,
        detail=detail,
        drawn=record.drawn if part != "generator" else ("torch",),
    )


def first_operation_by_rows(
    first: Sequence[Trace], second: Sequence[Trace]
) -> OperationDifference | None:
    """Compare two runs whose ranks split the same samples differently, up to rounding.

    The entries of the first dimension of a tensor, over all ranks, must be the same, in any order.
    Operations that reduce over samples differ between ranks by design, so they are not compared.
    """
    traces = [dict(_numbered(trace)) for trace in (*first, *second)]
    scalar: OperationDifference | None = None
    pairs: OperationDifference | None = None
    for key, record in reversed(traces[0].items()):
        same = [found[key] for found in traces if key in found]
        if len(same) < len(traces) or record.phase == "update":
            continue
        inputs, outputs = (
            [_compare_parts(parts, len(first), record.phase) for parts in zip(*lists, strict=False)]
            for lists in ([r.inputs for r in same], [r.outputs for r in same])
        )
        if pairs is None and record.phase == "forward" and _pairs_samples(same, inputs):
            pairs = _differs(same[-1], "output", "")
        if any(answer != "equal" for answer, _ in inputs):
            continue
        split = any(kind == "split" for _, kind in inputs)
        # Outside of the model, ranks may read other indices of a dataset, or draw other seeds.
        same_call = len({other.arguments for other in same}) == 1
        copied = not split and same_call and (bool(record.module) or not record.generator)
        for answer, kind in outputs:
            if answer == "differs" and not record.generator and split and not same_call:
                values = " and ".join(dict.fromkeys(str(other.arguments) for other in same))
                return _differs(same[-1], "argument", values)
            # A new tensor may have the size of the local batch.
            if answer == "differs" and ((inputs and kind == "split") or copied):
                return _differs(same[-1], "generator" if record.generator else "output", "")
        if scalar is None and split and record.phase == "forward" and _is_uneven(same, len(first)):
            is_mean = any(word in record.operation for word in MEANS)
            scalar = _differs(same[-1], "mean" if is_mean else "output", "")
    return scalar or pairs


def _pairs_samples(same: Sequence[TracedOperation], inputs: Sequence[tuple[str, str]]) -> bool:
    """Return whether the output has an entry for each pair of samples of the local batch."""
    if ("equal", "split") not in inputs:
        return False
    number = inputs.index(("equal", "split"))
    sizes = {
        (*record.inputs[number].shape[:1], *output.shape)
        for record in same
        for output in record.outputs[:1]
    }
    return len(sizes) > 1 and all(len(each) == 3 and len(set(each)) == 1 for each in sizes)


def _is_uneven(same: Sequence[TracedOperation], first: int) -> bool:
    """Return whether the first output is a number that is neither summed nor averaged over ranks."""
    values = [
        record.outputs[0].rows for record in same if record.outputs and not record.outputs[0].shape
    ]
    numbers = [rows[0] for rows in values if rows]
    if len(numbers) < len(same):
        return False
    left, right = numbers[:first], numbers[first:]
    if _are_close([sum(left)], [sum(right)], ROUNDING):
        return False
    return not _are_close([sum(left) / len(left)], [sum(right) / len(right)], ROUNDING)


def _numbered(trace: Trace) -> Iterator[tuple[tuple[str, str, str, int], TracedOperation]]:
    """Number the calls of an operation in a module from the last one: wrappers of the model call more
    operations, and an evaluation may come before the step.
    """
    seen: Counter[tuple[str, str, str]] = Counter()
    for record in reversed(trace):
        call = record.phase, record.module, record.operation
        seen[call] += 1
        yield (*call, seen[call]), record


def _compare_parts(
    parts: Sequence[TracedTensor], first: int, phase: str
) -> tuple[Literal["equal", "differs", "unknown"], str]:
    """Return how a tensor on the `first` ranks compares with the rest, and whether ranks split it."""
    rows = [part.rows for part in parts if part.rows is not None]
    if len(rows) < len(parts):
        return "unknown", ""
    limit = max(ROUNDING, *(ROUNDING_STEPS * part.spacing for part in parts))
    if all(part.shape == parts[0].shape for part in parts):
        equal = all(_are_close(rows[0], values, limit) for values in rows)
        return "equal" if equal else "differs", "copied"
    left, right = rows[:first], rows[first:]
    total = sum(map(len, left))
    if total != sum(map(len, right)) or any(p.shape[1:] != parts[0].shape[1:] for p in parts):
        return "unknown", ""
    equal = _are_close(_joined(left), _joined(right), limit)
    if phase == "backward":  # the gradient of a mean over fewer samples is larger
        scaled = [[[v * len(r) / total for v in r] for r in side] for side in (left, right)]
        equal = equal or _are_close(_joined(scaled[0]), _joined(scaled[1]), limit)
    return "equal" if equal else "differs", "split"


def _joined(rows: Sequence[Sequence[float]]) -> list[float]:
    return sorted(value for part in rows for value in part)


def _are_close(left: Sequence[float], right: Sequence[float], limit: float) -> bool:
    scale = max((abs(value) for value in left), default=0.0) or 1.0
    return all(abs(a - b) <= limit * scale for a, b in zip(left, right, strict=True))


Verdict = Literal["held", "refuted", "not decidable", "not decided"]


@dataclass(frozen=True, kw_only=True)
class LikelyCause:
    """A likely cause: its name, the line of the user's script, and the change to make."""

    name: str
    line: str
    change: str


@dataclass(frozen=True, kw_only=True)
class DifferingStep:
    """The first step in which tensors differ between two runs: its number in each, from 1."""

    first: str
    second: str
    steps: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PropertyFinding:
    """The answer for one property.

    `runs` is the number of runs in which it was observed, `evidence` what was seen or the reason that
    nothing could be decided. `difference` is the step in which to look for the operation that makes the
    difference, `operation` this operation.
    """

    name: str
    verdict: Verdict
    runs: int = 0
    evidence: str = ""
    cause: LikelyCause | None = None
    difference: DifferingStep | None = None
    operation: OperationDifference | None = None

    @property
    def answer(self) -> str:
        """The verdict in words: `held in 2 runs`, `refuted`, `not decidable here`, `not decided`."""
        if self.verdict == "held":
            return f"held in {self.runs} run{'s' if self.runs != 1 else ''}"
        return "not decidable here" if self.verdict == "not decidable" else self.verdict


def held(name: str, runs: int, evidence: str = "") -> PropertyFinding:
    """Return that a property held in a number of runs."""
    return PropertyFinding(name=name, verdict="held", runs=runs, evidence=evidence)


def refuted(
    name: str,
    evidence: str,
    cause: LikelyCause | None = None,
    difference: DifferingStep | None = None,
) -> PropertyFinding:
    """Return that a property does not hold, with what was seen."""
    return PropertyFinding(
        name=name, verdict="refuted", evidence=evidence, cause=cause, difference=difference
    )


def undecided(name: str, reason: str) -> PropertyFinding:
    """Return that a property could not be decided."""
    return PropertyFinding(name=name, verdict="not decidable", evidence=reason)

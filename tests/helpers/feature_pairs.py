"""The table of docs/reference/feature-matrix.md: each pair of features, run on real ranks.

As a script, this module writes the table.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from helpers.feature_trials import (
    APPROXIMATE,
    HALVES,
    SAVED,
    STEPS,
    Training,
    begun,
    expected,
    models,
    train,
)
from helpers.ranks import RankError, Ranks
from helpers.reference import SEED, TOLERANCE, Trained, distance

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "feature-matrix.md"
HALF = 0.04
"""How far four steps in 16 bits stray from those of one process in 16 bits."""
SAME_WAY = 0.8
"""The least cosine between where parameters went and where those of one process did."""

SPREAD = {  # how it is spread: the axes of the layout, and what is written
    "DDP": ("replicate",),
    "FSDP": ("shard",),
    "HSDP": ("replicate", "shard"),
    "TensorParallel": ("tensor",),
    "sequence": ("tensor",),
    "logits": ("tensor",),
    "ContextParallel": ("context",),
    "ExpertParallel": ("expert",),
    "Pipeline": ("pipeline",),
    "zero bubble": ("pipeline",),
    "DevicePlacement": (),
    "RPCPipeline": ("pipeline",),
    "replicas": ("replicate",),
}
FEATURES = (
    "ActivationCheckpointing",
    "ActivationCheckpointing, save",
    "bf16",
    "fp16",
    "inductor",
    "blocks",
    "script",
    "clip",
    "micro-batches",
    "custom loop",
    "EMA",
    "checkpoint",
    "evaluate",
    "factory",
    "unused",
    "frozen",
    "tied",
    "direct",
    "strides",
    "scalars",
    "two models",
)
OPTIMIZERS = ("Adafactor", "Muon, AdamW")
"""Tried with each strategy; with features they are like the AdamW of all other cells."""
ALONE = ("factory", "evaluate", "direct", "strides", "scalars")
"""Features not tried with each other: over before a step or after it, or a matter of the strategy."""

SAME = [  # a pair that is one thing, or two values of one argument
    {"ActivationCheckpointing", "ActivationCheckpointing, save"},
    {"bf16", "fp16"},
    {"inductor", "script"},
    {"inductor", "blocks"},
    {"blocks", "script"},
    {"Pipeline", "zero bubble"},
    {"RPCPipeline", "Pipeline"},
    {"RPCPipeline", "zero bubble"},
    {"TensorParallel", "sequence"},
    {"TensorParallel", "logits"},
    {"replicas", "DDP"},
]
Pair = tuple[str, str]
Parameters = Mapping[str, Any]

_MIXED = [name for name in SPREAD if name != "HSDP"]
_TOGETHER = [name for name in FEATURES if name not in ALONE]
WORKS, FAILS = "✓", "✗"
"""What a cell begins with; after FAILS comes the number of a note, a link to it."""
TABLES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "features and strategies": (
        (*FEATURES, *OPTIMIZERS),
        [name for name in SPREAD if name != "replicas"],
    ),
    "strategies": (_MIXED[1:], _MIXED[:-1]),
    "features": (_TOGETHER[1:], _TOGETHER[:-1]),
    "features and approximations": (FEATURES, [*APPROXIMATE]),
}
"""By title, rows and columns."""


def cells(rows: Sequence[str], columns: Sequence[str]) -> list[Pair]:
    """The pairs of a table; of one with itself, those below the diagonal."""
    pairs = itertools.product(rows, columns)
    if not {*rows} & {*columns}:
        return list(pairs)
    order = [columns[0], *rows]
    return [
        (row, column)
        for row, column in pairs
        if order.index(column) < order.index(row) and {row, column} not in SAME
    ]


def layout(pair: Pair) -> str:
    """The layout of a pair; features alone are tried with DDP."""
    axes = {axis for name in pair for axis in SPREAD.get(name, ())} or {"replicate"}
    order = ("replicate", "shard", "expert", "context", "tensor", "pipeline")
    return ",".join(f"{axis}=2" for axis in order if axis in axes)


PAIRS = sorted((pair for table in TABLES.values() for pair in cells(*table)), key=layout)
"""All pairs, those of one layout after each other."""


def attempt(ranks: Ranks, pair: Pair, directory: Path) -> str | None:
    """None where a pair trains like one process, else why it is refused.

    AssertionError for all else: other numbers, other errors, ranks that don't agree.
    """
    names = {*pair} if {*pair} & (SPREAD.keys() | APPROXIMATE.keys()) else {*pair, "DDP"}
    names |= {"experts"} if "ExpertParallel" in names else set()
    saves = "checkpoint" in names
    results = ranks.attempt(train, names, directory if saves else None)
    errors = [result for result in results if isinstance(result, RankError)]
    refused = [error.error for error in errors if error.error is not None]
    if len(refused) == ranks.size:
        return min((error.found for error in refused), key=len)  # the one that names no rank
    assert not errors, f"{' x '.join(pair)}: {errors[0].text}"
    together = {name: value for result in results for name, value in result.parameters.items()}
    found = [Trained(together | each.parameters, each.norms, each.losses) for each in results]
    wanted = expected(names)
    if saves:
        with shoal.init(device="cpu", seed=SEED) as world:
            alone = names - SPREAD.keys() - APPROXIMATE.keys()
            found = [Training(world, alone).run(SAVED, STEPS, directory)]
        begin = SAVED * len(models(names))
        wanted = Trained(wanted.parameters, wanted.norms[begin:], wanted.losses[begin:])
    if APPROXIMATE.keys() & names:
        start = begun(names)
        for each in results:
            assert all(np.array_equal(results[0].parameters[n], each.parameters[n]) for n in start), (
                pair
            )
        assert _cosine(found[0].parameters, wanted.parameters, start) > SAME_WAY, pair
        return None
    for each in found:
        error = distance(each, wanted)
        assert error < (HALF if HALVES.keys() & names else TOLERANCE), f"{' x '.join(pair)}: {error}"
    return None


def _cosine(found: Parameters, wanted: Parameters, begin: Parameters) -> float:
    """Between the ways that the parameters in `begin` have gone."""
    pairs = [(found[n] - begin[n], wanted[n] - begin[n]) for n in begin]
    mine, other = (np.concatenate([each.ravel() for each in ways]) for ways in zip(*pairs, strict=True))
    return float(mine @ other / (np.linalg.norm(mine) * np.linalg.norm(other)))


@contextlib.contextmanager
def starting() -> Iterator[Callable[[str], Ranks]]:
    """Ranks by layout, started when first asked for; those of another layout end then."""
    with contextlib.ExitStack() as stack:
        running: dict[str, Ranks] = {}

        def ranks(layout: str) -> Ranks:
            if layout not in running:
                stack.close()
                running.clear()
                size = math.prod(int(part.partition("=")[2]) for part in layout.split(","))
                started = Ranks(size, layout=layout, seed=SEED, timeout=60.0, prepare_timeout=60.0)
                running[layout] = stack.enter_context(started)
            return running[layout]

        yield ranks


def page(text: str, found: dict[Pair, str | None]) -> str:
    """The page, its tables and reasons as found."""
    ordered = (found[pair] for table in TABLES.values() for pair in cells(*table))
    reasons = list(dict.fromkeys(reason for reason in ordered if reason is not None))
    parts = {title: _table(found, reasons, *table) for title, table in TABLES.items()}
    parts["reasons"] = "\n".join(
        f'{n}. <a id="note-{n}"></a>{_escaped(reason)}' for n, reason in enumerate(reasons, 1)
    )
    for title, part in parts.items():
        begin, end = f"<!-- {title} -->\n", f"<!-- end of {title} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{part}\n\n{end}{rest.partition(end)[2]}"
    return text


def read(text: str) -> dict[Pair, str | None]:
    """What a page says."""
    reasons = {
        number: re.sub(r"\\([*<_])", r"\1", reason)
        for number, again, reason in re.findall(
            r'^(\d+)\. <a id="note-(\d+)"></a>(.*)$', text, re.MULTILINE
        )
        if number == again
    }
    meanings: dict[str, str | None] = {WORKS: None}
    meanings |= {_failure(number): reason for number, reason in reasons.items()}
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line
    ]
    found: dict[Pair, str | None] = {}
    columns: list[str] = []
    for name, *row in lines:
        if name == "":
            columns = row
            continue
        found |= {
            (name, column): meanings[cell]
            for column, cell in zip(columns, row, strict=False)
            if cell in meanings
        }
    return found


def _table(
    found: dict[Pair, str | None], reasons: list[str], rows: Sequence[str], columns: Sequence[str]
) -> str:
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for row in rows:
        lines.append([row, *(_cell(found, reasons, (row, column)) for column in columns)])
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def _cell(found: dict[Pair, str | None], reasons: list[str], pair: Pair) -> str:
    if pair not in found:
        return "same" if {*pair} in SAME else ""
    reason = found[pair]
    return WORKS if reason is None else _failure(str(reasons.index(reason) + 1))


def _failure(number: str) -> str:
    return f"{FAILS} [{number}](#note-{number})"


def _escaped(reason: str) -> str:
    return re.sub(r"([*<_])", r"\\\1", reason.partition("\n")[0])


def main() -> None:
    """Try all pairs and write the page; what is neither right nor refused ends it."""
    found: dict[Pair, str | None] = {}
    with starting() as ranks, tempfile.TemporaryDirectory() as directory:
        for number, pair in enumerate(PAIRS):
            found[pair] = attempt(ranks(layout(pair)), pair, Path(directory) / str(number))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()

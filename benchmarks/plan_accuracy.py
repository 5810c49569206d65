"""The error of the predicted step times, on published measurements.

Tables are CSV files that Shoal does not ship; --tables names their directory. For each table it prints
the mean, median and worst absolute error, the rank correlation of predicted and measured times, and the
regret: how much slower than the best measured configuration the best of the predicted top 1 and top 3
is, over configurations of one workload on one number of GPUs. Once with the catalogue's figures, and
once with N parameters fitted on other rows than those that are predicted.

    python benchmarks/plan_accuracy.py --tables DIR [--peers DIR] [--json]

--peers adds other planners on the same rows; plan_peers.py says which, and how they are run.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import finish, parse, show
from plan_calibration import fit_efficiency
from plan_peers import Predict, find_peers
from shoal.distributed.layout import Layout
from shoal.tools.plan.machine.machines import Efficiency, Machine, find_machine
from shoal.tools.plan.time.step_time import estimate_step, step_kind
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.transformer import Transformer

COVERED, FOLDS = 0.8, 5


@dataclass(frozen=True)
class Case:
    """The log of measured over predicted time. Cases of one group are never judged by each other."""

    table: str
    kind: str
    group: Hashable
    error: float


def band_of(cases: Sequence[Case]) -> tuple[float, float]:
    """Return the quantiles of the errors between which COVERED of them are.

    Each group counts once. With few groups, the quantiles are farther out, as in conformal prediction.
    """
    rows = Counter(each.group for each in cases)
    weighted = sorted((each.error, 1 / rows[each.group]) for each in cases)
    covered = min(1.0, COVERED * (1 + 1 / len(rows)))
    edges = []
    for below in ((1 - covered) / 2, (1 + covered) / 2):
        seen = 0.0
        for error, weight in weighted:
            seen += weight
            if seen >= below * len(rows) - 1e-9:
                edges.append(error)
                break
    return edges[0], edges[1]


def held_out_coverage(cases: Sequence[Case]) -> float:
    """Return the part of the groups inside bands that were chosen on other groups."""
    rows = Counter(each.group for each in cases)
    groups = sorted(rows, key=str)
    random.Random(0).shuffle(groups)
    inside = 0.0
    for fold in range(FOLDS):
        out = set(groups[fold::FOLDS])
        low, high = band_of([each for each in cases if each.group not in out])
        held = (each for each in cases if each.group in out and low <= each.error <= high)
        inside += sum(1 / rows[each.group] for each in held)
    return inside / len(rows)


def band_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the band of each kind, as factors of the prediction, and its coverage."""
    rows = []
    for kind in sorted({each.kind for each in cases}):
        own = [each for each in cases if each.kind == kind]
        low, high = (math.exp(edge) for edge in band_of(own))
        groups = len({each.group for each in own})
        row = {"kind": kind, "rows": len(own), "groups": groups, "low": low, "high": high}
        rows.append({**row, "held-out": f"{held_out_coverage(own):.0%}"})
    return rows


@dataclass(frozen=True)
class Row:
    """A measured step. `workload` is the same for configurations that compete."""

    model: Transformer
    plan: PlannedStep
    machine: Machine
    seconds: float
    workload: tuple[Any, ...]


def table_rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def gpt_rows(
    file: str,
    seconds: str,
    workload: Sequence[str],
    options: Callable[[dict[str, str]], Any],
    path: Path,
) -> list[Row]:
    """Read a table of Megatron's GPTs on A100; `options` are those of the planned step in a row."""
    rows = []
    for each in table_rows(path / file):
        number = {key: int(value) for key, value in each.items() if value.isdigit()}
        model = Transformer(
            hidden=number["hidden"],
            layers=number["layers"],
            heads=number["heads"],
            seq=number["seq"],
            vocab=number.get("vocab", 50257),
            flash=0,
        )
        plan = PlannedStep(
            layout=Layout(tensor=number["tp"], pipeline=number["pp"], replicate=number["dp"]),
            global_batch=number["global_batch"],
            micro_batch=number["microbatch"],
            stages=number.get("virtual_stages", 1),
            split_sends=True,
            precision="fp16",
            **options(each),
        )
        measured = float(each[seconds]) / (1e3 if seconds.endswith("_ms") else 1)
        competing = tuple(each[name] for name in workload)
        rows.append(Row(model, plan, find_machine("a100-80"), measured, competing))
    return rows


def mosaicml_rows(path: Path) -> list[Row]:
    """Read the table of models under FSDP on A100."""
    rows = []
    for each in table_rows(path / "mosaicml_a100.csv"):
        if each["gpu"] not in ("a100_80gb", "a100_40gb"):
            continue
        model = Transformer(
            hidden=int(each["d_model"]),
            layers=int(each["n_layers"]),
            heads=int(each["n_heads"]),
            ffn=int(each["ffn"]),
            vocab=int(each["vocab"]),
            seq=int(each["seq_len"]),
            dropout=0,
        )
        gpus = int(each["gpus"])
        plan = PlannedStep(
            layout=Layout(shard=gpus) if each["sharding"] == "FULL_SHARD" else Layout(replicate=gpus),
            global_batch=int(each["global_batch_seqs"]),
            micro_batch=int(each["microbatch_per_gpu"]),
            recompute="full" if each["act_ckpt"] == "True" else "none",
            precision="half" if each["mp_mode"] == "PURE" else "mixed",
        )
        workload = (each["model"], model.seq, gpus, each["gpu"], each["global_batch_tokens"])
        machine = find_machine(each["gpu"].replace("_", "-").removesuffix("gb"))
        rows.append(Row(model, plan, machine, float(each["step_time_s_derived"]), workload))
    return rows


def predicted(row: Row, efficiency: Efficiency | None = None) -> float:
    machine = row.machine if efficiency is None else replace(row.machine, efficiency=efficiency)
    return float(estimate_step(row.model, row.plan, machine).total)


def band_cases(name: str, rows: Sequence[Row], times: Sequence[float]) -> list[Case]:
    """Return the errors of predictions with the kind of each step."""
    cases = []
    for number, (row, time) in enumerate(zip(rows, times, strict=True)):
        if math.isnan(time):
            continue
        kind = step_kind(row.plan, estimate_step(row.model, row.plan, row.machine))
        # The one-node table has few different layers, each in many rows.
        layer = row.model.hidden, row.plan.layout.tensor, row.plan.micro_batch
        group = (name, *layer) if name == ONE_NODE else (name, number)
        cases.append(Case(name, kind, group, math.log(row.seconds / time)))
    return cases


def cross_validated(rows: Sequence[Row], names: Sequence[str], folds: int, eighth: bool) -> list[float]:
    """Return predictions of each row, by parameters that were fitted without it.

    With `eighth`, the first fold is fitted on instead of held out, and has no predictions.
    """
    result = [math.nan] * len(rows)
    for part, rest in split(len(rows), folds)[: 1 if eighth else None]:
        train, held = (part, rest) if eighth else (rest, part)
        efficiency = fit_efficiency(
            [(rows[number].model, rows[number].plan, rows[number].machine) for number in train],
            [rows[number].seconds for number in train],
            names,
        )
        for number in held:
            result[number] = predicted(rows[number], efficiency)
    return result


def split(count: int, folds: int) -> list[tuple[list[int], list[int]]]:
    """Return for each fold the numbers in it, and the others."""
    order = list(range(count))
    random.Random(0).shuffle(order)
    parts = [order[fold::folds] for fold in range(folds)]
    return [(part, [number for number in order if number not in set(part)]) for part in parts]


def peer_times(rows: Sequence[Row], predictions: Sequence[Predict], folds: int) -> list[list[float]]:
    """Return the times by a planner's default, and those by the input that is best on other rows."""
    tables = [[each(row.model, row.plan, row.machine) for row in rows] for each in predictions]
    if len(tables) == 1:
        return tables
    held = [math.nan] * len(rows)
    for part, train in split(len(rows), folds):

        def loss(times: Sequence[float], train: Sequence[int] = train) -> float:
            known = [number for number in train if not math.isnan(times[number])]
            return sum(abs(math.log(times[number] / rows[number].seconds)) for number in known)

        best = min(tables[1:], key=loss)
        for number in part:
            held[number] = best[number]
    return [tables[0], held]


def ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [0] * len(values)
    for position, number in enumerate(order):
        result[number] = position
    return result


def regret(rows: Sequence[Row], times: Sequence[float], top: int) -> float:
    """Return the mean regret over workloads with at least four configurations."""
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for row, seconds in zip(rows, times, strict=True):
        groups[row.workload].append((seconds, row.seconds))
    losses = []
    for group in groups.values():
        if len(group) >= 4:
            best = min(measured for _, measured in group)
            losses.append(min(measured for _, measured in sorted(group)[:top]) / best - 1)
    return statistics.mean(losses) if losses else math.nan


def figures(rows: Sequence[Row], times: Sequence[float]) -> dict[str, Any]:
    kept = [(row, time) for row, time in zip(rows, times, strict=True) if not math.isnan(time)]
    rows, times = [row for row, _ in kept], [time for _, time in kept]
    errors = [abs(time / row.seconds - 1) for row, time in kept]
    logs = sorted(math.log(time / row.seconds) for row, time in kept)
    regrets = {f"top {top}": regret(rows, times, top) for top in (1, 3)}
    percent = {
        "mean": statistics.mean(errors),
        "median": statistics.median(errors),
        "worst": max(errors),
        **{name: value for name, value in regrets.items() if not math.isnan(value)},
    }
    return {
        "rows": len(rows),
        **{name: f"{value:.1%}" for name, value in percent.items()},
        "rank": statistics.correlation(ranks(times), ranks([row.seconds for row in rows])),
        "low": logs[len(logs) // 10],
        "high": logs[-1 - len(logs) // 10],
    }


COMPUTE = ("product", "attention", "memory", "launch", "host")
ALL = (*COMPUTE, "link", "network", "step", "spread")
ONE_NODE = "vTrain, one node"
megatron = partial(
    gpt_rows,
    "megatron2021_table1.csv",
    "iter_time_s_derived",
    ("model",),
    lambda each: {"recompute": "full", "overlap": each["ddp_impl"] == "torch"},
)
korthikanti = partial(
    gpt_rows,
    "korthikanti2022_table5.csv",
    "iter_time_s",
    ("model", "dp"),
    lambda each: {
        "recompute": each["recompute"],
        "sequence_parallel": each["sequence_parallel"] == "yes",
        "tensor_overlap": True,
        "overlap": False,
    },
)
vtrain = partial(
    gpt_rows,
    "vtrain_single_node_a100.csv",
    "iter_time_ms",
    ("hidden", "layers", "seq", "gpus", "global_batch"),
    lambda each: {"recompute": "none", "overlap": False},
)
TABLES: dict[str, tuple[Callable[[Path], list[Row]], tuple[str, ...], int, bool]] = {
    "Megatron 2021, Table 1": (megatron, ("product",), 10, False),
    "Korthikanti 2022, Table 5": (korthikanti, ("product",), 9, False),
    "MosaicML, A100": (mosaicml_rows, ALL, 5, False),
    ONE_NODE: (vtrain, COMPUTE, 8, True),
}
"""Name: how it is read, the parameters that are fitted, folds, and whether one of them is fitted on."""


def main() -> None:
    given = parse(__doc__, tables=Path, peers=Path)
    if given.tables is None:
        raise SystemExit("plan_accuracy.py needs --tables")
    report: list[dict[str, Any]] = []
    catalogue: list[Case] = []
    calibrated: list[Case] = []
    peers = find_peers(given.peers) if given.peers else {}
    for name, (read, names, folds, eighth) in TABLES.items():
        rows = read(given.tables)
        plain = [predicted(row) for row in rows]
        fitted = cross_validated(rows, names, folds, eighth)
        found = {("shoal", 0): plain, ("shoal", len(names)): fitted}
        for peer, (_, predictions) in peers.items():
            found |= {(peer, n): times for n, times in enumerate(peer_times(rows, predictions, folds))}
        report += [
            {"table": name, "planner": planner, "fitted": count, **figures(rows, times)}
            for (planner, count), times in found.items()
            if not all(map(math.isnan, times))
        ]
        catalogue += band_cases(name, rows, plain)
        calibrated += band_cases(name, rows, fitted)
    commits = (f"{name} {revision}" for name, (revision, _) in peers.items())
    show(", ".join(["errors; low to high holds 80 % of log errors", *commits]), report)
    bands = {
        "from the catalogue": band_rows(catalogue),
        "with fitted parameters": band_rows(calibrated),
    }
    for title, each in bands.items():
        show(f"80 % bands of measured / predicted time, {title}", each)
    finish(given, {"tables": report, "bands": bands})


if __name__ == "__main__":
    main()

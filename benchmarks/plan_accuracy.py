"""The error of the predicted step times, on published measurements.

Tables are CSV files that Shoal does not ship; --tables names their directory. A table is one source,
machine and framework. Each is predicted with constants that are derived from the other tables only:
the median and mean absolute error, the part of rows inside the 80 % band and the median half-width of
bands, the rank correlation, and the same with one known step of the table. *in sample* is the mean
error with the constants that Shoal ships, to which the table contributed. The forms of the model were
chosen with all of these tables in view; only its constants are left out.

    python benchmarks/plan_accuracy.py --tables DIR [--write] [--peers DIR] [--json]

The last two tables compare the memory that rows state, or that did not suffice, with the predicted one:
within 8 % or above, and whether a plan that ran out of memory fits with the margin.

--write replaces `step_errors.toml` and the table of the accuracy page. --peers adds other planners on
the same rows, and how much slower than the best measured configuration of a workload the best of the
predicted top 1 and top 3 is; plan_peers.py says which planners, and how they are run.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from harness import ROOT, finish, parse, show
from plan_errors import (
    HOST,
    SUSTAINED,
    Constants,
    Judged,
    derive,
    judge,
    judge_known,
    measured_rows,
)
from plan_peers import Predict, find_peers
from plan_tables import Row, predicted, predicted_memory, read_memory, read_tables
from shoal.tools.plan.machine.machines import Efficiency
from shoal.tools.plan.memory.estimate import PUBLISHED_MARGIN
from shoal.tools.plan.time.step_time import OVERHEAD

FOLDS = 5
KNOWN, OTHERS = 5, 200
"""Steps of a table that are taken as the known one in turn, and rows that are then predicted."""
PAGE = ROOT / "docs/guides/plan-accuracy.md"
Columns = dict[str, Any]


def left_out(name: str, tables: dict[str, list[Row]]) -> tuple[Columns, list[Judged], list[Judged]]:
    """Return the figures of a table by constants of the others, and its rows without and with a known
    step."""
    known = derive({other: rows for other, rows in tables.items() if other != name})
    rows = measured_rows(tables[name], known.rates)
    judged = [judge(each, known) for each in rows]
    draw = random.Random(1)
    again = []
    for given in draw.sample(rows, min(KNOWN, len(rows))):
        others = [each for each in draw.sample(rows, min(OTHERS, len(rows))) if each is not given]
        again += judge_known(others, given, known)
    times = [each.predicted(known.overhead) for each in rows]
    measured = [each.row.seconds for each in rows]
    plain = [predicted(row) for row in tables[name]]
    own = {
        "table": name,
        "rows": len(rows),
        **summary(judged),
        "rank": statistics.correlation(ranks(times), ranks(measured)) if len(rows) > 2 else math.nan,
        **{f"known {key}": value for key, value in summary(again).items() if key != "mean"},
        "in sample": f"{statistics.mean(errors_of(plain, measured)):.1%}",
    }
    return own, judged, again


def errors_of(times: Sequence[float], measured: Sequence[float]) -> list[float]:
    return [abs(time / own - 1) for time, own in zip(times, measured, strict=True)]


def summary(judged: Sequence[Judged]) -> Columns:
    """Return the median and mean error, the part of rows inside their bands, and the half-width."""
    errors = [abs(math.exp(-each.error) - 1) for each in judged]
    inside = statistics.mean(abs(each.error) <= each.width for each in judged)
    return {
        "median": f"{statistics.median(errors):.1%}",
        "mean": f"{statistics.mean(errors):.1%}",
        "inside": f"{inside:.0%}",
        "width": f"{statistics.median(math.exp(each.width) - 1 for each in judged):.0%}",
    }


def write_errors(known: Constants) -> None:
    """Replace the file with the errors of published steps."""
    errors = known.errors
    parts = "".join(f"{name} = {value:.3g}\n" for name, value in errors.parts.items())
    machines = ", ".join(f'"{each}"' for each in errors.machines)
    text = (
        "# Standard deviations of the logarithm of measured over predicted step times, from published\n"
        "# tables (docs/guides/plan-accuracy.md). Written by benchmarks/plan_accuracy.py --write.\n\n"
        f"source = {errors.source:.3g}\nstep = {errors.step:.3g}\nmachine = {errors.machine:.3g}\n"
        f"sources = {errors.sources}\nmachines = [{machines}]\n\n[parts]\n{parts}"
    )
    package = resources.files("shoal.tools.plan.time")
    Path(str(package.joinpath("step_errors.toml"))).write_text(text, encoding="utf-8")


def page_table(report: Sequence[Columns]) -> str:
    """Return the table of the accuracy page."""
    names = {
        "table": "table",
        "rows": "rows",
        "median": "median error, %",
        "mean": "mean",
        "inside": "in band",
        "width": "half-width",
        "known median": "one step known",
        "in sample": "in sample",
    }
    lines = [list(names.values()), ["---"] * len(names)]
    lines += [[f"{row[key]:,}" if key == "rows" else str(row[key]) for key in names] for row in report]
    text = [f"|{'|'.join(line)}|" for line in lines]
    return "\n".join([*text[:2], *(line.replace("%", "") for line in text[2:])])


def write_page(report: Sequence[Columns]) -> None:
    """Replace the table of the accuracy page."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.sub(r"(?m)^\|table\|rows\|.*\n(\|.*\n)+", page_table(report) + "\n", text)
    PAGE.write_text(found, encoding="utf-8")


def constants_rows(known: Constants) -> list[Columns]:
    """Return the shipped constants, and those that the tables say now."""
    return [
        {"constant": "Efficiency.host", "shipped": Efficiency().host, "derived": known.rates.host},
        {"constant": "the same without tables", "shipped": HOST, "derived": HOST},
        {"constant": "products, H100", "shipped": SUSTAINED, "derived": known.rates.sustained},
        {"constant": "OVERHEAD", "shipped": OVERHEAD, "derived": known.overhead},
    ]


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
    }


NEAR = 0.08
"""How far below the measured memory a prediction may be."""


def memory_rows(rows: Sequence[Row]) -> tuple[list[Columns], list[Columns]]:
    """Return each row that states its memory with the predicted one, and a summary of each table."""
    stated, tables = [], defaultdict(list)
    for row in rows:
        bytes_ = predicted_memory(row)
        fits = (1 + PUBLISHED_MARGIN) * bytes_ <= row.machine.available
        tables[row.table].append((bytes_ / row.memory if row.memory else math.nan, fits, row.memory))
        if 0 < row.memory < math.inf:
            stated.append(
                {
                    "table": row.table,
                    "layout": str(row.plan.layout),
                    "hidden": row.model.hidden,
                    "samples": f"{row.plan.micro_batches} x {row.plan.micro_batch}",
                    "measured, GB": row.memory / 1e9,
                    "ratio": bytes_ / row.memory,
                }
            )
    summaries = []
    for name, found in tables.items():
        ratios = [ratio for ratio, _, memory in found if 0 < memory < math.inf]
        failed = [fits for _, fits, memory in found if memory == math.inf]
        ran = [fits for _, fits, memory in found if memory < math.inf]
        summaries.append(
            {
                "table": name,
                "stated": len(ratios),
                "least": min(ratios, default=math.nan),
                "median": statistics.median(ratios) if ratios else math.nan,
                "most": max(ratios, default=math.nan),
                "within 8 % or above": sum(ratio >= 1 - NEAR for ratio in ratios),
                "ran": len(ran),
                "of these fit": sum(ran),
                "out of memory": len(failed),
                "of those fit": sum(failed),
            }
        )
    return stated, summaries


def pooled(name: str, judged: Sequence[Judged], again: Sequence[Judged]) -> Columns:
    """Return the figures of the rows of several tables."""
    known = {f"known {key}": value for key, value in summary(again).items() if key != "mean"}
    return {"table": name, "rows": len(judged), **summary(judged), "rank": "", **known, "in sample": ""}


def main() -> None:
    given = parse(__doc__, tables=Path, write=False, peers=Path)
    if given.tables is None:
        raise SystemExit("plan_accuracy.py needs --tables")
    tables = read_tables(given.tables)
    found = [left_out(name, tables) for name in tables]
    report = [own for own, _, _ in found]
    plain = [each for _, judged, _ in found for each in judged]
    with_step = [each for _, _, again in found for each in again]
    report.append(pooled("all rows", plain, with_step))
    known = derive(tables)
    peers = find_peers(given.peers) if given.peers else {}
    compared: list[Columns] = []
    for name, rows in tables.items():
        times = {"shoal": [predicted(row) for row in rows]}
        for peer, (_, predictions) in peers.items():
            for count, each in enumerate(peer_times(rows, predictions, FOLDS)):
                times[f"{peer}, fitted" if count else peer] = each
        compared += [
            {"table": name, "planner": planner, **figures(rows, own)}
            for planner, own in times.items()
            if not all(map(math.isnan, own))
        ]
    constants = constants_rows(known)
    commits = [f"{name} {revision}" for name, (revision, _) in peers.items()]
    show("each table by the constants of the others", report)
    show("constants", constants)
    show(", ".join(["with the constants that Shoal ships", *commits]), compared)
    others = (rows for name, rows in tables.items() if not name.startswith("torchtitan"))
    stated, memory = memory_rows([*read_memory(given.tables), *chain.from_iterable(others)])
    show("predicted over measured memory", stated)
    show("memory by table", memory)
    if given.write:
        write_errors(known)
        write_page(report)
    finish(
        given,
        {
            "left out": report,
            "constants": constants,
            "planners": compared,
            "memory": stated,
            "memory by table": memory,
        },
    )


if __name__ == "__main__":
    main()

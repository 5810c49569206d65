"""`shoal plan --model train.py:build`: traced steps of a module, in one layout or in all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.cli.plan_options import AUTO, PlanOptions
from shoal.util.errors import ShoalError

if TYPE_CHECKING:
    from shoal.tools.plan.search.prediction import Prediction, SearchResult
    from shoal.tools.plan.show.report import PlanReport


def traced_report(options: PlanOptions) -> PlanReport:
    """Return the traced plans that fit: the given one, with changes if it does not fit, or all.

    Raises ShoalError if the training has tokens.
    """
    from shoal.tools.plan.search.prediction import SearchResult
    from shoal.tools.plan.show.report import PlanReport

    training = options.training_on(options.devices)
    if training is not None and training.tokens:
        raise ShoalError(
            given=f"--training {options.training} with a traced module",
            found="the number of tokens in a sample is not known",
            fix="use --training steps=…",
        )
    changes: list[Prediction] = []
    if options.layout == AUTO:
        found = _search(options)
    else:
        changes = _one_layout(options)
        best = tuple(each for each in changes[:1] if each.fits)
        found = SearchResult(best=best, rejected=(), tried=1, fitting=len(best), evaluated=1)
    return PlanReport(
        name=options.model,
        machine=options.machine,
        result=found,
        changes=tuple(changes),
        training=training,
    )


def _one_layout(options: PlanOptions) -> list[Prediction]:
    """Trace the given layout, and changes with which it fits."""
    from shoal.tools.plan.search.fit import fit_module, named_workload, plan_of

    plan = plan_of(
        options.layout,
        options.devices,
        options.batch,
        options.micro_batch,
        options.recompute,
        options.precision,
        options.split_points,
        options.schedule,
    )
    build = named_workload(options.model, options.batch)
    return fit_module(build, plan, options.machine, fake=options.fake)


def _search(options: PlanOptions) -> SearchResult:
    """Trace all layouts. Raises ShoalError for split points, which belong to one of them."""
    from shoal.tools.plan.search.fit import named_workload
    from shoal.tools.plan.search.module_search import search_module
    from shoal.util.tables import plain_console, print_line

    if options.split_points:
        raise ShoalError(
            given=f"--layout {AUTO} --split-points {','.join(options.split_points)}",
            found="stages of pipelines get equal FLOPs in a search",
            fix="leave --split-points out",
        )
    return search_module(
        named_workload(options.model, options.batch),
        options.devices,
        options.batch,
        options.machine,
        micro_batch=options.micro_batch,
        recompute=options.recompute,
        precision=options.precision,
        schedule=options.schedule,
        fake=options.fake,
        top=options.top,
        note=lambda line: print_line(plain_console(stderr=True), line),
    )

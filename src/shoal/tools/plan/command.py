"""The answers to `shoal plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.tools.plan.check import RunCheck, check_document, check_run
from shoal.tools.plan.device_numbers import numbers_document, search_numbers
from shoal.tools.plan.options import AUTO, PlanOptions
from shoal.tools.plan.search.prediction import Prediction, SearchResult
from shoal.tools.plan.search.search import answer_what_if, changed_machine, search_plans
from shoal.tools.plan.show.report import PlanReport, plan_document
from shoal.tools.plan.try_layouts import try_layouts
from shoal.tools.plan.work.transformer import parse_model
from shoal.util.document import Document
from shoal.util.errors import ShoalError
from shoal.util.tables import plain_console, print_line
from shoal.util.units import compact


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """A document, and the configurations in it that fit, or the run that was compared."""

    document: Document
    best: Sequence[Prediction] = ()
    run: RunCheck | None = None


def answer_plan(options: PlanOptions) -> PlanAnswer:
    """Predict what the options ask for. Raises ShoalError if it can't be predicted."""
    machine = options.machine
    if options.run is not None:
        run = check_run(
            options.run,
            parse_model(options.model),
            machine,
            micro_batch=options.micro_batch,
            recompute=options.recompute,
            schedule=options.schedule,
        )
        return PlanAnswer(document=check_document(run), run=run)
    if len(options.numbers) > 1:
        model, size = parse_model(options.model), (options.numbers, options.batch)
        found = search_numbers(model, machine, *size, options.precision, options.training_on)
        best = [each.best for each in found if each.best]
        return PlanAnswer(document=numbers_document(model, machine, found), best=best)
    report = _traced_report(options) if options.traced else _search_layouts(options)
    if options.tried is not None and report.result.best:
        ordered, tried = try_layouts(report.result.best, options.tried, machine, options.words)
        result = replace(report.result, best=tuple(ordered))
        report = replace(report, result=result, tried=tuple(tried))
    return PlanAnswer(document=plan_document(report), best=report.result.best)


def _search_layouts(options: PlanOptions) -> PlanReport:
    """Search all configurations of a transformer, also with each change that is asked for."""
    model, machine = parse_model(options.model), options.machine
    size = options.devices, options.batch
    training = options.training_on(options.devices)
    for question in options.what_if:
        changed_machine(machine, question)  # mistakes are reported before the search
    result = search_plans(model, machine, *size, precision=options.precision, top=options.top)
    answers = [
        answer_what_if(each, result, model, machine, *size, precision=options.precision)
        for each in options.what_if
    ]
    return PlanReport(
        name=f"{compact(model.parameters)} parameters",
        machine=machine,
        model=model,
        result=result,
        training=training,
        answers=tuple(answers),
    )


def _traced_report(options: PlanOptions) -> PlanReport:
    """Return the traced plans that fit: the given one, with changes if it does not fit, or all.

    Raises ShoalError if the training has tokens, or for split points of all layouts.
    """
    from shoal.tools.plan.search.fit import fit_module, named_workload, plan_of, search_module

    training = options.training_on(options.devices)
    if training is not None and training.tokens:
        raise ShoalError(
            given=f"--training {options.training} with a traced module",
            found="the number of tokens in a sample is not known",
            fix="use --training steps=…",
        )
    size, ways = (options.devices, options.batch), (options.recompute, options.precision)
    changes: list[Prediction] = []
    if options.layout != AUTO:
        flow = options.split_points, options.schedule
        plan = plan_of(options.layout, *size, options.micro_batch, *ways, *flow)
        build = named_workload(options.model, options.batch)
        changes = fit_module(build, plan, options.machine, fake=options.fake)
        best = tuple(each for each in changes[:1] if each.fits)
        result = SearchResult(best=best, rejected=(), tried=1, fitting=len(best), evaluated=1)
    elif options.split_points:
        raise ShoalError(
            given=f"--layout {AUTO} --split-points {','.join(options.split_points)}",
            found="stages of pipelines get equal FLOPs in a search",
            fix="leave --split-points out",
        )
    else:
        result = search_module(
            named_workload(options.model, options.batch),
            *size,
            options.machine,
            micro_batch=options.micro_batch,
            recompute=options.recompute,
            precision=options.precision,
            schedule=options.schedule,
            fake=options.fake,
            top=options.top,
            note=lambda line: print_line(plain_console(stderr=True), line),
        )
    return PlanReport(
        name=options.model,
        machine=options.machine,
        result=result,
        changes=tuple(changes),
        training=training,
    )

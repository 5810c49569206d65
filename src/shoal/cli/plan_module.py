"""`shoal plan --model train.py:build`: traced steps of a module, in one layout or in all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from shoal.cli.plan_options import AUTO, PlanOptions, write_page
from shoal.util.errors import ShoalError

if TYPE_CHECKING:
    from shoal.tools.plan.search.fit import ModuleFit
    from shoal.tools.plan.search.module_search import ModuleSearch
    from shoal.tools.plan.training.whole_training import Training, TrainingEstimate
    from shoal.util.document import Document


def plan_module(options: PlanOptions) -> Sequence[ModuleFit]:
    """Print the traced memory and time, and return the plans that fit; exit with 1 if none does."""
    from shoal.cli.plan_try import TriedLayout, print_tried, tried_values, try_layouts
    from shoal.tools.plan.show.display import print_trainings, training_values, trainings_on
    from shoal.util.tables import plain_console

    asked = _asked_training(options)
    found = _search(options) if options.layout == AUTO else _one_layout(options)
    best, tried = found.best, list[TriedLayout]()
    if options.tried is not None and best:
        best, tried = try_layouts(best, options.tried, options.machine, options.words)
    whole = trainings_on(asked, best, options.machine)
    if options.as_json:
        values = found.values(best)
        values |= {"tried_layouts": tried_values(tried)} if tried else {}
        for each, one in zip(values["best"], whole, strict=False):
            each["training"] = training_values(one)
        typer.echo(json.dumps(values, indent=2))
    else:
        found.show(best)
        if tried:
            print_tried(plain_console(), tried)
        if whole:
            print_trainings(plain_console(), best, whole)
    if options.html is not None:
        write_page(found.page(best, whole), options.html)
    if not best:
        raise typer.Exit(1)
    return best


@dataclass(frozen=True)
class _Traced:
    """Plans that fit, the fastest first, and how they are shown; `--try` may change their order."""

    best: list[ModuleFit]
    values: Callable[[list[ModuleFit]], dict[str, Any]]
    show: Callable[[list[ModuleFit]], None]
    page: Callable[[list[ModuleFit], Sequence[TrainingEstimate]], Document]


def _one_layout(options: PlanOptions) -> _Traced:
    """Trace the given layout, and changes with which it fits."""
    from shoal.tools.plan.search.fit import fit_module, named_workload, plan_of
    from shoal.tools.plan.show.module_display import fit_values, print_fit
    from shoal.tools.plan.show.module_page import module_page
    from shoal.util.tables import plain_console

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
    model, machine = options.model, options.machine
    build = named_workload(model, options.batch)
    found = fit_module(build, plan, machine, fake=options.fake)
    return _Traced(
        best=[each for each in found[:1] if each.fits],
        values=lambda _: fit_values(found),
        show=lambda _: print_fit(plain_console(), machine, found),
        page=lambda _, whole: module_page(model, machine, found, whole),
    )


def _search(options: PlanOptions) -> _Traced:
    """Trace all layouts. Raises ShoalError for split points, which belong to one of them."""
    from shoal.tools.plan.search.fit import named_workload
    from shoal.tools.plan.search.module_search import search_module
    from shoal.tools.plan.show.module_display import print_search, search_values
    from shoal.tools.plan.show.module_page import search_page
    from shoal.util.tables import plain_console, print_line

    if options.split_points:
        raise ShoalError(
            given=f"--layout {AUTO} --split-points {','.join(options.split_points)}",
            found="stages of pipelines get equal FLOPs in a search",
            fix="leave --split-points out",
        )
    model, machine = options.model, options.machine
    found = search_module(
        named_workload(model, options.batch),
        options.devices,
        options.batch,
        machine,
        micro_batch=options.micro_batch,
        recompute=options.recompute,
        precision=options.precision,
        schedule=options.schedule,
        fake=options.fake,
        top=options.top,
        note=lambda line: print_line(plain_console(stderr=True), line),
    )

    def ordered(best: list[ModuleFit]) -> ModuleSearch:
        return replace(found, best=tuple(best))

    return _Traced(
        best=list(found.best),
        values=lambda best: search_values(ordered(best), machine),
        show=lambda best: print_search(plain_console(), machine, ordered(best)),
        page=lambda best, whole: search_page(model, machine, ordered(best), whole),
    )


def _asked_training(options: PlanOptions) -> Training | None:
    """Return the training that an option describes. Raises ShoalError if it has tokens."""
    found = options.training_on(options.devices)
    if found is not None and found.tokens:
        raise ShoalError(
            given=f"--training {options.training} with a traced module",
            found="the number of tokens in a sample is not known",
            fix="use --training steps=…",
        )
    return found

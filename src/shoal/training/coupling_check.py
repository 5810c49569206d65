"""The check before the first step for modules that couple samples in a way that Shoal does not know."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shoal._torch.dispatch import tree_flatten
from shoal._torch.modules import has_compiled_call
from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.strategies.batch_norm import coupled_layers
from shoal.strategies.contracts import Engine
from shoal.strategies.coupled_layers import drops
from shoal.strategies.dtensor import is_divided
from shoal.strategies.eval_mode import each_in_eval_mode, untouched
from shoal.strategies.task import Task
from shoal.training.loss_check import part_of

TOLERANCE = 0.02
"""Relative to the largest row: the error of sums in half precision."""

Digests: TypeAlias = dict[tuple[str, int, int], Tensor]
"""A weighted sum and the norm of each row of a module's output, by the module's name, the number of
its call, and the number of columns: outputs of other widths, such as the states of an LSTM whose layers
are as many as the samples, can't be compared."""


def say_coupled(engine: Engine, task: Task, batch: Batch, *, autocast: torch.dtype | None) -> None:
    """Print once which module's output for a sample depends on other samples. Collective.

    A rank's first micro-batch runs twice as a whole and once in halves, in training mode and without
    gradients. Layers that are known, BatchNorm, `shoal.Coupled` and dropout, are in eval mode. Modules
    whose output differs in the two whole runs draw random numbers, and are not compared. Buffers and
    random states are restored. Models that are compiled or split into stages are not tried.
    """
    world = engine.world
    if engine.loop is None or (world.data_size == 1 and len(batch) == 1):
        return
    if any(map(has_compiled_call, engine.module.modules())):
        return
    micro = batch.micros[0]._replace(world=None, place=None)
    parts = [micro, micro]  # a rank that cannot cut takes part in the collectives of the forward
    middle = micro.samples // 2
    with suppress(ValueError):
        if micro.weight and middle:
            cuts = (slice(0, middle), slice(middle, micro.samples))
            parts = [part_of(micro, rows) for rows in cuts]
    whole = parts[0] is micro
    model = engine.module
    known = [*coupled_layers(model), *filter(drops, model.modules())]
    with torch.no_grad(), untouched(model, micro.value), each_in_eval_mode(known):
        run = partial(_digests, engine, task, seed=batch.seed, autocast=autocast)
        found = ""
        with suppress(Exception):  # a real error occurs again in the step
            first, again, *halves = (run(part) for part in (micro, micro, *parts))
            found = "" if whole else _first_difference(engine.module, first, again, halves)
    name = next(filter(None, world.gather(found)), "")
    if name:
        world.print(
            f"shoal: results depend on how the batch is split, because the output of {name} for a "
            "sample depends on other samples of its micro-batch; shoal.Coupled makes such a layer exact"
        )


def _first_difference(model: nn.Module, first: Digests, again: Digests, halves: list[Digests]) -> str:
    """Return the module that finishes first with other rows in halves than in the whole."""
    modules = dict(model.named_modules())
    for key, rows in first.items():
        if not (key in again and all(key in half for half in halves)):
            continue
        joined = torch.cat([half[key] for half in halves])
        limit = TOLERANCE * rows[:, 1].max()
        if joined.shape != rows.shape or bool(((again[key] - rows).abs() > limit).any()):
            continue
        if bool(((joined - rows).abs() > limit).any()):
            return f"{key[0] or 'the model'} ({type(modules[key[0]]).__name__})"
    return ""


def _digests(
    engine: Engine, task: Task, micro: MicroBatch, *, seed: int, autocast: torch.dtype | None
) -> Digests:
    """Run the model, and return the digests of the outputs of its modules."""
    found: Digests = {}
    calls: dict[str, int] = {}

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        number = calls[name] = calls.get(name, -1) + 1
        leaves = tree_flatten(output)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_divided(leaf)]
        rows = [leaf for leaf in tensors if leaf.dim() and len(leaf) == micro.samples]
        rows = [leaf.double().reshape(len(leaf), -1) for leaf in rows if leaf.is_floating_point()]
        if rows:
            values = torch.cat(rows, dim=1)
            weights = torch.arange(values.shape[1], device=values.device).cos().to(values)
            found[name, number, values.shape[1]] = torch.stack(
                (values @ weights, values.norm(dim=1)), dim=1
            )

    with ExitStack() as stack:
        for name, module in engine.module.named_modules():
            handle = module.register_forward_hook(partial(note, name))
            stack.callback(handle.remove)
        engine.infer(task, micro, seed, autocast=autocast)
    return found

"""Memory and lower bounds on the step times of many configurations, as arrays.

The costs of a layer, of a schedule and of a link are computed once for each combination of the columns
that they depend on, by the functions that predict one configuration. The rest is arithmetic over
arrays.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.memory.estimate import (
    FRAGMENTATION,
    held_micro_batches,
    layer_activations,
    logit_bytes,
    message_bytes,
    working_set,
)
from shoal.tools.plan.search.candidates import Candidates, Numbers
from shoal.tools.plan.time.collectives import BASE_LATENCY, RankGroup, ring_bandwidth
from shoal.tools.plan.time.layer_time import compute_seconds
from shoal.tools.plan.time.step_time import (
    BUCKET,
    CONTENTION,
    head_work,
    layer_pass,
    send_seconds,
    slowest,
    table_work,
)
from shoal.tools.plan.work.configuration import FORMATS, PlannedStep
from shoal.tools.plan.work.transformer import Transformer

_LAYER = ("piped", "tensor", "context", "micro", "precision")
_ROUNDING = 1e-9
"""The part of a bound that rounding may add."""


class CandidateArrays:
    """Properties of configurations on which memory and step times depend."""

    def __init__(self, model: Transformer, candidates: Candidates) -> None:
        column, kinds = candidates.column, SCHEDULES.values()
        self.count, self.pipeline = column("count"), column("pipeline")
        self.shards = np.where(column("shard") > 1, column("shard") * column("context"), 1)
        self.copies = column("replicate") * column("shard") * column("context") // self.shards
        self.keeps_parameters = (self.pipeline > 1) | (column("reshard") == 0)
        self.keeps_gradients = (self.pipeline > 1) | (column("sharded") == 0)
        self.folded = candidates.choice("schedule", [each.folded for each in kinds]) > 0
        self.splits = candidates.choice("schedule", [each.splits for each in kinds]) > 0
        self.layers = model.layers // self.pipeline
        both = self.folded | (self.pipeline == 1)
        tables = model.embedding * np.where(both, 2 - model.tied, 1)
        self.parameters = (self.layers * model.layer_weights + tables) / column("tensor")
        self._candidates = candidates

    def bytes_of(self, kind: str) -> Numbers:
        """Return the bytes of a number of some kind, by precision."""
        return self._candidates.choice("precision", [getattr(f, kind) for f in FORMATS.values()])


def memory_bytes(model: Transformer, candidates: Candidates) -> Numbers:
    """Return the bytes of a rank in each configuration: the total of `estimate_memory`."""
    known = CandidateArrays(model, candidates)
    sizes = partial(_layer_bytes, model)
    layer, again, logits, messages = candidates.tabulate((*_LAYER, "recompute"), sizes)
    (held,) = candidates.tabulate(
        ("pipeline", "count", "schedule", "stages"), lambda plan: (held_micro_batches(plan),)
    )
    one = max(model.layer_weights, model.embedding) / candidates.column("tensor")
    several = known.keeps_gradients & (known.count > 1)
    gathered = known.bytes_of("gathered") * np.where(known.keeps_parameters, known.parameters, 2 * one)
    gathered += known.bytes_of("reduced") * np.where(several, known.parameters, one)
    buckets = np.minimum(25e6 * 2, known.bytes_of("reduced") * known.parameters)
    bucket = np.where(known.copies > 1, buckets, 0.0)
    lost = held * known.layers * layer + again + logits + messages
    lost += np.where(known.shards > 1, gathered, bucket)
    kept = known.bytes_of("parameter") + known.bytes_of("gradient") + known.bytes_of("state")
    found: Numbers = known.parameters / known.shards * kept + (1 + FRAGMENTATION) * lost
    return found


def _layer_bytes(model: Transformer, plan: PlannedStep) -> tuple[float, ...]:
    return (
        layer_activations(model, plan),
        working_set(model, plan),
        logit_bytes(model, plan),
        message_bytes(model, plan),
    )


def step_bounds(model: Transformer, machine: Machine, candidates: Candidates) -> Numbers:
    """Return seconds that no step of each configuration is predicted to be shorter than.

    Collectives of data parallelism have the latency of the faster link, and the last rank of a pipeline
    waits only at both ends of a step.
    """
    known = CandidateArrays(model, candidates)
    costs = candidates.tabulate((*_LAYER, "recompute"), partial(_layer_seconds, model, machine))
    total, forward, backward, computing = costs
    (head,) = candidates.tabulate(_LAYER, partial(_head_seconds, model, machine))
    filling = np.where(known.splits, forward, total) * ~known.folded
    working = known.layers * known.count * computing + known.count * head
    seconds = known.layers * known.count * total + known.count * head + machine.efficiency.step
    ends = (known.pipeline - 1) * known.layers * filling / candidates.column("stages")
    seconds += ends + machine.efficiency.spread * slowest(_devices(candidates)) * working
    seconds += _sends(model, machine, candidates)
    seconds += _data_bounds(model, machine, candidates, known, total, forward, backward)
    numbers = 2 * known.bytes_of("parameter") + 3 * known.bytes_of("gradient")
    numbers += 2 * known.bytes_of("state")
    rate = machine.efficiency.memory * machine.memory_bandwidth
    seconds += known.parameters / known.shards * numbers / rate
    found: Numbers = seconds * (1 - _ROUNDING)
    return found


def _devices(candidates: Candidates) -> int:
    return candidates.plan(0).layout.size if len(candidates.rows) else 1


def _layer_seconds(model: Transformer, machine: Machine, plan: PlannedStep) -> tuple[float, ...]:
    layer = layer_pass(model, plan, machine)
    computing = layer.total - layer.tensor - layer.context
    return layer.total, layer.forward_total, layer.backward.total, computing


def _head_seconds(model: Transformer, machine: Machine, plan: PlannedStep) -> tuple[float]:
    head = compute_seconds(head_work(model, plan, machine.units), plan, machine)
    return (head.total + compute_seconds(table_work(model, plan), plan, machine).total,)


def _sends(model: Transformer, machine: Machine, candidates: Candidates) -> Numbers:
    (one,) = candidates.tabulate(
        ("pipeline", "micro", "precision"),
        lambda plan: (send_seconds(model, plan, machine) if plan.layout.pipeline > 1 else 0.0,),
    )
    column = candidates.column
    return 2 * one * (column("count") * column("stages") + column("pipeline") - 1)


def _data_bounds(
    model: Transformer,
    machine: Machine,
    candidates: Candidates,
    known: CandidateArrays,
    total: Numbers,
    forward: Numbers,
    backward: Numbers,
) -> Numbers:
    """Return lower bounds on the seconds of the data axes that no computation hides."""
    tensor, count = candidates.column("tensor"), known.count
    wide, far = candidates.tabulate(
        ("replicate", "shard", "context", "tensor"),
        lambda plan: (
            ring_bandwidth(RankGroup(plan.shards, plan.layout.tensor), machine),
            ring_bandwidth(RankGroup(plan.copies, plan.layout.tensor * plan.shards), machine),
        ),
    )
    fastest = min(machine.efficiency.link_latency, machine.efficiency.network_latency)
    steps = known.shards - 1

    def gathering(count: Numbers) -> Numbers:
        moved = BASE_LATENCY + steps * fastest + steps / known.shards * count / wide
        return np.where(count > 0, moved, 0.0)

    def reducing(count: Numbers) -> Numbers:
        return BASE_LATENCY + 2 * (known.copies - 1) / known.copies * count / far

    sharded = known.shards > 1
    sums = np.where(known.keeps_gradients | ~sharded, 1, count)
    summed = known.parameters / known.shards * known.bytes_of("reduced")
    hidden = (known.layers - 1) * backward
    exposed = np.maximum(reducing(np.minimum(summed, BUCKET)), reducing(summed) - hidden)
    exposed = np.where(known.copies > 1, exposed, 0.0)
    weights, table = model.layer_weights / tensor, model.embedding / tensor
    gather = gathering(weights * known.bytes_of("gathered"))
    scatter = gathering(weights * known.bytes_of("reduced"))
    again = np.where(known.keeps_parameters, 0.0, gather)
    gathers = np.where(known.pipeline > 1, 1, count)
    after = total - forward
    waits = gathers * _overlapped(gather, forward) + sums * _overlapped(again + scatter, after)
    waits += (gathers - sums) * _overlapped(again, after)
    moved = table * known.bytes_of("gathered") * np.where(known.keeps_parameters, 1, 2)
    alone = sums * gathering(moved + table * known.bytes_of("reduced"))
    alone += (gathers - sums) * gathering(moved)
    return sums * exposed + np.where(sharded, known.layers * waits + alone, 0.0)


def _overlapped(communication: Numbers, compute: Numbers) -> Numbers:
    longer = np.maximum(0.0, communication - compute)
    return longer + CONTENTION * np.minimum(communication, compute)

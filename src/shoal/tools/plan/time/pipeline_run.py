"""A step of a pipeline, simulated from the actions of its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.distributed.pipeline_schedules import PipelineAction, action_lists
from shoal.tools.plan.time.step_time import PassSeconds, Span
from shoal.tools.plan.work.planned_step import PlannedStep

_ROUNDS = 6
"""Rounds of as many micro-batches as ranks that are simulated. Each further one takes the time that the
rank with the output layer computes. For folded schedules, the step is up to 0.5 % too long."""

ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}


def pipeline_bubble(
    plan: PlannedStep, layers: int, layer: PassSeconds, spans: Sequence[list[Span]] | None = None
) -> float:
    """Return the seconds for which the rank with the output layer waits, as the schedule lets it.

    The model has `layers`, each of which takes the seconds of `layer`. Messages take no time here.
    `spans` are empty lists, one for each rank, to which its actions are added. Raises ShoalError if the
    schedule does not support the micro-batches.
    """
    ranks, stages, count = plan.layout.pipeline, plan.stages, plan.micro_batches
    each, head = layers / (ranks * stages), layer.head
    backward = each * (layer.total - layer.forward_total)
    weights = each * layer.backward.products / 2
    usual = {
        "F": each * layer.forward_total,
        "B": backward,
        "I": backward - weights,
        "W": weights,
    }
    # The output layer has one product in forward and two in backward.
    parts = {"F": 1, "B": 2, "I": 1, "W": 1}
    last = {kind: seconds + parts[kind] * head.total / 3 for kind, seconds in usual.items()}
    rounds = count // ranks
    simulated = count if rounds <= _ROUNDS else _ROUNDS * (count // rounds)
    orders = action_lists(plan.schedule, ranks, stages, simulated)
    durations = [usual] * (ranks * stages - 1) + [last]
    seconds = simulate_actions(orders, durations, spans)
    return float(max(0.0, seconds - simulated * (stages * each * layer.total + head.total)))


def simulate_actions(
    orders: Sequence[Sequence[PipelineAction]],
    seconds: Sequence[Mapping[str, float]],
    spans: Sequence[list[Span]] | None = None,
) -> float:
    """Return the seconds of a step.

    Each rank takes its actions in order, each as soon as those that it needs have ended. `seconds` are
    those of each kind of action, for each stage. The actions of each rank are added to `spans`.
    """
    last = len(seconds) - 1
    forward: dict[tuple[int, int], float] = {}
    backward: dict[tuple[int, int], float] = {}
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    advanced = True
    while advanced:
        advanced = False
        for rank, order in enumerate(orders):
            now, place = clocks[rank], places[rank]
            while place < len(order):
                kind, stage, micro = order[place]
                ready: float | None = 0.0
                if kind == "F" and stage:
                    ready = forward.get((stage - 1, micro))
                elif kind in "BI" and stage < last:
                    ready = backward.get((stage + 1, micro))
                if ready is None:
                    break
                began = max(now, ready)
                now = began + seconds[stage][kind]
                if spans is not None:
                    spans[rank].append(Span(ACTIONS[kind], began, now))
                if kind == "F":
                    forward[stage, micro] = now
                elif kind != "W":
                    backward[stage, micro] = now
                place += 1
                advanced = True
            clocks[rank], places[rank] = now, place
    return max(clocks)

"""The best configurations of a training on a number of devices, out of all valid ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from shoal.distributed.layout import AXES, Layout
from shoal.plan.configuration import RECOMPUTES, PlannedStep
from shoal.plan.machines import Machine
from shoal.plan.memory import MemoryEstimate, estimate_memory
from shoal.plan.model import Transformer
from shoal.plan.step_time import StepEstimate, estimate_step
from shoal.util.errors import ShoalError
from shoal.util.units import counted, duration, percent, size


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A configuration with its predicted memory and step time."""

    plan: PlannedStep
    memory: MemoryEstimate
    step: StepEstimate

    @property
    def family(self) -> str:
        """The axes in use, such as `shard+tensor`."""
        return "+".join(axis for axis in AXES if self.plan.layout.degree(axis) > 1) or "one device"


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The fastest predictions that fit, and for each other set of axes its best one."""

    best: tuple[Prediction, ...]
    rejected: tuple[tuple[Prediction, str], ...]
    tried: int
    fitting: int


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def valid_layouts(model: Transformer, machine: Machine, devices: int, batch: int) -> Iterator[Layout]:
    """Yield the layouts that the model, the node and the global batch allow.

    Tensor and context parallelism stay within a node; stages have equal numbers of layers.
    """
    node = min(machine.devices, devices)
    for tensor in _divisors(devices):
        if tensor > node or node % tensor or model.key_heads % tensor or model.width % tensor:
            continue
        for context in _divisors(node // tensor):
            if model.seq % context or model.key_heads // tensor % context:
                continue
            for pipeline in _divisors(math.gcd(model.layers, devices // (tensor * context))):
                data = devices // (tensor * context * pipeline)
                if pipeline > 1 and context > 1:
                    continue  # Shoal does not combine them
                if batch % data:
                    continue
                for shard in _divisors(data):
                    yield Layout(
                        tensor=tensor,
                        context=context,
                        pipeline=pipeline,
                        shard=shard,
                        replicate=data // shard,
                    )


def _configurations(
    model: Transformer, layout: Layout, batch: int, precision: str
) -> Iterator[PlannedStep]:
    local = batch // layout.data_size
    choices = [each for each in RECOMPUTES if each != "selective" or not model.flash]
    for recompute in choices:
        for micro in (2**power for power in range(local.bit_length())):
            if local % micro:
                break
            if layout.pipeline > 1 and local // micro < layout.pipeline:
                break  # most of the pipeline would wait
            yield PlannedStep(
                layout=layout,
                global_batch=batch,
                micro_batch=micro,
                recompute=recompute,
                precision=precision,
                sequence_parallel=layout.tensor > 1,
            )


def search_plans(
    model: Transformer,
    machine: Machine,
    devices: int,
    batch: int,
    *,
    precision: str = "mixed",
    top: int = 5,
) -> SearchResult:
    """Return the `top` fastest configurations that fit, and why the others are not among them.

    Raises ShoalError if no layout is valid. `best` is empty if none fits.
    """
    fits: list[Prediction] = []
    near: dict[str, Prediction] = {}
    tried = 0
    for layout in valid_layouts(model, machine, devices, batch):
        for plan in _configurations(model, layout, batch, precision):
            tried += 1
            memory = estimate_memory(model, plan)
            found = Prediction(plan=plan, memory=memory, step=estimate_step(model, plan, machine))
            if memory.total <= machine.available:
                fits.append(found)
            elif found.family not in near or memory.total < near[found.family].memory.total:
                near[found.family] = found
    if not tried:
        raise _no_layout(model, devices, batch)
    fits.sort(key=lambda each: (each.step.total, each.memory.total))
    best = tuple(fits[:top])
    return SearchResult(
        best=best, rejected=_rejections(best, fits, near, machine), tried=tried, fitting=len(fits)
    )


def _rejections(
    best: Sequence[Prediction],
    fits: Sequence[Prediction],
    near: dict[str, Prediction],
    machine: Machine,
) -> tuple[tuple[Prediction, str], ...]:
    """Return the best configuration of each set of axes that is not in `best`, with the reason."""
    shown = {each.family for each in best}
    result = []
    for each in fits:
        if each.family not in shown:
            shown.add(each.family)
            result.append((each, _slower(each, best[0])))
    for family, each in near.items():
        if family not in shown:
            over = each.memory.total - machine.available
            kinds = asdict(each.memory)
            largest = max(kinds, key=kinds.__getitem__)
            result.append(
                (each, f"does not fit: {size(over)} too much; {largest} {size(kinds[largest])}")
            )
    # Plain strategies first: they are the ones that a user asks about.
    return tuple(sorted(result, key=lambda pair: pair[0].family.count("+")))


def _slower(slow: Prediction, fast: Prediction) -> str:
    ours, theirs = asdict(slow.step), asdict(fast.step)
    part = max(ours, key=lambda name: ours[name] - theirs[name])
    more = ours[part] - theirs[part]
    ratio = slow.step.total / fast.step.total - 1
    return f"{percent(ratio, tenths=True)} slower: {duration(more)} more of {part}"


def _no_layout(model: Transformer, devices: int, batch: int) -> ShoalError:
    nearest = max(1, round(batch / devices)) * devices
    return ShoalError(
        given=f"{counted(devices, 'device')}, global batch {batch}",
        found=f"no layout splits {batch} samples, {model.layers} layers and {model.key_heads} heads "
        "evenly",
        fix=f"use a global batch size that can be split evenly, such as --batch {nearest}",
    )

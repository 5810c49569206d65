"""Buffers that the forward pass changes: they must not depend on how the batch is split.

`shoal.Coupled` layers and BatchNorm declare how their state depends on the batch. Others raise
StepError if the split matters, unless `statistics="rank"` accepts the state of one rank. For layers of
torch, which users can't rewrite, Shoal only prints a line.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.distributed.layout import AXES, DATA_AXES
from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.coupling.batch_norm import buffers_of, coupled_layers
from shoal.strategies.coupling.observed import described, digest
from shoal.strategies.dtensor import share
from shoal.util.errors import StepError

OF_SAMPLES = "the samples of a micro-batch of one rank"
OF_COUNT = "the number of micro-batches"


def undeclared_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of layers that may update themselves in each forward pass, by name."""
    declared = coupled_layers(model)
    return buffers_of(model, (part for part in model.modules() if part not in declared))


def check_changes(engine: Engine, found: dict[str, str], micro_batches: int) -> None:
    """Raise StepError on all ranks for buffers that depend on the split, or print them. Collective.

    `found` has their names, and for each the reason. A step that is not split only prints them.
    """
    world, model = engine.world, engine.module
    merged = {name: why for part in world.gather(found) for name, why in part.items()}
    if not merged:
        return
    wrong = [name for name in merged if engine.statistics != "rank" and not _of_torch(model, name)]
    name = min(wrong or merged)
    owner, _, buffer = name.rpartition(".")
    layer = described(model, owner)
    if world.data_size * micro_batches == 1:
        if wrong:
            world.print(
                f"shoal: {layer} changes its buffer {buffer!r} in each forward pass: with another "
                f"split of the batch it would depend on {merged[name]}, which raises StepError; "
                "shoal.Coupled makes such a layer exact"
            )
        return
    if wrong:
        raise StepError(
            given=f"{layer} with the buffer {buffer!r}, which its forward pass changes",
            found=f"it depends on {merged[name]}, so the results depend on how the batch is split",
            fix="derive the layer from shoal.Coupled, and change the buffer in groups.update; or count "
            "steps outside the model; or accept it: shoal.parallelize(…, statistics='rank')",
        )
    world.print(
        f"shoal: results depend on how the batch is split, because {layer} changes its buffers in each "
        "forward pass; shoal.Coupled makes such a layer exact"
    )


def _of_torch(model: nn.Module, name: str) -> bool:
    """Return whether the layer that has a buffer is one of torch, as it is or as FSDP wraps it."""
    kinds = type(model.get_submodule(name.rpartition(".")[0])).__mro__
    return all(kind.__module__.partition(".")[0] in ("torch", "builtins", "typing") for kind in kinds)


def changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Return the names of the tensors that have changed."""
    return {name for name in before.keys() & after.keys() if not same(before[name], after[name])}


def dependence(
    whole: dict[str, Tensor], half: dict[str, Tensor], twice: dict[str, Tensor]
) -> dict[str, str]:
    """Return what each buffer depends on, from its values after three runs, if not on the step alone.

    A buffer that only grows with the longest sample, such as a cache, does not depend on the samples.
    """
    found = {}
    for name in whole.keys() & half.keys() & twice.keys():
        steady = same(whole[name], twice[name])
        grows = whole[name].shape != half[name].shape and not steady
        if grows or not same(*_common(whole[name], half[name])):
            found[name] = OF_SAMPLES
        elif not steady:
            found[name] = OF_COUNT
    return found


def gathered(
    world: World, names: set[str], alone: dict[str, Tensor], together: dict[str, Tensor]
) -> set[str]:
    """Return the buffers that are the same on all ranks because of `shoal.gather`. Collective.

    `alone` has their values after a forward pass in which it returned the rows of this rank only.
    """
    mine = {
        name: (_summary(together[name]), same(alone[name], together[name]))
        for name in names & alone.keys() & together.keys()
    }
    values: dict[str, set[str]] = {}
    changed = set()
    for part in world.gather(mine):
        for name, (value, unchanged) in part.items():
            values.setdefault(name, set()).add(value)
            changed |= set() if unchanged else {name}
    return {name for name in changed if len(values[name]) == 1}


def _common(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of two tensors that both have."""
    if one.dim() != other.dim():
        return one, other
    part = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    return one[part], other[part]


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal. NaN equals NaN."""
    if one.shape != other.shape or torch.equal(one, other):
        return one.shape == other.shape
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _summary(value: Tensor) -> str:
    """Return a string that is the same for equal tensors, with NaN too."""
    real = torch.view_as_real(value) if value.is_complex() else value
    return str(digest([real.reshape(1, -1)]).tolist())


class LoopBuffers:
    """The buffers of a model in the first batch of a custom training loop, which no trial precedes.

    Created after the first forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._first = {name: share(each).clone() for name, each in undeclared_buffers(model).items()}

    def check(self, engine: Engine, micro_batches: int) -> None:
        """Check for buffers that differ between ranks or after later micro-batches. Collective."""
        world = engine.world
        now = {name: share(each) for name, each in undeclared_buffers(engine.module).items()}
        mine = {name: _summary(value) for name, value in now.items()}
        place = [world.layout.coordinate(world.rank, axis) for axis in AXES if axis not in DATA_AXES]
        found = {
            name: OF_COUNT
            for name, value in now.items()
            if name in self._first and not same(self._first[name], value)
        }
        for other, theirs in world.gather((place, mine)):
            if other == place:
                names = [name for name in mine if theirs.get(name) != mine[name]]
                found |= dict.fromkeys(names, OF_SAMPLES)
        check_changes(engine, found, micro_batches)

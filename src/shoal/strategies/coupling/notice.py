"""Layers whose results depend on the split of the global batch, printed when training begins."""

from __future__ import annotations

from torch import nn

from shoal.data.coupling.step import coupling_of, several
from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.coupling.batch_norm import coupled_layers, is_covered
from shoal.strategies.random_draws.draws import is_registered, layouts_of, slices_of

_SHOWN = 3
DROPOUTS = (
    nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout
)
"""The layers of torch that only drop."""


def say_division(engine: Engine, micro_batches: int, *, compiled: bool) -> None:
    """Print once, on rank 0, which layers make the results depend on how the batch is split.

    These are batch normalization with `statistics="rank"`, whose statistics cover one micro-batch of
    one rank, and dropout, which draws by rank unless its random numbers belong to samples. `compiled`
    code draws by rank; of a registered model, all modules are reported that have drawn in the check of
    the loss function, on any rank. Layers in eval mode and dropout with p=0 are not reported, nor are
    draws of slices, which `say_draws` reports.
    Raises StepError, on all ranks, for layers that need the whole batch in one micro-batch.
    """
    world = engine.world
    if engine.whole_batches and micro_batches > 1:
        _check_one_micro_batch(engine, micro_batches)
    if engine.division_reported or (world.size == 1 and micro_batches == 1):
        return
    engine.division_reported = True
    modules = [(name, each) for name, each in engine.module.named_modules() if each.training]
    norms = [
        f"{name or 'the model'} ({type(each).__name__})"
        for each, name in coupled_layers(engine.module).items()
        # SyncBatchNorm takes its statistics over all ranks, but over one micro-batch too.
        if each.training
        and world.data_size * micro_batches > 1
        and not is_covered(each)
        and (micro_batches > 1 or not isinstance(each, nn.SyncBatchNorm))
    ]
    by_rank = [
        name
        for name, each in modules
        if drops(each)
        and (compiled or not is_registered(each) or _draws_itself(each, world.device.type))
    ]
    kinds = {name: f" ({type(each).__name__})" for name, each in modules}
    if compiled and is_registered(engine.module):  # functions draw too, and other stages
        by_rank = list(dict.fromkeys((*by_rank, *layouts_of(engine.module).modules())))
    dropouts = [f"{name or 'the model'}{kinds.get(name, '')}" for name in by_rank]
    found = [
        f"{_listed(norms)}: statistics cover one micro-batch of one rank" if norms else "",
        f"{_listed(dropouts)}: each rank draws its own random numbers" if dropouts else "",
    ]
    if norms or dropouts:
        world.print(
            f"shoal: results depend on how the batch is split, here over {world.data_size} data "
            f"rank(s) and {micro_batches} micro-batch(es), because of " + "; ".join(filter(None, found))
            if world.data_size * micro_batches > 1
            else f"shoal: results depend on the layout, because of {found[1]}"
        )


def say_draws(model: nn.Module, world: World) -> None:
    """Print once, on rank 0, each module whose split activations got the random numbers of the rank."""
    slices = slices_of(model)
    names = "" if slices is None else slices.take_by_rank()
    if names:
        world.print(f"shoal: each rank draws its own random numbers in {names}")


def _check_one_micro_batch(engine: Engine, micro_batches: int) -> None:
    """Raise StepError on all ranks, since a stage of a pipeline has only some of the layers."""
    found = [
        f"{type(each).__name__} {name}"
        for name, each in engine.module.named_modules()
        if each.training and (coupling := coupling_of(each)) and coupling.size is None
    ]
    first = next(filter(None, engine.world.gather(found[:1])), None)
    if first:
        raise several(first[0], micro_batches)


def drops(module: nn.Module) -> bool:
    """Return whether a layer has dropout that is not 0."""
    if isinstance(module, DROPOUTS):
        return module.p > 0
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0


def _draws_itself(module: nn.Module, device: str) -> bool:
    """Return whether a layer draws in a library of the device, which does not call torch's dropout."""
    return isinstance(module, nn.RNNBase) and module.num_layers > 1 and device != "cpu"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

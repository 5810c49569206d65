"""Layers whose results depend on the split of the global batch, printed when training begins."""

from __future__ import annotations

from torch import nn

from shoal.strategies.contracts import Engine
from shoal.strategies.random_draws.draws import is_keyed

_SHOWN = 3
_BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
_DROPOUTS = (
    nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout
)


def say_division(engine: Engine, micro_batches: int, *, compiled: bool) -> None:
    """Print once, on rank 0, which layers make the results depend on how the batch is split.

    These are batch normalization, whose statistics cover one micro-batch of one rank, and dropout,
    which draws by rank unless its random numbers belong to samples. Layers in eval mode and dropout
    with p=0 are not reported.
    """
    world = engine.world
    if engine.division_reported or (world.data_size == 1 and micro_batches == 1):
        return
    engine.division_reported = True
    modules = [(name, each) for name, each in engine.module.named_modules() if each.training]
    norms = [
        f"{name or 'the model'} ({type(each).__name__})"
        for name, each in modules
        # SyncBatchNorm takes its statistics over all ranks, but over one micro-batch too.
        if isinstance(each, _BATCH_NORMS)
        and (micro_batches > 1 or not isinstance(each, nn.SyncBatchNorm))
    ]
    drops = [
        f"{name or 'the model'} ({type(each).__name__})"
        for name, each in modules
        if _drops(each, compiled)
    ]
    found = [
        f"{_listed(norms)}: statistics cover one micro-batch of one rank" if norms else "",
        f"{_listed(drops)}: each rank draws its own random numbers" if drops else "",
    ]
    if norms or drops:
        world.print(
            f"shoal: results depend on how the batch is split, here over {world.data_size} data "
            f"rank(s) and {micro_batches} micro-batch(es), because of " + "; ".join(filter(None, found))
        )


def _drops(module: nn.Module, compiled: bool) -> bool:
    if is_keyed(module) and not compiled:
        return False
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

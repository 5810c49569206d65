"""The checks of a model that is passed to `parallelize`."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.distributed.world import World
from shoal.strategies.coupling.batch_norm import coupled_layers
from shoal.strategies.data_parallel.ddp import DDP
from shoal.strategies.registry import engines_of
from shoal.util.differences import minority, spans
from shoal.util.errors import AgreementError, StepError


def check_model(
    model: object, world: World, strategies: Sequence[Any], *, random: str, statistics: int | str
) -> None:
    """Raise StepError for a model that `parallelize` does not take with these arguments.

    Raises AgreementError if the ranks have models with different parameters. Collective.
    """
    check_bare(model)
    if not isinstance(model, nn.Module):
        raise StepError(
            given=f"parallelize({type(model).__name__}, …)",
            found="it is neither a torch.nn.Module nor a function that creates one",
            fix="model = shoal.parallelize(Model(), world)",
        )
    synced = [name for name, part in model.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if synced and statistics == "rank" and world.size > 1 and world.device.type == "cpu":
        raise StepError(
            given=f"parallelize({type(model).__name__}, world, statistics='rank') on the CPU, with "
            f"{synced[0]}",
            found="torch has SyncBatchNorm for CUDA only",
            fix="leave statistics out, for the statistics of the global batch",
        )
    if _sharing(model, world):
        gc.collect()  # frees deleted models that are still in reference cycles
    for other in _sharing(model, world):
        raise StepError(
            given=f"parallelize({type(model).__name__}, world)",
            found=f"its parameters already belong to a parallelized {type(other).__name__}, so their "
            "gradients would be reduced twice",
            fix="call parallelize once, on the module that contains all of them, or on a "
            "copy.deepcopy(model)",
        )
    _check_bits(model, world, strategies, random, statistics)
    _check_same(model, world)


def _check_bits(
    model: nn.Module, world: World, strategies: Sequence[Any], random: str, statistics: int | str
) -> None:
    """Raise StepError for arguments with which results depend on the number of ranks in their bits."""
    if world.virtual_ranks is None:
        return
    layers = coupled_layers(model)
    if not isinstance(strategies[-1], DDP):
        given, found = repr(strategies[-1]), "only shoal.DDP() sums gradients in a fixed order"
        fix = "leave the strategy out, or exact='bits'"
    elif random != "samples":
        given, found = f"random={random!r}", "random numbers of ranks depend on their number"
        fix = "leave random out"
    elif layers and not isinstance(statistics, int):
        name = next(iter(layers.values())) or type(model).__name__
        given = f"statistics={statistics!r} and the layer {name}"
        found = "the statistics of a virtual rank are those of groups of a fixed number of samples"
        fix = "pass statistics=8, the number of samples of a group"
    else:
        return
    raise StepError(
        given=f"parallelize({type(model).__name__}, …) with exact='bits' and {given}",
        found=found,
        fix=fix,
    )


def _sharing(model: nn.Module, world: World) -> list[nn.Module]:
    """Return the parallelized models that share parameters with `model`."""
    own = {id(parameter) for parameter in model.parameters()}
    others = [engine.module for engine in engines_of(world)]
    return [other for other in others if any(id(p) in own for p in other.parameters())]


def _check_same(model: nn.Module, world: World) -> None:
    """Raise AgreementError, on all ranks, unless their models have the same tensors in the same order.

    Gloo would silently add bytes of float32 and float64, and match other shapes by chance.
    """
    tensors = [_described(*item) for item in chain(model.named_parameters(), model.named_buffers())]
    strides = {name: _strides(p) for name, p in model.named_parameters()}
    digest = hashlib.sha256("\n".join([*tensors, *map(str, strides.values())]).encode()).hexdigest()
    if len(set(world.gather(digest))) == 1:
        return
    for number, found in enumerate(zip_longest(*world.gather(tensors), fillvalue="none")):
        if len(set(found)) > 1:
            world.agree(found[world.rank], f"tensor {number} of the {type(model).__name__}")
    for name, mine in strides.items():
        everyone = world.gather(mine)
        usual, odd = minority(everyone)
        if odd:
            others = [rank for rank in range(world.size) if rank not in odd]
            raise AgreementError(
                given=f"parallelize({type(model).__name__}, world), where {name} has the strides "
                f"{everyone[usual]} on rank {spans(others)}",
                found=f"the strides {everyone[odd[0]]} on rank {spans(odd)}",
                fix=f"create or load {name} in the same way on every rank; or use p.data = "
                "p.data.contiguous() for each parameter before parallelize",
            )


def _described(name: str, tensor: Tensor) -> str:
    shape = "no shape yet" if is_lazy(tensor) else tuple(tensor.shape)
    learns = ", learns" if tensor.requires_grad else ""
    return f"{name}: {shape} {tensor.dtype}{learns}".replace("torch.", "")


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions that have more than one index."""
    if is_lazy(tensor):
        return ()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride for size, stride in sizes if size > 1)


def check_bare(model: object) -> None:
    """Raise StepError for a model in a wrapper of torch's data parallelism."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise StepError(
            given=f"a model in torch's {type(model).__name__}",
            found="its gradients would be reduced twice, and its names begin with 'module.'",
            fix="call shoal.parallelize(model, world) with the bare model; or, if DDP trains "
            "it, pass world=world to shoal.evaluate or shoal.export, and a shoal.Loader to shoal.Run",
        )

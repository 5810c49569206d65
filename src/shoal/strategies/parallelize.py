"""parallelize: attach an engine to the user's module."""

from __future__ import annotations

import gc
import hashlib
import inspect
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Any, TypeGuard, TypeVar, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal._torch.modules import compiler_of
from shoal.data.batch import ManualLoop
from shoal.data.coupled import Coupling
from shoal.distributed.layout import AXES
from shoal.distributed.world import World
from shoal.strategies.batch_norm import coupled_layers, take_over
from shoal.strategies.compiled import bare
from shoal.strategies.contracts import Engine, ModelTransform, Strategy
from shoal.strategies.data_parallel.ddp import DDP
from shoal.strategies.device_placement.multi_device import check_strategies
from shoal.strategies.fsdp.options import FSDP
from shoal.strategies.manual_loop import EngineLoop
from shoal.strategies.random_draws import draws as random_draws
from shoal.strategies.registry import engines_of, register
from shoal.util.arguments import is_integer
from shoal.util.errors import LayoutError, StepError

Model = TypeVar("Model", bound=nn.Module)

ATTRIBUTE = "_shoal_engine"

_SERVING = {
    "replicate": "shoal.DDP()",
    "shard": "shoal.FSDP()",
    "context": "shoal.ContextParallel()",
    "tensor": "shoal.TensorParallel(plan=…)",
    "pipeline": "shoal.Pipeline(split_points=…)",
}
"""The strategy for each axis of a layout, as code."""


class Attachment:
    """Holder of the engine of a module. Copied or pickled modules have no engine."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: object) -> Attachment:
        return Attachment()

    def __reduce__(self) -> tuple[object, ...]:
        return Attachment, ()


def parallelize(
    model: Model | Callable[[], Model],
    world: World,
    strategy: Strategy | ModelTransform | Sequence[Strategy | ModelTransform] | None = None,
    *,
    random: str = "samples",
    statistics: int | str = "batch",
) -> Model:
    """Parallelize `model` over the ranks of `world`, in place.

    The model is moved to the world's device. Create the optimizer afterwards. Seeds the global random
    generators of Python, NumPy and torch differently on each data-parallel rank. Create data before
    this call, or with a `torch.Generator` that has a fixed seed. Collective.

    Args:
        model: A module, a compiled module, or a function without arguments that creates a module. With
            a function, strategies that shard the model (FSDP) never hold the complete model, and its
            parameters still get the same values. With `torch.compile(model)`, the model runs compiled.
        world: The World that `shoal.init` returned.
        strategy: A strategy, or several, applied in order; the last one sums gradients. None means
            `FSDP()` if the layout has a `shard` axis, else `DDP()`. Default: None.
        random: "samples" keys the random numbers that modules draw in a step, such as those of dropout,
            by the position of each sample, so they are the same at any number of ranks and
            micro-batches (Philox 4x32-10, Salmon et al. 2011). "ranks" leaves them to torch's
            generators, as do models that you compile yourself, custom training loops with a `tensor`
            axis, and compiled models with a `tensor`, `context` or `pipeline` axis. Default: "samples".
        statistics: Samples over which BatchNorm, SyncBatchNorm and `Coupled` layers compute statistics:
            "batch", the global batch, which must be one micro-batch; a number such as 64, for groups
            of 64 consecutive positions, which are the same at any number of ranks and micro-batches
            (ghost batches, Hoffer et al. 2017); or "rank", the micro-batch of one rank, as in
            torch's DDP. Default: "batch".

    Returns:
        The same module, with the same names; if `model` is a function, the module that it returned.

    Raises:
        StepError: If `model` is not a module, `strategy` is not a strategy, or the model shares
            parameters with one that was parallelized before; if `statistics` is neither a number nor
            one of the words, or the strategy cannot exchange sums between ranks.
        LayoutError: If no strategy uses an axis of the layout.
        AgreementError: If the ranks have models with different parameters.

    Examples:
        >>> with shoal.init() as world:
        ...     model = shoal.parallelize(nn.Linear(2, 1), world, shoal.DDP())
        >>> model
        Linear(in_features=2, out_features=1, bias=True)
    """
    if not isinstance(world, World):
        raise StepError(
            given=f"parallelize({type(model).__name__}, {type(world).__name__})",
            found="the second argument is the World that shoal.init returns",
            fix="shoal.parallelize(model, world)",
        )
    if random not in ("samples", "ranks"):
        raise StepError(
            given=f"parallelize(model, world, random={random!r})",
            found="random numbers belong to 'samples' or to 'ranks'",
            fix="pass random='samples', or leave it out",
        )
    strategies = _checked(strategy, world)
    module: Any = model
    deferred = None
    if not isinstance(model, nn.Module) and _makes(model):
        from shoal.strategies.deferred_init import construct  # rarely needed

        if world.size > 1 and len(strategies) == 1 and strategies[0].defers:
            deferred = construct(model)
        module = model() if deferred is None else deferred.module
    compiler, module = compiler_of(module), bare(module)
    _check_model(module, world, statistics)
    _check_bits(module, world, strategies, random, statistics)
    _check_same(module, world)
    if random == "samples":
        split = any(world.layout.degree(axis) > 1 for axis in ("context", "tensor"))
        random_draws.register(module, split=split)
    coupled = _couple(module, world, statistics)
    engine = _apply(strategies, module, world)
    engine.whole_batches = coupled and statistics == "batch"
    if compiler is not None:
        engine.compile_with(compiler)
    if deferred is not None:
        deferred.fill()
    register(engine)
    world.provide(ManualLoop, EngineLoop(world))
    object.__setattr__(module, ATTRIBUTE, Attachment(engine))
    world.reseed(engine.noise_stream)
    return cast(Model, module)


def _apply(strategies: Sequence[Any], module: nn.Module, world: World) -> Engine:
    """Apply `strategies` in order, and return the engine of the last one.

    Those before it change the module in place: they checkpoint activations, place layers on devices,
    shard layers over the `tensor` axis, or split sequences over the `context` axis. The last one may
    change the module too (shard parameters, keep a stage), moves the modules of this rank to its
    device, and creates the engine, usually with a reducer of its gradients.
    """
    *before, chosen = strategies
    check_strategies(module, strategies)
    for each in before:
        each.spread(module, world)
    check_strategies(module, strategies)  # only now may it be on several devices
    engine: Engine = chosen.apply(module, world)
    engine.strategy = repr(strategies if before else chosen)
    return engine


def _checked(strategy: Any, world: World) -> list[Any]:
    """Return the strategies. Raise an error for other values, combinations and unused axes."""
    given = list(strategy) if isinstance(strategy, list | tuple) else [strategy]
    if strategy is None or (
        given and isinstance(given[-1], ModelTransform) and not _complete(given[-1])
    ):
        given = [*filter(None, given), FSDP() if world.layout.degree("shard") > 1 else DDP()]
    for each in given or [None]:
        usable = _complete(each) or isinstance(each, ModelTransform)
        if isinstance(each, str | type | nn.Module) or not usable:
            raise StepError(
                given=f"parallelize(model, world, {strategy!r})",
                found="a strategy is an object such as shoal.DDP(), not a name or a class",
                fix="pass shoal.DDP() or shoal.FSDP(), with options if needed; or leave it out",
            )
    for each in given[:-1]:
        if not isinstance(each, ModelTransform):
            raise StepError(
                given=f"parallelize(model, world, {strategy!r})",
                found=f"{type(each).__name__} sums gradients, so no strategy can follow it",
                fix="pass [shoal.TensorParallel(plan=…), shoal.FSDP()], in this order",
            )
    served = {axis for each in given for axis in each.axes}
    idle = [axis for axis in AXES if world.layout.degree(axis) > 1 and axis not in served]
    if idle:
        own = next(iter(given[-1].axes), "replicate")
        raise LayoutError(
            given=f"layout='{world.layout}' with {strategy!r}",
            found=f"no strategy uses the {idle[0]!r} axis",
            fix=f"use shoal.init(layout='{own}=-1'), or {_SERVING[idle[0]]} for this axis",
        )
    return given


def _complete(strategy: object) -> bool:
    return hasattr(strategy, "apply") and hasattr(strategy, "axes")


def _makes(model: object) -> TypeGuard[Callable[[], nn.Module]]:
    """Return whether `model` can be called without arguments."""
    if not callable(model):
        return False
    try:
        inspect.signature(model).bind()
    except (TypeError, ValueError):
        return False
    return True


def _couple(model: nn.Module, world: World, statistics: int | str) -> bool:
    """Let layers that couple samples do so over `statistics`; return whether ranks exchange sums."""
    if statistics not in ("batch", "rank") and not is_integer(statistics, least=1):
        raise StepError(
            given=f"parallelize(…, statistics={statistics!r})",
            found="it is neither 'batch' nor 'rank' nor a positive number of samples",
            fix="pass statistics=64 for groups of 64 samples, or leave it out for the whole batch",
        )
    layers = coupled_layers(model)
    if statistics == "rank":
        take_over(layers, None)
    elif layers:
        take_over(layers, Coupling(world, None if statistics == "batch" else int(statistics), layers))
    return bool(layers) and statistics != "rank"


def _check_model(model: object, world: World, statistics: int | str) -> None:
    _check_bare(model)
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
    digest = hashlib.sha256("\n".join(tensors).encode()).hexdigest()
    if len(set(world.gather(digest))) == 1:
        return
    for number, found in enumerate(zip_longest(*world.gather(tensors), fillvalue="none")):
        if len(set(found)) > 1:
            world.agree(found[world.rank], f"tensor {number} of the {type(model).__name__}")


def _described(name: str, tensor: Tensor) -> str:
    shape = "no shape yet" if is_lazy(tensor) else tuple(tensor.shape)
    learns = ", learns" if tensor.requires_grad else ""
    return f"{name}: {shape} {tensor.dtype}{learns}".replace("torch.", "")


def _check_bare(model: object) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise StepError(
            given=f"a model in torch's {type(model).__name__}",
            found="its gradients would be reduced twice, and its names begin with 'module.'",
            fix="call shoal.parallelize(model, world) with the bare model; shoal.DDP(…) takes the "
            "options",
        )


def known_engine(model: nn.Module) -> Engine | None:
    """Return the engine that `parallelize` attached, or None."""
    attachment = getattr(model, ATTRIBUTE, None)
    return attachment.engine if isinstance(attachment, Attachment) else None


def engine_of(model: nn.Module) -> Engine:
    """Return the engine that `parallelize` attached. Raise StepError if there is none."""
    _check_bare(model)
    model = bare(model)
    engine = known_engine(model)
    if engine is None:
        copied = getattr(model, ATTRIBUTE, None) is not None
        raise StepError(
            given=f"{type(model).__name__}, a model that was not parallelized"
            + (" (a copy of one that was)" if copied else ""),
            found="the model has no engine to run its step",
            fix="model = shoal.parallelize(model, world)",
        )
    return engine

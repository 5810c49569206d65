"""parallelize: attach an engine to the user's module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar, cast

from torch import nn

from shoal._torch.modules import bare, compiler_of
from shoal.data.batch import ManualLoop
from shoal.distributed.layout import AXES
from shoal.distributed.rank_noise import RankNoise
from shoal.distributed.world import World
from shoal.strategies.contracts import Engine, ModelTransform, Strategy
from shoal.strategies.coupling.batch_norm import couple
from shoal.strategies.data_parallel.ddp import DDP
from shoal.strategies.fsdp.options import FSDP
from shoal.strategies.manual_loop import EngineLoop
from shoal.strategies.model_checks import check_bare, check_model
from shoal.strategies.multi_device import check_strategies
from shoal.strategies.random_draws import draws as random_draws
from shoal.strategies.registry import register
from shoal.util.arguments import check_choice
from shoal.util.errors import LayoutError, StepError

Model = TypeVar("Model", bound=nn.Module)

ATTRIBUTE = "_shoal_engine"

_SERVING = {
    "replicate": "shoal.DDP()",
    "shard": "shoal.FSDP()",
    "expert": "shoal.ExpertParallel()",
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
    empty: bool = False,
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
            torch's DDP, which also accepts other modules whose buffers depend on it. Default: "batch".
        empty: Whether to create parameters without values, for `shoal.load`. `model` must be a
            function. No rank ever holds the complete model, unless its layout says so, and no time is
            spent on initial values. Parameters have NaN in them until they are loaded. Default: False.

    Returns:
        The same module, with the same names; if `model` is a function, the module that it returned.

    Raises:
        StepError: If `model` is not a module, or not a function with `empty`, `strategy` is not a
            strategy, or the model shares parameters with one that was parallelized before; if
            `statistics` is neither a number nor one of the words, or the strategy cannot exchange sums
            between ranks.
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
    check_choice(StepError, "shoal.parallelize", "random", random, ("samples", "ranks"))
    strategies = _checked(strategy, world)
    module: Any = model
    deferred = None
    if empty:
        from shoal.strategies.deferred_init import mark_empty

        module = _without_values(model)
    elif not isinstance(model, nn.Module) and _makes(model):
        if world.size > 1 and len(strategies) == 1 and strategies[0].defers:
            from shoal.strategies.deferred_init import construct  # rarely needed

            deferred = construct(model)
        module = model() if deferred is None else deferred.module
    compiler, module = compiler_of(module), bare(module)
    check_model(module, world, strategies, random=random, statistics=statistics)
    if random == "samples":
        split = any(world.layout.degree(axis) > 1 for axis in ("context", "tensor"))
        random_draws.register(module, split=split)
    coupled = couple(module, world, statistics)
    engine = _apply(strategies, module, world)
    engine.whole_batches = coupled and statistics == "batch"
    engine.statistics = statistics
    if compiler is not None:
        engine.compile_with(compiler)
    if deferred is not None:
        deferred.fill()
    if empty:
        mark_empty(module)
    register(engine)
    world.provide(ManualLoop, EngineLoop(world))
    object.__setattr__(module, ATTRIBUTE, Attachment(engine))
    world.service(RankNoise).purpose = engine.noise_stream
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
    late = world.size > 1 and (chosen.defers or isinstance(chosen, ModelTransform))
    if not late and any(p.is_meta for p in module.parameters()):
        from shoal.strategies.deferred_init import give_memory

        give_memory(module, world.device)
    engine: Engine = chosen.apply(module, world)
    engine.strategy = repr(strategies if before else chosen)
    return engine


def _checked(strategy: Any, world: World) -> list[Any]:
    """Return the strategies. Raise an error for other values, combinations and unused axes."""
    given = list(strategy) if isinstance(strategy, list | tuple) else [strategy]
    sharded = world.layout.degree("shard") > 1
    last = given[-1] if given else None
    if strategy is None or (
        isinstance(last, ModelTransform)
        and not (_complete(last) and (not sharded or "shard" in last.axes))
    ):
        given = [*filter(None, given), FSDP() if sharded else DDP()]
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


def _without_values(model: object) -> nn.Module:
    if isinstance(model, nn.Module) or not _makes(model):
        raise StepError(
            given=f"parallelize({type(model).__name__}, …, empty=True)",
            found="the model has its values already",
            fix="pass a function that creates it: shoal.parallelize(Model, world, empty=True)",
        )
    from shoal.strategies.deferred_init import construct_empty

    return construct_empty(model)


def _makes(model: object) -> TypeGuard[Callable[[], nn.Module]]:
    """Return whether `model` can be called without arguments."""
    if not callable(model):
        return False
    try:
        inspect.signature(model).bind()
    except (TypeError, ValueError):
        return False
    return True


def known_engine(model: nn.Module) -> Engine | None:
    """Return the engine that `parallelize` attached, or None."""
    attachment = getattr(model, ATTRIBUTE, None)
    return attachment.engine if isinstance(attachment, Attachment) else None


def engine_of(model: nn.Module) -> Engine:
    """Return the engine that `parallelize` attached. Raise StepError if there is none."""
    check_bare(model)
    model = bare(model)
    engine = known_engine(model)
    if engine is None:
        copied = getattr(model, ATTRIBUTE, None) is not None
        raise StepError(
            given=f"{type(model).__name__}, a model that was not parallelized"
            + (" (a copy of one that was)" if copied else ""),
            found="the model has no engine to run its step",
            fix="model = shoal.parallelize(model, world); or, if another tool trains it, pass "
            "world=world to shoal.evaluate or shoal.export",
        )
    return engine

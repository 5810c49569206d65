"""Options of the RPC pipeline: stages that send each other messages through torch RPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.coupling.batch_norm import refuse_coupled
from shoal.strategies.held_parameters import check_learns
from shoal.strategies.local import local_engine
from shoal.strategies.partition.assignment import crew_of, split_points
from shoal.strategies.partition.refused import refuse_layout, refuse_unused
from shoal.strategies.partition.stages import OuterGraph, Stage, opened_by, refuse_tied, trace
from shoal.strategies.sharded_layers.sharded_modules import division_of
from shoal.util.errors import StepError


@dataclass(frozen=True, kw_only=True)
class RPCPipeline:
    """Pipeline over torch RPC: stages on the ranks of the `pipeline` axis send each other messages.

    The micro-batches of `Loader(micro_batches=…)` run through the stages at the same time. Shapes may
    differ between micro-batches. Parameters, gradients and optimizer state stay on the ranks of their
    stage. Any rank may call the model without gradients. With the `replicate` axis, each replica has
    all stages, and gradients are summed over replicas.

    Args:
        stages: Mapping from the name of each stage, in order, to the names of its modules or of modules
            that contain them. A module without parameters may be left out: it belongs to the stage of
            the module before it.
        workers: Mapping from each stage to its ranks, numbered from 0 within the axis. The workers of a
            stage take turns with the micro-batches, and their gradients are summed. None means one
            rank per stage, in order. Default: None.

    Raises:
        StepError: If the arguments are malformed or the model cannot be split into these stages.
        LayoutError: If the layout has no `pipeline` axis, or has the `context` axis.

    Examples:
        >>> strategy = shoal.RPCPipeline(
        ...     stages={"encoder": ("embedding", "blocks.0"), "decoder": ("blocks.1", "head")},
        ...     workers={"encoder": (0,), "decoder": (1, 2)},
        ... )
    """

    axes: ClassVar[tuple[str, ...]] = ("pipeline", "replicate")
    defers: ClassVar[bool] = True

    stages: Mapping[str, Sequence[str]]
    workers: Mapping[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        fix = "stages={'front': ('first', 'blocks.0'), 'back': ('blocks.1', 'head')}"
        named = isinstance(self.stages, Mapping) and _names([*self.stages])
        if not named or not all(_names(modules) for modules in self.stages.values()):
            raise StepError(
                given=f"shoal.RPCPipeline(stages={self.stages!r})",
                found="stages maps the name of each stage to a sequence of module names",
                fix=fix,
            )
        if self.workers is None:
            return
        given = self.workers if isinstance(self.workers, Mapping) else {}
        listed = all(isinstance(some, Sequence) for some in given.values())
        ranks = [rank for some in given.values() for rank in some] if listed else []
        if not listed or {*given} != {*self.stages} or not all(given.values()):
            found = f"the stages are {', '.join(self.stages)}, and each has at least one worker"
        elif not all(type(rank) is int and rank >= 0 for rank in ranks):
            found = "workers are ranks of the `pipeline` axis, numbered from 0"
        elif len({*ranks}) < len(ranks):
            found = "a rank can run only one stage"
        else:
            return
        one_each = {name: (rank,) for rank, name in enumerate(self.stages)}
        raise StepError(
            given=f"shoal.RPCPipeline(workers={self.workers!r})",
            found=found,
            fix=f"pass workers={one_each}, or assign several ranks to a stage",
        )

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Keep this rank's stage of the model. In a world of size 1, check the stages and keep all."""
        given = f"shoal.RPCPipeline(…) around {type(model).__name__}"
        if world.size > 1:
            refuse_layout(
                world,
                given,
                degree=-1,
                fix="use layout='pipeline=2', or shoal.ContextParallel() with shoal.FSDP()",
            )
        experts = world.layout.degree("expert") > 1
        if experts or division_of(model) is not None:
            before = "shoal.ExpertParallel()" if experts else "shoal.TensorParallel(plan=…)"
            raise StepError(
                given=f"[{before}, {given}]",
                found="each call of a stage with sharded layers would have to run on several ranks",
                fix=f"[{before}, shoal.Pipeline(split_points=…)]",
            )
        check_learns(model)
        if world.size == 1:
            self._cut(model, given)
            return local_engine(model.to(world.device), world)
        refuse_coupled(model, "shoal.RPCPipeline(…)", "its stages run in threads, in any order")
        crew = crew_of([*self.stages], self.workers, world.layout.group(world.rank, "pipeline"), given)
        outer, stages = self._cut(model, given)
        from shoal.strategies.rpc_pipeline.engine import RPCPipelineEngine  # imports torch RPC

        return RPCPipelineEngine(model, world, outer, stages, crew)

    def _cut(self, model: nn.Module, given: str) -> tuple[OuterGraph, list[Stage]]:
        """Return the forward of the model as a graph, and its stages."""
        names = [module for modules in self.stages.values() for module in modules]
        known = dict(model.named_modules())
        outer = trace(model, opened_by(name for name in names if name in known), "shoal.RPCPipeline(…)")
        calls = outer.calls()
        bare = {call for call in calls if not any(True for _ in _tensors(known[call]))}
        stages = outer.cut(split_points(calls, self.stages, frozenset(bare), given), given)
        _check(model, stages, [*self.stages], given)
        return outer, stages


def _names(modules: object) -> bool:
    if isinstance(modules, str) or not isinstance(modules, Sequence) or not modules:
        return False
    return all(isinstance(name, str) and name for name in modules)


def _tensors(module: nn.Module) -> list[object]:
    return [*module.parameters(), *module.buffers()]


def _check(model: nn.Module, stages: Sequence[Stage], names: Sequence[str], given: str) -> None:
    """Raise StepError for parameters used in two stages or in none, and for stages without any."""
    fix = "put the modules that share it in one stage, or separate the parameters"
    refuse_tied(stages, range(len(stages)), given, fix)
    refuse_unused(model, stages, given)
    for name, stage in zip(names, stages, strict=True):
        if not any(True for _ in stage.body.parameters()):
            raise StepError(
                given=given,
                found=f"stage {name!r} has no parameters, so its rank has nothing to optimize",
                fix="put its modules into an adjacent stage; frozen parameters are enough",
            )

"""A model whose stages are on several machines and call each other by torch RPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shoal.distributed.world import World
from shoal.strategies.activation_checkpoint import runs_again
from shoal.strategies.contracts import Engine
from shoal.strategies.engine import SynchronousEngine
from shoal.strategies.held_parameters import check_learns
from shoal.strategies.local import local_engine
from shoal.strategies.partition.assignment import crew_of, split_points
from shoal.strategies.partition.stages import Outer, Stage, opened_by, refuse_tied, trace
from shoal.strategies.tensor_parallel.sharded_modules import division_of
from shoal.util.errors import LayoutError, StepError


@dataclass(frozen=True, kw_only=True)
class RPCPipeline:
    """Stages of the model on the ranks of the axis `pipeline`, which call each other by torch RPC.

    `stages` names them, in their order, each with the names of its modules, or of such that hold
    them; what has no parameters may be left out, and goes with the module before. `workers` gives the
    ranks of each stage, from 0 within the axis, by default one for each in their order. Several share
    the stage: micro-batches are dealt among them, and their gradients are summed. As many micro-batches
    as `Loader(micro_batches=…)` says are taken through the stages at the same time.

    Shapes need not be the same from one micro-batch to the next. Parameters, moments and gradients
    stay on the ranks of their stage. Any rank may call the model, without gradients. With `replicate`
    in the layout there are several such lines of stages, whose gradients are summed.

        shoal.RPCPipeline(
            stages={"encoder": ("embedding", "blocks.0"), "decoder": ("blocks.1", "head")},
            workers={"encoder": (0,), "decoder": (1, 2)},
        )
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
                found="stages have names, and each the names of its modules",
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
            found = "workers are ranks of the axis pipeline, from 0"
        elif len({*ranks}) < len(ranks):
            found = "a rank runs one stage"
        else:
            return
        one_each = {name: (rank,) for rank, name in enumerate(self.stages)}
        raise StepError(
            given=f"shoal.RPCPipeline(workers={self.workers!r})",
            found=found,
            fix=f"workers={one_each}, or several ranks for a stage",
        )

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Keep this rank's stage of the model; in a world of one, check its stages and keep all."""
        given = f"shoal.RPCPipeline(…) around {type(model).__name__}"
        if world.size > 1 and world.layout.degree("pipeline") == 1:
            raise LayoutError(
                given=f"{given} with layout='{world.layout}'",
                found="no axis for its stages",
                fix="shoal.init(layout='pipeline=-1'), or 'replicate=2,pipeline=2' for two of them",
            )
        _refuse_others(model, world, given)
        check_learns(model)
        if world.size == 1:
            self._cut(model, given)
            return local_engine(model.to(world.device), world)
        crew = crew_of([*self.stages], self.workers, world.layout.group(world.rank, "pipeline"), given)
        outer, stages = self._cut(model, given)
        from shoal.strategies.rpc_pipeline.runner import RPCPipelineRunner  # which brings torch's RPC

        return SynchronousEngine(RPCPipelineRunner(model, world, outer, stages, crew))

    def _cut(self, model: nn.Module, given: str) -> tuple[Outer, list[Stage]]:
        """The model's forward as a graph, and its stages."""
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


def _refuse_others(model: nn.Module, world: World, given: str) -> None:
    """Refuse what was done to the model before, and does not go with calls between ranks."""
    if world.layout.degree("context") > 1:
        raise LayoutError(
            given=f"{given} with layout='{world.layout}'",
            found="slices of sequences are cut before the first block and joined after the last, "
            "which are on different ranks",
            fix="layout='pipeline=2', or shoal.ContextParallel() with shoal.FSDP()",
        )
    if division_of(model) is not None:
        raise StepError(
            given=f"[shoal.TensorParallel(…), {given}]",
            found="stages that are divided themselves would each have to be called on several ranks",
            fix="[shoal.TensorParallel(plan=…), shoal.Pipeline(split_points=…)]",
        )
    if runs_again(model):
        raise StepError(
            given=f"[shoal.ActivationCheckpointing(…), {given}]",
            found="what runs again in backward does so in threads of distributed autograd, while other "
            "micro-batches run forward and draw from the same random generator",
            fix="[shoal.ActivationCheckpointing(…), shoal.Pipeline(split_points=…)]",
        )


def _check(model: nn.Module, stages: Sequence[Stage], names: Sequence[str], given: str) -> None:
    """Refuse parameters of two stages or of none, and stages that have none."""
    fix = "the modules that share it in one stage, or copies of their own"
    refuse_tied(stages, range(len(stages)), given, fix)
    held = frozenset[str]().union(*(stage.names for stage in stages))
    named = model.named_parameters(remove_duplicate=False)
    loose = [name for name, p in named if p.requires_grad and name not in held]
    if loose:
        raise StepError(
            given=given,
            found=f"parameters that its forward does not use: {', '.join(loose[:3])}",
            fix="remove them, or freeze them with requires_grad_(False) beforehand",
        )
    for name, stage in zip(names, stages, strict=True):
        if not any(True for _ in stage.body.parameters()):
            raise StepError(
                given=given,
                found=f"stage {name!r} has no parameters, so there is nothing to give an optimizer on "
                "its rank",
                fix="its modules in a stage beside it; frozen parameters are enough",
            )

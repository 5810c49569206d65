"""One part of the model per rank, micro-batches flowing through (Huang et al. 2019, GPipe)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, ClassVar

from torch import nn

from shoal._torch.pipelining import splits_backward
from shoal.distributed.world import World
from shoal.strategies.activation_checkpoint import runs_again
from shoal.strategies.contracts import Engine
from shoal.strategies.engine import SynchronousEngine
from shoal.strategies.fsdp.options import FSDP
from shoal.strategies.local import local_engine
from shoal.strategies.module_patterns import find_units
from shoal.strategies.partition.stages import (
    Outer,
    Stage,
    balanced,
    chains,
    opened_by,
    refuse_tied,
    seconds,
    trace,
)
from shoal.strategies.pipeline.schedules import SCHEDULES, Timetable, timetable
from shoal.util.errors import LayoutError, StepError


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Consecutive stages of the model on the ranks of the axis `pipeline`.

    `split_points` names the modules before which the model is cut; the module that holds them may be
    any whose forward makes no decision by what tensors hold. Without it, `example_args`, the
    positional arguments of one micro-batch, is run once to measure what each part costs, and the
    model is cut so that the slowest stage is as fast as can be. `schedule` is the order of the work:
    "gpipe", "1f1b", and, with several stages on each rank, "interleaved", "looped", "zero-bubble",
    "zbv", "dualpipev" (Huang 2019; Narayanan 2019, 2021; Lamy-Poirier 2022; Qi 2023, 2024; DeepSeek
    2025). `stages_per_rank` says how many where the schedule leaves it open and `split_points` is not
    given.

    With `replicate` in the layout gradients are summed over replicas after the last micro-batch; with
    `shard`, `stage_strategy` says how the parameters of each stage are divided (see FSDP).

        shoal.Pipeline(split_points=("blocks.4", "blocks.8", "blocks.12"), schedule="1f1b")
    """

    axes: ClassVar[tuple[str, ...]] = ("pipeline", "replicate", "shard")

    split_points: Sequence[str] | None = None
    example_args: tuple[Any, ...] | None = None
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    stage_strategy: FSDP = field(
        default_factory=lambda: FSDP(reshard_after_forward=False, accumulate="whole")
    )

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise StepError(
                given=f"shoal.Pipeline(schedule={self.schedule!r})",
                found=f"the schedules are {', '.join(SCHEDULES)}",
                fix="schedule='1f1b', or 'interleaved' with two stages per rank",
            )
        if isinstance(self.split_points, str) or (self.split_points is None) == (
            self.example_args is None
        ):
            raise StepError(
                given=f"shoal.Pipeline(split_points={self.split_points!r}, example_args="
                f"{'…' if self.example_args is not None else None})",
                found="a model is cut before modules that are named, or by what its parts cost on an "
                "example",
                fix="split_points=('blocks.4',), or example_args=(inputs,) of one micro-batch",
            )
        if not isinstance(self.stage_strategy, FSDP):
            raise StepError(
                given=f"shoal.Pipeline(stage_strategy={self.stage_strategy!r})",
                found="torch's DDP sums gradients of a pipeline wrongly in most schedules; replicas "
                "need no word, as their gradients are summed after the last micro-batch",
                fix="layout='replicate=2,pipeline=2' with shoal.Pipeline(…) alone, or stage_strategy="
                "shoal.FSDP(reshard_after_forward=False, accumulate='whole') with "
                "layout='shard=2,pipeline=2'",
            )
        if self.stage_strategy.reshard_after_forward or self.stage_strategy.accumulate != "whole":
            raise StepError(
                given=f"shoal.Pipeline(stage_strategy={self.stage_strategy!r})",
                found="freed between the micro-batches of a pipeline, parameters get no gradients or "
                "wrong ones in some schedules, and sums after each cost more than they save",
                fix="shoal.FSDP(reshard_after_forward=False, accumulate='whole')",
            )

    @property
    def defers(self) -> bool:
        """With split points; to be measured, a model has to be there."""
        return self.example_args is None

    def timetable(self, ranks: int, micro_batches: int) -> Timetable:
        """Who does what when; `print` it, or `draw` it into an SVG file."""
        return timetable(self.schedule, ranks, micro_batches, self.stages_per_rank)

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Keep this rank's stages of the model; in a world of one there is nothing to cut."""
        if world.size == 1:
            return local_engine(model.to(world.device), world)
        ranks = world.layout.degree("pipeline")
        if ranks == 1:
            raise LayoutError(
                given=f"shoal.Pipeline() with layout='{world.layout}'",
                found="no axis for its stages",
                fix="shoal.init(layout='pipeline=2'), or 'replicate=2,pipeline=2' for two of them",
            )
        if world.layout.degree("context") > 1:
            raise LayoutError(
                given=f"shoal.Pipeline() with layout='{world.layout}'",
                found="slices of sequences are cut before the first block and joined after the last, "
                "which are on different ranks",
                fix="layout='pipeline=2,tensor=2' with [shoal.TensorParallel(plan=…), "
                "shoal.Pipeline(…)], or "
                "shoal.ContextParallel() with shoal.FSDP()",
            )
        outer = trace(model, opened_by(self.split_points) if self.split_points else _wide(model))
        points = self.split_points or self._balanced(outer, self.example_args or (), ranks, world)
        stages = outer.cut(points, f"shoal.Pipeline(split_points={tuple(points)!r})")
        owners = self._owners(len(stages), ranks)
        splits = SCHEDULES[self.schedule].splits
        if splits and not splits_backward():
            raise StepError(
                given=f"shoal.Pipeline(schedule={self.schedule!r})",
                found=f"torch {version('torch')} cannot run backward in two parts",
                fix="schedule='interleaved', or install torch 2.13",
            )
        _check(model, stages, owners, splits=splits)
        from shoal.strategies.pipeline.runner import PipelineRunner  # which brings torch's pipelining

        runner = PipelineRunner(
            model,
            world,
            outer,
            stages,
            owners,
            schedule=self.schedule,
            stage_strategy=self.stage_strategy,
        )
        return SynchronousEngine(runner)

    def _balanced(self, outer: Outer, example: tuple[Any, ...], ranks: int, world: World) -> list[str]:
        per_rank = self.stages_per_rank or SCHEDULES[self.schedule].stages
        # On all ranks, since layers may be divided over some of them; rank 0's times count.
        timed = world.broadcast(seconds(outer, example, world.device))
        names = [str(n.target) if n.op == "call_module" else None for n in outer.graph.nodes]
        try:
            return balanced(list(zip(names, timed, strict=True)), ranks * per_rank)
        except ValueError as error:
            raise StepError(
                given=f"shoal.Pipeline(schedule={self.schedule!r}) on {ranks} ranks",
                found=f"{error}: {', '.join(outer.calls())}",
                fix="a model of more parts, or a lower pipeline degree",
            ) from None

    def _owners(self, stages: int, ranks: int) -> list[int]:
        """The rank within the pipeline that runs each stage."""
        kind = SCHEDULES[self.schedule]
        fits = stages % ranks == 0 and kind.allows(stages // ranks)
        if not fits or self.stages_per_rank not in (None, stages // ranks):
            per_rank = self.stages_per_rank or kind.stages
            wanted = f"{per_rank}" if kind.fixed or self.stages_per_rank else "at least 1"
            raise LayoutError(
                given=f"shoal.Pipeline(schedule={self.schedule!r}): {stages} stage(s) on {ranks} ranks",
                found=f"this schedule has {wanted} stage(s) on each rank",
                fix=f"{ranks * per_rank - 1} split points for {ranks * per_rank} stages",
            )
        if kind.folded:
            return [*range(ranks), *reversed(range(ranks))]
        return [stage % ranks for stage in range(stages)]


def _wide(model: nn.Module) -> set[str]:
    """What may be opened where nobody said where to cut: what holds the repeated blocks."""
    units = {id(unit) for unit in find_units(model, None)}
    names = [name for name, part in model.named_modules() if id(part) in units]
    return chains(model) | opened_by(names)


def _check(model: nn.Module, stages: Sequence[Stage], owners: Sequence[int], *, splits: bool) -> None:
    """Refuse parameters of two ranks, of none, and ranks without any."""
    given = f"shoal.Pipeline(…) around {type(model).__name__}"
    refuse_tied(
        stages,
        owners,
        given,
        fix="split_points points that leave them in one stage, a schedule that has the first and the "
        "last stage on one rank ('zbv', 'dualpipev'), or copies of their own",
    )
    if splits and runs_again(model):
        raise StepError(
            given=f"[shoal.ActivationCheckpointing(…), {given}]",
            found="this schedule runs backward in two parts, of which each would run the blocks again",
            fix="schedule='1f1b' or 'interleaved' with shoal.ActivationCheckpointing(), or no "
            "shoal.ActivationCheckpointing()",
        )
    twice = [name for stage in stages for name in stage.learning_twice()] if splits else []
    if twice:
        raise StepError(
            given=given,
            found=f"{twice[0]} is called twice in one stage, and this schedule runs backward in two "
            "parts, which torch can't do for weights that are used twice",
            fix="schedule='1f1b' or 'interleaved'",
        )
    held = frozenset[str]().union(*(stage.names for stage in stages))
    loose = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and name not in held
    ]
    if loose:
        raise StepError(
            given=given,
            found=f"parameters that its forward does not use: {', '.join(loose[:3])}",
            fix="remove them, or freeze them with requires_grad_(False) beforehand",
        )
    for rank in range(max(owners) + 1):
        mine = [stage for stage, owner in zip(stages, owners, strict=True) if owner == rank]
        if not any(p.requires_grad for stage in mine for p in stage.body.parameters()):
            parts = ", ".join(sorted(name for stage in mine for name in stage.modules))
            raise StepError(
                given=given,
                found=f"the stage of {parts} has no trainable parameters",
                fix="split_points points with something to learn on each rank",
            )

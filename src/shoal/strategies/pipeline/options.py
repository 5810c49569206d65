"""Options of pipeline parallelism: each rank runs stages of the model (GPipe: Huang et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, ClassVar

from torch import nn

from shoal._torch.pipelining import splits_backward
from shoal.distributed.pipeline_schedules import SCHEDULES, stage_owners
from shoal.distributed.world import World
from shoal.strategies.activation_checkpoint import runs_again
from shoal.strategies.contracts import Engine
from shoal.strategies.fsdp.options import FSDP
from shoal.strategies.local import local_engine
from shoal.strategies.module_patterns import find_units
from shoal.strategies.partition.refused import refuse_layout, refuse_unused
from shoal.strategies.partition.stages import (
    OuterGraph,
    Stage,
    balanced,
    chains,
    opened_by,
    refuse_tied,
    seconds,
    trace,
)
from shoal.strategies.pipeline.schedules import Timetable, timetable
from shoal.util.arguments import check_choice
from shoal.util.errors import LayoutError, StepError


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Pipeline parallelism: consecutive stages of the model on the ranks of the `pipeline` axis.

    With the `replicate` axis, gradients are summed over replicas after the last micro-batch. With the
    `shard` axis, the parameters of each stage are sharded too. The number of micro-batches comes from
    the `Loader`. Exactly one of `split_points` and `example_args` is required.

    Args:
        split_points: Names of modules, each the first of a new stage. The forward of the module that
            contains them must not branch on values of tensors. Default: None.
        example_args: Positional arguments of one micro-batch. Shoal runs them once to measure the cost
            of each part, and splits the model so that the slowest stage is as fast as possible.
            Default: None.
        schedule: Order of forward and backward passes: "gpipe", "1f1b" or, with several stages per
            rank, "interleaved", "looped", "zero-bubble", "zbv", "dualpipev" (Huang 2019; Narayanan
            2019, 2021; Lamy-Poirier 2022; Qi 2023, 2024; DeepSeek 2025). Default: "1f1b".
        stages_per_rank: Number of stages per rank, for schedules that allow several. None means the
            number that `split_points` defines or, with `example_args`, 1 for "gpipe" and "1f1b" and 2
            for the others. Default: None.
        stage_strategy: How the `shard` axis shards the parameters of each stage.
            Default: `FSDP(reshard_after_forward=False, accumulate="whole")`.

    Raises:
        StepError: If an option has an invalid value, or the model cannot be split at these points.
        LayoutError: If the layout has no `pipeline` axis, if it has a `context` axis, or if the degree
            of `pipeline` does not fit the number of stages.

    Examples:
        >>> strategy = shoal.Pipeline(split_points=("blocks.4",), schedule="1f1b")
        >>> print(strategy.timetable(ranks=2, micro_batches=3))
        rank 0  0F0 0F1 ·   ·   0B0 0B0 0F2 0B1 0B1 ·   0B2 0B2
        rank 1  ·   1F0 1B0 1B0 1F1 1B1 1B1 1F2 1B2 1B2 ·   ·
        waiting 25%
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
        check_choice(StepError, "shoal.Pipeline", "schedule", self.schedule, SCHEDULES)
        if isinstance(self.split_points, str) or (self.split_points is None) == (
            self.example_args is None
        ):
            raise StepError(
                given=f"shoal.Pipeline(split_points={self.split_points!r}, example_args="
                f"{'…' if self.example_args is not None else None})",
                found="give exactly one of them: split_points lists the modules that begin a stage, "
                "and example_args lets Shoal measure the parts of the model",
                fix="pass split_points=('blocks.4',), or example_args=(inputs,) of one micro-batch",
            )
        if not isinstance(self.stage_strategy, FSDP):
            raise StepError(
                given=f"shoal.Pipeline(stage_strategy={self.stage_strategy!r})",
                found="torch's DDP sums gradients of a pipeline wrongly in most schedules; replicas "
                "need no strategy, because Shoal sums their gradients after the last micro-batch",
                fix="use layout='replicate=2,pipeline=2' with shoal.Pipeline(…) alone, or "
                "stage_strategy=shoal.FSDP(reshard_after_forward=False, accumulate='whole') with "
                "layout='shard=2,pipeline=2'",
            )
        if self.stage_strategy.reshard_after_forward or self.stage_strategy.accumulate != "whole":
            raise StepError(
                given=f"shoal.Pipeline(stage_strategy={self.stage_strategy!r})",
                found="parameters that are freed between the micro-batches of a pipeline get no "
                "gradients or wrong ones in some schedules, and a sum after each micro-batch costs "
                "more than it saves",
                fix="shoal.FSDP(reshard_after_forward=False, accumulate='whole')",
            )

    @property
    def defers(self) -> bool:
        """Whether the model may get its values later: yes, unless `example_args` run it first."""
        return self.example_args is None

    def timetable(self, ranks: int, micro_batches: int) -> Timetable:
        """Return the timetable of the schedule: what each rank computes in each unit of time.

        Args:
            ranks: Degree of the `pipeline` axis, at least 2.
            micro_batches: Number of micro-batches per local batch, at least 1.

        Returns:
            A timetable to `print`, or to draw into an SVG file with `draw(path)`.

        Raises:
            StepError: If the schedule does not support these numbers.
        """
        return timetable(self.schedule, ranks, micro_batches, self.stages_per_rank)

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Keep this rank's stages of the model. In a world of size 1, only move it to the device."""
        if world.size == 1:
            return local_engine(model.to(world.device), world)
        ranks = world.layout.degree("pipeline")
        refuse_layout(
            world,
            "shoal.Pipeline()",
            degree=2,
            fix="use layout='pipeline=2,tensor=2' with [shoal.TensorParallel(plan=…), "
            "shoal.Pipeline(…)], or shoal.ContextParallel() with shoal.FSDP()",
        )
        outer = trace(model, opened_by(self.split_points) if self.split_points else wide(model))
        points = self.split_points or self._balanced(outer, self.example_args or (), ranks, world)
        stages = outer.cut(points, f"shoal.Pipeline(split_points={tuple(points)!r})")
        owners = self._owners(len(stages), ranks)
        splits = SCHEDULES[self.schedule].splits
        if splits and not splits_backward():
            raise StepError(
                given=f"shoal.Pipeline(schedule={self.schedule!r})",
                found=f"torch {version('torch')} cannot run backward in two parts",
                fix="use schedule='interleaved', or install torch 2.13",
            )
        _check(model, stages, owners, splits=splits)
        from shoal.strategies.pipeline.engine import PipelineEngine  # imports torch's pipelining

        return PipelineEngine(
            model,
            world,
            outer,
            stages,
            owners,
            schedule=self.schedule,
            stage_strategy=self.stage_strategy,
        )

    def _balanced(
        self, outer: OuterGraph, example: tuple[Any, ...], ranks: int, world: World
    ) -> list[str]:
        per_rank = self.stages_per_rank or SCHEDULES[self.schedule].stages
        # On all ranks, since layers may be sharded over some of them; rank 0's times count.
        timed = world.broadcast(seconds(outer, example, world.device))
        names = [str(n.target) if n.op == "call_module" else None for n in outer.graph.nodes]
        try:
            return balanced(list(zip(names, timed, strict=True)), ranks * per_rank)
        except ValueError as error:
            raise StepError(
                given=f"shoal.Pipeline(schedule={self.schedule!r}) on {ranks} ranks",
                found=f"{error}: {', '.join(outer.calls())}",
                fix="use a model with more parts, or a smaller degree of the `pipeline` axis",
            ) from None

    def _owners(self, stages: int, ranks: int) -> list[int]:
        """Return the rank within the pipeline that runs each stage."""
        kind = SCHEDULES[self.schedule]
        fits = stages % ranks == 0 and kind.allows(stages // ranks)
        if not fits or self.stages_per_rank not in (None, stages // ranks):
            per_rank = self.stages_per_rank or kind.stages
            wanted = f"{per_rank}" if kind.fixed or self.stages_per_rank else "at least 1"
            raise LayoutError(
                given=f"shoal.Pipeline(schedule={self.schedule!r}): {stages} stage(s) on {ranks} ranks",
                found=f"this schedule needs {wanted} stage(s) on each rank",
                fix=f"pass {ranks * per_rank - 1} split points for {ranks * per_rank} stages",
            )
        return stage_owners(stages, ranks, folded=kind.folded)


def wide(model: nn.Module) -> set[str]:
    """Return the modules to trace into if there are no split points: those with repeated blocks."""
    units = {id(unit) for unit in find_units(model, None)}
    names = [name for name, part in model.named_modules() if id(part) in units]
    return chains(model) | opened_by(names)


def _check(model: nn.Module, stages: Sequence[Stage], owners: Sequence[int], *, splits: bool) -> None:
    """Raise StepError for parameters used on two ranks or on none, and for ranks without any."""
    given = f"shoal.Pipeline(…) around {type(model).__name__}"
    refuse_tied(
        stages,
        owners,
        given,
        fix="choose split points that leave them in one stage, use a schedule that has the first and "
        "the last stage on one rank ('zbv', 'dualpipev'), or separate the parameters",
    )
    if splits and runs_again(model):
        raise StepError(
            given=f"[shoal.ActivationCheckpointing(…), {given}]",
            found="this schedule runs backward in two parts, each of which would recompute the blocks",
            fix="use schedule='1f1b' or 'interleaved', or leave shoal.ActivationCheckpointing() out",
        )
    twice = [name for stage in stages for name in stage.learning_twice()] if splits else []
    if twice:
        raise StepError(
            given=given,
            found=f"{twice[0]} is called twice in one stage, and this schedule runs backward in two "
            "parts, which torch cannot do for weights that are used twice",
            fix="use schedule='1f1b' or 'interleaved'",
        )
    refuse_unused(model, stages, given)
    for rank in range(max(owners) + 1):
        mine = [stage for stage, owner in zip(stages, owners, strict=True) if owner == rank]
        if not any(p.requires_grad for stage in mine for p in stage.body.parameters()):
            parts = ", ".join(sorted(name for stage in mine for name in stage.modules))
            raise StepError(
                given=given,
                found=f"the stage of {parts} has no trainable parameters",
                fix="choose split points that leave trainable parameters on each rank",
            )

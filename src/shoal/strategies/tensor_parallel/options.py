"""Layers divided over neighbouring ranks: tensor parallelism (Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.local import local_engine
from shoal.strategies.tensor_parallel.plan import (
    KINDS,
    carried_plan,
    check_divisible,
    derived_plan,
    planned,
)
from shoal.util.errors import StepError


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Linear layers and embeddings divided over the axis `tensor` of the layout.

    `plan` says which, by patterns of module names, and how: "column" divides a Linear's outputs and
    leaves them divided, "row" divides its inputs and sums its outputs, "head" divides outputs and
    gathers them, "vocabulary" divides the rows of an Embedding. A column layer is followed by a row
    layer; between them is what acts on each feature, or head, alone. "logits" is a head whose outputs
    stay divided in a `Step`, for a loss by `torch.nn.functional.cross_entropy`.

    With "sequence", for norms and dropout, activations outside of the divided layers are divided along
    the sequence, dimension 1 (Korthikanti et al. 2022): row layers scatter the sums, column layers
    gather their inputs.

    Without a plan, that of a Hugging Face model is taken, or one is derived and said: feed-forward
    pairs, an embedding and its head. At the first batch the divided model is compared with the whole
    one; a plan that changes the numbers is refused.

        shoal.TensorParallel(plan={"blocks.*.wide": "column", "blocks.*.narrow": "row"})
    """

    axes: ClassVar[tuple[str, ...]] = ("tensor", "replicate")
    defers: ClassVar[bool] = False

    plan: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, way in self.plan.items():
            if way not in KINDS:
                raise StepError(
                    given=f"shoal.TensorParallel(plan={{{pattern!r}: {way!r}}})",
                    found=f"a layer is divided in one of these ways: {', '.join(KINDS)}",
                    fix='shoal.TensorParallel(plan={"blocks.*.wide": "column", "blocks.*.narrow": '
                    '"row"})',
                )

    def spread(self, model: nn.Module, world: World) -> None:
        """Divide the layers of the plan in place."""
        model.to(world.device)
        degree = world.layout.degree("tensor")
        plan = self.plan or carried_plan(model)
        if not plan:
            plan = derived_plan(model, degree)
            world.print(f"shoal: derived shoal.TensorParallel(plan={plan!r})")
        layers = planned(model, plan)
        check_divisible(model, layers, degree)
        if degree > 1:
            from shoal.strategies.tensor_parallel.sharded_modules import divide

            divide(model, plan, layers, world)

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Divide the layers, and return an engine that sums gradients over replicas."""
        self.spread(model, world)
        if world.size == 1:
            return local_engine(model, world)
        from shoal.strategies.tensor_parallel.runner import tensor_parallel_engine

        return tensor_parallel_engine(model, world)

"""Options of tensor parallelism: layers are sharded over adjacent ranks (Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.deferred_init import give_memory, move_allocated
from shoal.strategies.local import local_engine
from shoal.strategies.tensor_parallel.plan import (
    KINDS,
    carried_plan,
    check_divisible,
    check_sequences,
    derived_plan,
    planned,
)
from shoal.util.errors import StepError


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Tensor parallelism: linear layers and embeddings are sharded over the `tensor` axis.

    A "column" layer is followed by a "row" layer, and the operations between them act on each feature
    or attention head separately (Shoeybi et al. 2019). On the first batch, Shoal compares the sharded
    model with the original one and raises `StepError` if the plan changes the results.

    Args:
        plan: Mapping from patterns of module names to the kind of sharding: "column" shards the outputs
            of a Linear and leaves them sharded, "row" shards its inputs and sums its outputs, "head"
            shards its outputs and gathers them, "vocabulary" shards the rows of an Embedding. "logits"
            is a head whose outputs stay sharded in a `Step`, for a loss with
            `torch.nn.functional.cross_entropy`. "sequence", for norms and dropout, splits activations
            outside the sharded layers along the sequence, dimension 1 (sequence parallelism,
            Korthikanti et al. 2022): row layers scatter their sums, and column layers gather their
            inputs. If the plan is empty, Shoal uses the plan that a Hugging Face model defines, or
            derives and prints a plan for feed-forward pairs, an embedding and its head. Default: {}.

    Raises:
        StepError: If the plan contains another kind, or does not fit the model.

    Examples:
        >>> strategy = shoal.TensorParallel(
        ...     plan={"blocks.*.wide": "column", "blocks.*.narrow": "row"}
        ... )
    """

    axes: ClassVar[tuple[str, ...]] = ("tensor", "replicate")
    defers: ClassVar[bool] = False

    plan: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, way in self.plan.items():
            if way not in KINDS:
                raise StepError(
                    given=f"shoal.TensorParallel(plan={{{pattern!r}: {way!r}}})",
                    found=f"the kinds of sharding are {', '.join(KINDS)}",
                    fix='shoal.TensorParallel(plan={"blocks.*.wide": "column", "blocks.*.narrow": '
                    '"row"})',
                )

    def spread(self, model: nn.Module, world: World) -> None:
        """Shard the layers of the plan in place."""
        move_allocated(model, world.device)
        degree = world.layout.degree("tensor")
        plan = self.plan or carried_plan(model)
        if not plan:
            plan = derived_plan(model, degree)
            world.print(f"shoal: derived shoal.TensorParallel(plan={plan!r})")
        layers = planned(model, plan)
        check_divisible(model, layers, degree)
        check_sequences(layers, world.layout)
        if degree > 1:
            from shoal.strategies.sharded_layers.sharded_modules import divide

            divide(model, plan, layers, world)

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Shard the layers, and return an engine that sums gradients over replicas."""
        self.spread(model, world)
        return engine_of_shards(model, world)


def engine_of_shards(model: nn.Module, world: World) -> Engine:
    """Give a model memory whose layers or experts are sharded, and return its engine."""
    give_memory(model, world.device)
    if world.size == 1:
        return local_engine(model, world)
    from shoal.strategies.tensor_parallel.engine import tensor_parallel_engine

    return tensor_parallel_engine(model, world)

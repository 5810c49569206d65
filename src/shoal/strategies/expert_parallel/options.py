"""Options of expert parallelism: each rank has some of the experts (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.deferred_init import move_allocated
from shoal.strategies.tensor_parallel.options import engine_of_shards


@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """Expert parallelism: the experts of a mixture are distributed over the `expert` axis.

    Each rank of the axis has its own samples, and some of the experts of each layer. A layer sends
    tokens to the ranks of the experts that its router has chosen, and gets their outputs back (Shazeer
    et al. 2017; Lepikhin et al. 2021, GShard). All other parameters are replicated, or sharded by the
    strategy after this one. The results are those of the same model on one process.

    A module of experts has parameters whose first dimension is the number of experts, or a ModuleList
    of experts with the same parameters, and a `forward(hidden, index, weights)`: activations of shape
    (tokens, features), and the chosen experts and their weights, both of shape (tokens, choices). These
    are the experts of Mixtral, Qwen-MoE, OLMoE, DeepSeek and gpt-oss in transformers 5. The router runs
    on each rank.

    Put this strategy before the one that sums gradients. If you pass it alone, FSDP follows it if the
    layout has a `shard` axis.

    Args:
        modules: Patterns of module names, such as "layers.*.mlp.experts". None means all modules of
            experts; `()` none, for a second model without experts. Default: None.

    Raises:
        StepError: If the model has no such modules, or the degree of the axis does not divide their
            number of experts.

    Examples:
        >>> strategy = shoal.ExpertParallel(modules=("layers.*.mlp.experts",))
    """

    axes: ClassVar[tuple[str, ...]] = ("expert", "replicate")
    defers: ClassVar[bool] = False

    modules: Sequence[str] | None = None

    def spread(self, model: nn.Module, world: World) -> None:
        """Keep this rank's experts of each module, in place. Names stay the same."""
        from shoal.strategies.expert_parallel.experts import divide, find_experts

        experts = find_experts(model, self.modules, world.layout.degree("expert"))
        move_allocated(model, world.device)
        for name, module in experts.items():
            divide(name, module, model.get_submodule(name.rpartition(".")[0]), world)

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Divide the experts, and return an engine that sums gradients over ranks."""
        self.spread(model, world)
        return engine_of_shards(model, world)

"""The engine of FSDP: torch's FSDP2, told what to sum and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shoal._torch.autograd import in_backward
from shoal._torch.fsdp import drop_accumulated
from shoal._torch.mesh import concatenate, flatten
from shoal.data.batch import Batch
from shoal.distributed.world import World
from shoal.strategies.comm_timing import mark_groups
from shoal.strategies.compiled import Compiler
from shoal.strategies.contracts import Engine, Totals
from shoal.strategies.task import Task
from shoal.strategies.tensor_parallel.engine import PlannedEngine
from shoal.util.errors import StepError

if TYPE_CHECKING:
    from shoal.strategies.fsdp.options import FSDP

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDPEngine(PlannedEngine):
    """Says when torch's FSDP2 sums gradients, and forgets those of a batch that failed."""

    def __init__(
        self, module: nn.Module, world: World, options: FSDP, units: Sequence[nn.Module]
    ) -> None:
        divide(module, units, options, world)
        if any(p.is_meta for p in module.parameters()):
            module.to_empty(device="cpu" if options.cpu_offload else world.device)
        super().__init__(module, world)
        self._whole = options.accumulate == "whole"
        self._sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._reshard = options.reshard_after_forward
        for part in self._sharded[:1] if options.reshard_after_forward else self._sharded:
            part.register_forward_pre_hook(_gather_anew, prepend=True)
        self._unsummed = False

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """As in one process; what lies outside of units stays gathered until its backward.

        Only here, where that follows at once and nothing changes the shares in between.
        """
        root = self._sharded[0]
        root.set_reshard_after_forward(False, recurse=False)
        try:
            return super().gradients(task, batch, autocast=autocast, scale=scale)
        finally:
            root.set_reshard_after_forward(self._reshard, recurse=False)
            root.reshard()

    def compile(self, how: str) -> None:
        """Compile each unit; its parameters are gathered outside of what is compiled."""
        if how == "script":
            raise StepError(
                given="compile='script' with shoal.FSDP()",
                found="TorchScript can't call what gathers the parameters",
                fix="compile='inductor'",
            )
        self._check_compiled(how)
        for part in self._sharded[1:] or self._sharded:
            part.compile()

    def compile_with(self, compiler: Compiler) -> None:
        """Raise StepError: units are compiled one by one, see `compile`."""
        Engine.compile_with(self, compiler)

    def discard(self) -> None:
        """Drop the gradients, also those of a batch that was left in the middle."""
        super().discard()
        if self._unsummed:
            for part in self._sharded:
                drop_accumulated(part)
            self._unsummed = False

    def _differentiate(self, loss: Tensor, seed: Tensor, *, last: bool) -> None:
        root = self._sharded[0]
        summed = last or not self._whole
        root.set_requires_gradient_sync(summed)
        root.set_is_last_backward(last)
        self._unsummed = not summed
        with self.others_aside():
            torch.autograd.backward([loss], [seed])


def divide(module: nn.Module, units: Sequence[nn.Module], options: FSDP, world: World) -> None:
    """Let FSDP2 divide `module` by `units`, and sum gradients over ranks."""
    given = _torchs(options, world)
    for part in (*units, module):
        sharded: Any = fully_shard(part, reshard_after_forward=options.reshard_after_forward, **given)
        # Sums, exactly: what they are divided by is known only afterwards.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.register_forward_hook(_free_without_backward)
        mark_groups(sharded, world)


def _free_without_backward(part: nn.Module, *_: object) -> None:
    """Free what was gathered for a forward that no backward follows.

    torch would keep it where it is not freed after each forward, and the next one would compute with
    it, though the shares may have changed meanwhile.
    """
    if not torch.is_grad_enabled() and isinstance(part, FSDPModule):
        part.reshard()


def _gather_anew(part: nn.Module, *_: object) -> None:
    """Free what is left of a forward whose backward has not come, unless that runs it again.

    torch would compute with it, though the shares may have changed meanwhile.
    """
    if isinstance(part, FSDPModule) and not in_backward():
        part.reshard()


def _torchs(options: FSDP, world: World) -> dict[str, Any]:
    """What `fully_shard` calls the options."""
    gather = None if options.param_dtype is None else DTYPES[options.param_dtype]
    return {
        "mesh": _mesh(world),
        "mp_policy": MixedPrecisionPolicy(gather, DTYPES[options.reduce_dtype] if gather else None),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
    }


def _mesh(world: World) -> DeviceMesh:
    """Over which parameters are divided, with slices of sequences like other samples; and copied."""
    divided = world.mesh["shard"]
    if world.layout.degree("context") > 1:
        divided = flatten(world.mesh["shard", "context"], "shard_context")
    if world.layout.degree("replicate") == 1:
        return divided
    return concatenate([world.mesh["replicate"], divided])

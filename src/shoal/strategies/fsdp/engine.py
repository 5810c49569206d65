"""The engine of FSDP: torch's FSDP2, with a reducer that decides when gradients are summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
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
from shoal._torch.fsdp import (
    drop_accumulated,
    find_root,
    parameter_dtypes,
    replaced_parameters,
    sum_after,
    use_policy,
)
from shoal._torch.mesh import concatenate
from shoal.data.batch import Batch, Count
from shoal.data.micro import MicroBatch
from shoal.distributed.tensors import broadcast
from shoal.distributed.world import World
from shoal.strategies.comm_timing import mark_groups
from shoal.strategies.compiled import RepeatedBlocks, compile_parts
from shoal.strategies.contracts import Engine
from shoal.strategies.correction import AnyTotals
from shoal.strategies.dtensor import is_divided
from shoal.strategies.held_parameters import HeldParameters
from shoal.strategies.idle_experts import divided_experts
from shoal.strategies.mesh_reducer import (
    MeshReducer,
    data_group,
    first_along,
    norm_of_parts,
    other_gradients_kept,
    recomputation_explained,
    summing_group,
)
from shoal.strategies.reducer import backward_seed
from shoal.strategies.sharded_layers.divided_loss import whole_loss
from shoal.strategies.sharded_parameter import gather_outside
from shoal.strategies.task import Task
from shoal.strategies.tensor_parallel.engine import PlannedEngine, check_compilable
from shoal.util.errors import StepError


def fsdp_engine(
    module: nn.Module, world: World, precision: GatheredPrecision, *, whole: bool, reshard: bool
) -> FSDPEngine:
    """Return the engine of a model that `divide` has sharded, which returned its `precision`.

    `whole` sums gradients over ranks after the last micro-batch only. `reshard` frees parameters
    between the forward and the backward pass.
    """
    divided = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in divided:
        part.register_forward_pre_hook(_gather_in_inference_mode, prepend=True)
    for part in divided[:1] if reshard else divided:
        part.register_forward_pre_hook(_gather_again, prepend=True)
    divided[0].register_forward_pre_hook(partial(_check_parameters, divided), prepend=True)
    find_root(divided[0])
    for part in divided:
        gather_outside(part)
    reducer = FSDPReducer(HeldParameters(module, world), divided, whole)
    return FSDPEngine(reducer, precision, reshard)


class FSDPReducer(MeshReducer):
    """Reducer that decides when torch's FSDP2 sums gradients, and drops those of a failed batch.

    `divided` are the modules that FSDP2 has sharded, the root first.
    """

    def __init__(self, held: HeldParameters, divided: Sequence[Any], whole: bool) -> None:
        super().__init__(
            held,
            reports_loss=first_along(held.world),
            gradient_group=summing_group(held.world),
            buffer_group=data_group(held.world),
            norm=norm_of_parts,
            sharded=True,
        )
        self.divided = divided
        self._whole = whole
        self._unsummed = False

    def backward(
        self, loss: Tensor, count: Count, micro: MicroBatch, size: int, *, scale: float, last: bool
    ) -> None:
        """Run backward, in which FSDP2 sums the gradients; see the contract."""
        loss, count = whole_loss(self.held.module, loss, count)
        copies = self.held.world.layout.degree("context")  # of this loss; gradients of all are summed
        seed = backward_seed(loss, scale * micro.weight / size / copies)
        summed = last or not self._whole
        root = self.divided[0]
        root.set_requires_gradient_sync(summed)
        root.set_is_last_backward(last)
        self._unsummed = not summed
        sum_after(loss, root)
        with other_gradients_kept(self.held), recomputation_explained():
            try:
                torch.autograd.backward([loss], [seed])
            except RuntimeError as error:
                if "setStorage" not in str(error):
                    raise
                raise StepError(
                    given="a loss with gradients of the model's output (create_graph=True), and "
                    "shoal.FSDP()",
                    found="FSDP has freed parameters that the gradients of these gradients need",
                    fix="shoal.init(layout='replicate=-1'), in which each rank has the complete model",
                ) from error
        self.held.losses.append((loss.detach(), count, micro.weight))
        if last:
            self.reduce()

    def discard(self) -> None:
        """Clear the gradients, including those of an interrupted batch."""
        super().discard()
        if self._unsummed:
            for part in self.divided:
                drop_accumulated(part)
            self._unsummed = False


class FSDPEngine(PlannedEngine):
    """Engine of the module on this rank that keeps parameters outside the units gathered."""

    def __init__(self, reducer: FSDPReducer, precision: GatheredPrecision, reshard: bool) -> None:
        super().__init__(reducer, exact=partial(precision.under, None))
        self._precision = precision
        self._divided = reducer.divided
        self._reshard = reshard

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> AnyTotals:
        """Run as in one process. Parameters outside the units stay gathered until their backward.

        This holds only in this method, where backward follows at once and no other code changes the
        parameters in between.
        """
        root = self._divided[0]
        root.set_reshard_after_forward(False, recurse=False)
        try:
            with self._precision.under(autocast):
                return super().gradients(task, batch, autocast=autocast, scale=scale)
        finally:
            root.set_reshard_after_forward(self._reshard, recurse=False)
            root.reshard()

    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output of the module; see the contract."""
        with self._precision.under(autocast):
            return super().infer(task, micro, seed, autocast=autocast)

    def compile(self, how: str) -> None:
        """Compile each unit, or each block. Parameters are gathered outside the compiled code."""
        if how == "script":
            raise StepError(
                given="compile='script' with shoal.FSDP()",
                found="TorchScript cannot call the hooks that gather the parameters",
                fix="compile='inductor'",
            )
        check_compilable(self.division, how)
        if how == "blocks":
            RepeatedBlocks(self.module).compile()
        else:
            compile_parts(self._divided[1:] or self._divided)

    compile_with = Engine.compile_with
    """Raise StepError: torch cannot compile the module as one unit, whose parts are gathered."""


def divide(
    module: nn.Module,
    units: Sequence[nn.Module],
    world: World,
    *,
    reshard_after_forward: bool,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
) -> GatheredPrecision:
    """Shard `module` by `units` with FSDP2, which then sums gradients over ranks."""
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype if param_dtype else None)
    options: dict[str, Any] = {
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP2 requires it
        if not (parameter.is_meta or world.simulated or is_divided(parameter)):
            # Ranks may have drawn other numbers, as for a second model.
            sent = parameter.data.to(world.device)
            broadcast([sent], world.data_group)
            parameter.data.copy_(sent)
    # FSDP2 shards no scalars: each rank keeps them.
    options["ignored_params"] = {parameter for parameter in module.parameters() if not parameter.dim()}
    experts = divided_experts(module)
    inside = {part for each in experts for part in each.modules()}  # experts may be repeated blocks
    divided: list[Any] = [*experts, *(unit for unit in units if unit not in inside), module]
    for part in divided:
        options["mesh"] = _mesh(world, "expert") if part in experts else _mesh(world)
        sharded: Any = fully_shard(part, reshard_after_forward=reshard_after_forward, **options)
        # Sums, not means: the divisor is known only afterwards.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.register_forward_hook(_free_without_backward)
        type(sharded).__deepcopy__ = _refuse_copy
        mark_groups(sharded, world)
    return GatheredPrecision(divided, policy, reduce_dtype)


def _free_without_backward(part: nn.Module, *_: object) -> None:
    """Free the parameters that were gathered for a forward pass without a backward pass.

    Without `reshard_after_forward`, torch would keep them, and the next forward pass would compute with
    them, although the shards may have changed since.
    """
    if not torch.is_grad_enabled() and isinstance(part, FSDPModule):
        part.reshard()


def _gather_again(part: nn.Module, *_: object) -> None:
    """Free gathered parameters of a forward whose backward has not run, except in a recomputation.

    torch would compute with them, although the shards may have changed since.
    """
    if isinstance(part, FSDPModule) and not in_backward():
        part.reshard()


def _gather_in_inference_mode(part: nn.Module, *_: object) -> None:
    """Gather parameters into tensors that training can use later.

    torch keeps the tensors of the first forward pass, and can't change them outside inference mode if
    it has created them there.
    """
    if torch.is_inference_mode_enabled() and isinstance(part, FSDPModule):
        with torch.inference_mode(False), torch.no_grad():
            part.unshard()


def _check_parameters(divided: Sequence[Any], *_: object) -> None:
    """Raise StepError if a forward pass would ignore tensors that have replaced parameters."""
    if torch.compiler.is_compiling():
        return
    names = [name for part in divided for name in replaced_parameters(part)]
    if names:
        raise StepError(
            given=f"other tensors in place of parameters of a model with shoal.FSDP(): {names[0]}, as "
            "functional_call, load_state_dict(assign=True) or an assignment do",
            found="FSDP computes with its own parameters and would ignore them",
            fix="change the parameters before shoal.parallelize, or in place: p.copy_(values) under "
            "torch.no_grad()",
        )


def _refuse_copy(part: nn.Module, _: object) -> NoReturn:
    raise StepError(
        given="copy.deepcopy of a model with shoal.FSDP()",
        found="the hooks that gather its parameters can't be copied",
        fix="shoal.EMA(model) for an average; or copy the model before shoal.parallelize, parallelize "
        "both, and call copied.load_state_dict(model.state_dict())",
    )


def _mesh(world: World, *without: str) -> DeviceMesh:
    """Return the mesh over which parameters are sharded, and replicated, without some axes."""
    axes = [
        axis
        for axis in ("shard", "expert", "context")
        if axis not in without and world.layout.degree(axis) > 1
    ]
    divided = world.mesh[axes[0] if axes else "shard"]
    if len(axes) > 1:
        divided = world.flat_mesh(*axes, name="_".join(axes))
    if world.layout.degree("replicate") == 1:
        return divided
    return concatenate([world.mesh["replicate"], divided])


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FLOAT32 = (*_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Bilinear)
"""Modules whose operations need parameters in the dtype of their buffers or inputs."""


class GatheredPrecision:
    """The dtype in which sharded modules gather their parameters: that of a Step's mixed precision.

    The forward still runs under torch's autocast, which decides the dtype of each operation and finds
    parameters that it need not convert. Norms and embeddings return float32 where they would from
    parameters in float32. A unit keeps its dtype if that is not float32, or if it has modules that do
    not work with parameters in 16 bits (BatchNorm).

    `divided` are the modules that FSDP2 has sharded with the policy `given`, inner ones first.
    """

    def __init__(
        self, divided: Sequence[Any], given: MixedPrecisionPolicy, reduce_dtype: torch.dtype
    ) -> None:
        self._given = given
        self._reduce_dtype = reduce_dtype
        self._wanted: torch.dtype | None = None
        self._used: torch.dtype | None = None
        self._parts: list[Any] = []
        if given.param_dtype is not None:
            return  # the user has chosen the dtype in which parameters are gathered
        inner: set[int] = set()
        for part in divided:
            own = [module for module in part.modules() if id(module) not in inner]
            inner |= {id(module) for module in own}
            learned = [m for m in own if next(m.parameters(recurse=False), None) is not None]
            if any(isinstance(module, _FLOAT32) for module in learned):
                continue
            if parameter_dtypes(part) == {torch.float32}:
                self._parts.append(part)
                part.register_forward_pre_hook(self._follow, prepend=True)
                _return_float32(own)

    def use(self, autocast: torch.dtype | None) -> None:
        """Gather parameters in the dtype `autocast` from now on; None is their own dtype."""
        self._wanted = autocast
        if self._used is not autocast:
            policy = self._given
            if autocast is not None:
                policy = MixedPrecisionPolicy(autocast, self._reduce_dtype, cast_forward_inputs=False)
            for part in self._parts:
                use_policy(part, policy)
            self._used = autocast

    @contextmanager
    def under(self, autocast: torch.dtype | None) -> Iterator[None]:
        """Gather parameters in the dtype `autocast` within a `with` block."""
        before = self._wanted
        self.use(autocast)
        try:
            yield
        finally:
            self._wanted = before  # used by the next forward pass, if there is one

    def _follow(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self.use(self._wanted)


def _return_float32(modules: Sequence[nn.Module]) -> None:
    """Let embeddings and norms return float32 where they would from parameters in float32."""
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.register_forward_hook(_widened)
        for kind, forward in ((nn.LayerNorm, _layer_norm), (nn.GroupNorm, _group_norm)):
            if type(module).forward is kind.forward and "forward" not in vars(module):
                module.forward = MethodType(forward, module)


def _widened(module: nn.Module, _: object, output: Tensor) -> Tensor:
    return output.float() if torch.is_autocast_enabled(output.device.type) else output


# torch's CPU kernels don't take inputs in float32 with parameters in 16 bits.
def _layer_norm(norm: nn.LayerNorm, input: Tensor) -> Tensor:
    weight, bias = _as_wide_as(input, norm.weight), _as_wide_as(input, norm.bias)
    return F.layer_norm(input, norm.normalized_shape, weight, bias, norm.eps)


def _group_norm(norm: nn.GroupNorm, input: Tensor) -> Tensor:
    weight, bias = _as_wide_as(input, norm.weight), _as_wide_as(input, norm.bias)
    return F.group_norm(input, norm.num_groups, weight, bias, norm.eps)


def _as_wide_as(input: Tensor, parameter: Tensor | None) -> Tensor | None:
    return (
        None if parameter is None else parameter.to(torch.promote_types(input.dtype, parameter.dtype))
    )

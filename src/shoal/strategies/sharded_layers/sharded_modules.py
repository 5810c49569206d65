"""A model whose layers are sharded over ranks as DTensors, with the hooks for their activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shoal._torch.autograd import in_backward, version
from shoal._torch.dispatch import tree_leaves, tree_map_only
from shoal._torch.modules import call_hooks
from shoal.distributed.world import World
from shoal.strategies.dtensor import is_divided
from shoal.strategies.random_draws.draws import slices_of
from shoal.strategies.random_draws.slices import Slices
from shoal.strategies.sharded_layers.plan_check import PlanCheck
from shoal.strategies.sharded_parameter import ShardedParameter
from shoal.util.errors import StepError

ATTRIBUTE = "_shoal_division"
SEQUENCE = 1
"""The dimension of the sequence in activations of shape (batch, sequence, features)."""


class ShardedLayers:
    """The layers of a plan in one model, and the hooks that shard their inputs.

    Outside the layers, activations are plain full tensors, identical on the ranks of `mesh`. A layer
    that is called outside the forward pass of the model takes and returns full tensors too. With
    "sequence" in the plan they are DTensors split along the sequence, and torch raises an error if they
    are mixed with plain ones. A module with parameters that is not in the plan gets full tensors, and
    its output becomes a DTensor again.
    """

    def __init__(
        self, model: nn.Module, plan: Mapping[str, str], layers: Mapping[str, str], mesh: DeviceMesh
    ) -> None:
        self.plan = dict(plan)
        self.mesh = mesh
        self.ways = frozenset(layers.values())
        self.logits = "logits" in self.ways
        self.sequence = "sequence" in self.ways
        self.proved = False
        self.proof: PlanCheck | None = None
        """The comparison with the original model, while it runs."""
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Arguments of the last call of the model, until the plan is checked."""
        self._keep = False
        self._gathered: dict[nn.Module, bool] = {}
        self._shared: tuple[ref[Tensor], tuple[int, bool], DTensor] | None = None
        self._running = 0
        """Forward passes of the model that run now."""
        model.register_forward_pre_hook(self._remember, with_kwargs=True)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        inside: set[nn.Module] = set()
        for name, way in layers.items():
            layer = model.get_submodule(name)
            inside |= set(layer.modules())
            layer.register_forward_pre_hook(partial(self._enter, name, way), with_kwargs=True)
            layer.register_forward_hook(partial(self._leave, way))
        if self.sequence:
            for part in model.modules():
                if part not in inside and any(True for _ in part.parameters(recurse=False)):
                    part.register_forward_pre_hook(self._gather, with_kwargs=True)
                    part.register_forward_hook(self._wrap)
        if self.logits or self.sequence:
            model.register_forward_hook(self._finish)

    def __deepcopy__(self, memo: object) -> ShardedLayers:
        return self  # a copied model is on the same ranks, with the same hooks

    def run_in_stages(self) -> None:
        """Take all calls of layers for calls by a stage: others raise errors in a pipeline."""
        self._running += 1

    def _begin(self, *_: object) -> None:
        self._running += 1

    def _end(self, *_: object) -> None:
        self._running -= 1

    @property
    def _alone(self) -> bool:
        """Whether a layer is called outside the forward pass that the plan is made for."""
        return not (self._running or torch.compiler.is_compiling() or in_backward())

    @contextmanager
    def logits_kept(self) -> Iterator[None]:
        """Keep logits sharded inside. Elsewhere the model returns full logits."""
        self._keep = True
        try:
            yield
        finally:
            self._keep = False

    def prove(
        self,
        model: nn.Module,
        world: World,
        call: Callable[[], Any] | None = None,
        values: Any = None,
    ) -> None:
        """Compare the sharded `model` with the original, once all ranks have called it. Collective.

        `call` runs it on `values`. Default: the last call is repeated. Raises StepError on all ranks if
        they differ.
        """
        if self.proved:
            return
        called = self.arguments
        if call is None:
            if not all(world.gather(called is not None)) or called is None:
                return
            call, values = partial(model, *called[0], **called[1]), called
        proof = self.proof = PlanCheck(self.mesh)
        try:
            proof.run(model, call, values)
        finally:
            self.proof = None
        findings = [found for found in world.gather(proof.found) if found is not None]
        self.proved = not findings
        self.arguments = None
        if findings:
            mixed = "mixed torch.Tensor and DTensor" in findings[0]
            raise StepError(
                given=f"shoal.TensorParallel(plan={self.plan!r}) around {type(model).__name__}",
                found=f"the sharded model differs from the original model: {findings[0]}",
                fix="move operations on a split sequence into a module, with the kind "
                '"sequence" in the plan: an nn.Embedding for positions, a module for a scale'
                if mixed
                else "between a column and a row layer, use only operations on each feature or head "
                "separately, such as view(batch, length, -1, head_size); leave other layers out of the "
                "plan",
            )

    def compare_draws(
        self,
        model: nn.Module,
        slices: Slices,
        call: Callable[[], Any],
        values: Any,
        needed: Callable[[], bool],
    ) -> str:
        """Compare the sharded `model` with the original in its mode; see `Split`. Collective."""
        proof = self.proof = PlanCheck(self.mesh, slices, needed)
        try:
            proof.run(model, call, values)
        finally:
            self.proof = None
        return proof.found or ""

    def _remember(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.proved:
            self.arguments = (args, kwargs)

    def _enter(self, name: str, way: str, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.proof is not None and self.proof.enter(name, layer, (args, kwargs)):
            return None
        return tree_map_only(Tensor, partial(self._brought, way), (args, kwargs))

    def _brought(self, way: str, tensor: Tensor) -> DTensor:
        """Return the input of a layer, sharded as the layer needs it."""
        if way == "row":
            last = Shard(tensor.dim() - 1)
            return self._placed(tensor, Replicate() if self._alone else last, last)
        if way == "sequence" and _has_sequence(tensor):
            return self._placed(tensor, Replicate(), Shard(SEQUENCE))
        if self.sequence and is_divided(tensor):
            return self._gathered_once(tensor)
        return self._placed(tensor, Replicate(), Replicate())

    def _gathered_once(self, tensor: DTensor) -> DTensor:
        """Return the full tensor: one copy for all layers that use it, such as query, key and value."""
        state = (version(tensor), torch.is_grad_enabled())
        if self._shared is not None:
            known, then, gathered = self._shared
            if known() is tensor and then == state:
                return gathered
        gathered = self._placed(tensor, Replicate(), Replicate())
        self._shared = (ref(tensor, self._forget), state, gathered)
        return gathered

    def _forget(self, gone: ref[Tensor]) -> None:
        if self._shared is not None and self._shared[0] is gone:
            self._shared = None

    def _placed(self, tensor: Tensor, plain: Placement, wanted: Placement) -> DTensor:
        """Return `tensor` placed as `wanted`. The placement of a plain tensor is `plain`."""
        if not is_divided(tensor):
            tensor = DTensor.from_local(tensor, self.mesh, [plain], run_check=False)
        return tensor.redistribute(placements=[wanted], async_op=True)

    def _leave(self, way: str, layer: nn.Module, args: Any, output: Any) -> Any:
        if self.proof is not None and self.proof.leave(layer):
            return None
        if self._alone:
            return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), output)
        if way in ("sequence", "logits"):
            return output
        last = output.dim() - 1
        if way == "column":
            return output.redistribute(placements=[Shard(last)]).to_local()
        if self.sequence and way != "head" and last > SEQUENCE:
            return output.redistribute(placements=[Shard(SEQUENCE)])
        return output.redistribute(placements=[Replicate()], async_op=True).to_local()

    def _gather(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        divided = {id(t): t for t in tree_leaves((args, kwargs)) if is_divided(t)}
        self._gathered[part] = bool(divided)
        if not divided:
            return None
        whole = {key: tensor.full_tensor() for key, tensor in divided.items()}
        return tree_map_only(DTensor, lambda tensor: whole[id(tensor)], (args, kwargs))

    def _wrap(self, part: nn.Module, args: Any, output: Any) -> Any:
        if not self._gathered.pop(part):
            return None
        return tree_map_only(Tensor, lambda t: self._placed(t, Replicate(), Replicate()), output)

    def _finish(self, model: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(DTensor, self._finished, output)

    def _finished(self, tensor: DTensor) -> Tensor:
        """Return an output of the model: the full tensor, except sharded logits for the loss."""
        if self._keep and self.logits and tensor.placements == (Shard(tensor.dim() - 1),):
            return tensor
        return tensor.full_tensor()


def _has_sequence(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > SEQUENCE + 1


def division_of(model: nn.Module) -> ShardedLayers | None:
    """Return the sharded layers of `model`, or None without a plan."""
    found: ShardedLayers | None = getattr(model, ATTRIBUTE, None)
    return found


def divide(model: nn.Module, plan: Mapping[str, str], layers: Mapping[str, str], world: World) -> None:
    """Shard the `layers` of `plan`, names with their kinds, over the `tensor` axis.

    Tied parameters stay tied. Raises StepError if the plan shards them differently.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    mesh = world.mesh["tensor"]
    for name, way in layers.items():
        _refuse_norms(name, model.get_submodule(name))
        _divide_parameters(model.get_submodule(name), way, mesh)
    for first, *others in names.values():
        for other in others:
            _tie(model, first, other)
    for parameter in model.parameters():
        if is_divided(parameter):
            parameter.__class__ = ShardedParameter
    sharded = ShardedLayers(model, plan, layers, mesh)
    object.__setattr__(model, ATTRIBUTE, sharded)
    slices = slices_of(model)
    if slices is not None:
        slices.split_over("tensor", mesh.size(), mesh.get_local_rank(), sharded)


def _refuse_norms(name: str, layer: nn.Module) -> None:
    """Raise StepError for weight_norm and spectral_norm, old and new: torch has none for DTensors."""
    hooks = [hook for part in layer.modules() for hook in call_hooks(part)]
    for each in (*layer.modules(), *hooks):
        kind = type(each).__name__.lstrip("_")
        if kind in ("WeightNorm", "SpectralNorm"):
            raise StepError(
                given=f"{kind} of {name}, a layer of shoal.TensorParallel(plan=…)",
                found="it uses the whole weight, and each rank has a part",
                fix=f"leave {name} out of the plan, or remove the {kind}",
            )


def _divide_parameters(layer: nn.Module, way: str, mesh: DeviceMesh) -> None:
    for part in layer.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            placement: Placement = Shard(0)
            if way == "sequence" or (way == "row" and name == "bias"):
                placement = Replicate()
            elif way == "row":
                placement = Shard(1)
            divided = distribute_tensor(parameter.detach(), mesh, [placement])
            setattr(part, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def _tie(model: nn.Module, first: str, other: str) -> None:
    one, two = model.get_parameter(first), model.get_parameter(other)
    if _placements(one) != _placements(two):
        raise StepError(
            given=f"shoal.TensorParallel(plan=…) around {type(model).__name__}",
            found=f"{first} and {other} are one parameter, and the plan shards them differently",
            fix='use "vocabulary" for an Embedding and "head" for the Linear tied to it',
        )
    owner, _, attribute = other.rpartition(".")
    setattr(model.get_submodule(owner), attribute, one)


def _placements(tensor: Tensor) -> object:
    return tuple(tensor.placements) if is_divided(tensor) else None


def divide_alike(parameter: Tensor) -> None:
    """Shard a gradient like its parameter: autograd may return a full one or a partial sum.

    A scalar parameter that is multiplied with a DTensor gets such a gradient too.
    """
    gradient = parameter.grad
    if not is_divided(gradient):
        return
    if not is_divided(parameter):
        parameter.grad = gradient.full_tensor()
    elif gradient.placements != parameter.placements:
        with torch.no_grad():
            parameter.grad = gradient.redistribute(placements=parameter.placements)

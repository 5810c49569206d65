"""The parameters and gradients that a rank holds: norm, scaling, and checks for changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal._torch import foreach
from shoal._torch.autograd import leaves_of
from shoal._torch.modules import parameters as module_parameters
from shoal.data.batch import Count
from shoal.distributed.world import World
from shoal.strategies.correction import Factor
from shoal.strategies.dtensor import is_divided, share
from shoal.strategies.multi_device import span_of
from shoal.strategies.random_draws import draws as random_draws
from shoal.strategies.registry import engines_of
from shoal.util.errors import StepError


class KeptParameter(NamedTuple):
    """A parameter as it was when the engine was created, and its place in the module."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    device: torch.device
    table: dict[str, nn.Parameter | None]
    key: str

    @property
    def converted(self) -> bool:
        """Whether it has another dtype or device, or the module has a meta tensor in its place."""
        if self.parameter.dtype is not self.dtype or self.parameter.device != self.device:
            return True
        held = self.table.get(self.key)
        return held is not self.parameter and held is not None and held.is_meta

    @property
    def replaced(self) -> bool:
        """Whether the module has another parameter, or none, in its place."""
        return self.table.get(self.key) is not self.parameter


class HeldParameters:
    """The trainable parameters that this rank holds, their gradients, and the losses of a batch.

    The engine and the reducer both use this object.
    """

    def __init__(self, module: nn.Module, world: World, *, may_be_empty: bool = False) -> None:
        self.module = module
        self.world = world
        self.span = span_of(module)
        _check_kinds(module, world)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if not may_be_empty:
            check_learns(module)
        self.losses: list[tuple[Tensor, Count, float]] = []
        """Loss sum, count and weight of the micro-batches of this batch so far."""
        self._backward_said = False
        self.unused_checked = False
        """Whether the first batch has been checked for parameters that the loss does not use."""
        self._divided = any(map(is_divided, self.parameters))
        self._kept = [
            KeptParameter(
                f"{prefix}.{key}".lstrip("."), p, p.dtype, p.device, module_parameters(part), key
            )
            for prefix, part in module.named_modules()
            for key, p in module_parameters(part).items()
            if p is not None and p.requires_grad
        ]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]

    def gradients(self) -> list[Tensor]:
        """Return the gradients, or this rank's shards of them, as plain tensors."""
        found = [dense_gradient(p, p.grad) for p in self.parameters if p.grad is not None]
        if not self._divided:
            return found
        with torch.no_grad():
            return [share(gradient) for gradient in found]

    def norm(self) -> Tensor:
        """Return the L2 norm of the gradients, or of this rank's shards of them."""
        norm, *others = [global_norm(gradients) for gradients in self._by_device()]
        for other in others:
            norm = torch.hypot(norm, other.to(norm.device))
        return norm

    def multiply(self, factor: Factor) -> None:
        """Multiply the gradients by `factor`. A factor of 1 costs nothing, if the host knows it."""
        if isinstance(factor, Tensor) or factor != 1.0:
            for gradients in filter(None, self._by_device()):
                foreach.mul_(gradients, factor)

    def clear(self) -> None:
        """Clear the gradients and drop the losses of their batch."""
        self.losses.clear()
        self.say_draws()
        for parameter in self.parameters:
            parameter.grad = None

    def say_draws(self) -> None:
        """Print once, on rank 0, random numbers that do not belong to samples, as a step showed it."""
        in_backward = random_draws.forget()
        if not random_draws.is_registered(self.module):
            return
        if in_backward and self.world.data_size > 1 and not self._backward_said:
            self._backward_said = True
            self.world.print("shoal: each rank draws its own random numbers in backward")
        for line in random_draws.unknown_lines(self.module):
            self.world.print(f"shoal: results depend on how the batch is split, because {line}")

    def leaves(self, *losses: Tensor) -> list[Tensor] | None:
        """Return the leaves to pass to backward of `losses` as `inputs`, or None if that is not needed.

        With several models, the loss of one may run through another (a GAN's generator through the
        discriminator), whose parameters must not learn from it. Leaves that are not parameters
        are included: without them, backward would not run the nodes that raise for a second derivative
        that does not exist. This costs a little time, so it is done only then.
        """
        if len(engines_of(self.world)) == 1:
            return None
        own = [p for p in self.parameters if p.requires_grad]  # some may have been frozen since
        return [*own, *(leaf for leaf in leaves_of(losses) if not isinstance(leaf, nn.Parameter))]

    def check(self) -> None:
        """Raise StepError if the set of trainable parameters has changed since the beginning."""
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            self._raise_added(thawed)
        self.check_converted()
        self.check_replaced()

    def check_converted(self) -> None:
        """Raise StepError if parameters were moved or converted to another dtype since."""
        if any(kept.converted for kept in self._kept):
            self._raise_changed([kept for kept in self._kept if kept.converted])

    def check_replaced(self) -> None:
        """Raise StepError if the module has other parameters in their place, except during FSDP."""
        gone = [kept for kept in self._kept if kept.replaced]
        if gone:
            there = {id(p) for p in self.module.parameters()}  # under another name, if pruned
            gone = [kept for kept in gone if id(kept.parameter) not in there]
        if gone:
            self._raise_changed(gone)

    def without_gradient(self) -> list[str]:
        """Return the names of the trainable parameters that have no gradient."""
        return [n for n, p in self.module.named_parameters() if p.requires_grad and p.grad is None]

    def unused(self) -> list[str]:
        """Return the names of the parameters that the first batch did not use; later, an empty list.

        Raises StepError for trainable parameters that were added since the beginning.
        """
        if self.unused_checked:
            return []
        self.unused_checked = True
        known = {id(p) for p in self.parameters}
        others = [p for p in self.module.parameters() if p.requires_grad and id(p) not in known]
        if others:
            self._raise_added(others)
        return self.without_gradient()

    def print_unused(self) -> None:
        """Print, after the first batch, which parameters the loss does not use."""
        if names := self.unused():
            self.world.print(f"shoal: parameters that the loss does not use: {', '.join(names)}")

    def _by_device(self) -> list[list[Tensor]]:
        """Return the gradients in one list per device, as torch's fused primitives need."""
        if self.span is None:
            return [self.gradients()]
        parts: dict[torch.device, list[Tensor]] = {}
        for gradient in self.gradients():
            parts.setdefault(gradient.device, []).append(gradient)
        return list(parts.values()) or [[]]

    def _raise_added(self, others: Sequence[Tensor]) -> NoReturn:
        ids = {id(p) for p in others}
        names = [name for name, p in self.module.named_parameters() if id(p) in ids]
        for p in others:
            p.grad = None  # no engine clears it
        raise StepError(
            given=f"trainable parameters of {type(self.module).__name__}: {first(names)}",
            found="they were not trainable in parallelize: they were frozen then, or were added since",
            fix="add layers and call requires_grad_(True) before parallelize; to train a layer later, "
            "leave it out of the optimizer and add it with add_param_group when you start to train it",
        )

    def _raise_changed(self, changed: Sequence[KeptParameter]) -> NoReturn:
        raise StepError(
            given=f"parameters of a {type(self.module).__name__}: "
            f"{first([kept.name for kept in changed])}",
            found="they were moved, converted or replaced after parallelize; the optimizer, the other "
            "ranks and the reducer of gradients still use the old ones",
            fix="call model.double(), model.to(…) and similar methods before parallelize; to load "
            "values, use shoal.load(model, state) instead of load_state_dict(state, assign=True)",
        )


def first(names: Sequence[str], shown: int = 3) -> str:
    """Return the first few of `names`, and the number of the others."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def check_learns(module: nn.Module) -> None:
    """Raise StepError for a model without trainable parameters."""
    if not any(p.requires_grad for p in module.parameters()):
        raise StepError(
            given=f"parallelize({type(module).__name__}, world)",
            found="a model without trainable parameters",
            fix="call parameter.requires_grad_(True) for the parameters to train, before parallelize",
        )


def _check_kinds(module: nn.Module, world: World) -> None:
    """Raise StepError for uninitialized parameters, and on several ranks for sparse gradients."""
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]
    if lazy:
        raise StepError(
            given=f"parallelize({type(module).__name__}, world)",
            found=f"uninitialized parameters of lazy layers: {first(lazy)}",
            fix="run the model once before, on a batch or a part of it: model(inputs)",
        )
    if sparse and world.size > 1:
        raise StepError(
            given=f"parallelize({type(module).__name__}, world) on {world.size} ranks",
            found=f"layers with sparse gradients, which ranks can't sum: {first(sparse)}",
            fix="nn.Embedding(…, sparse=False)",
        )


def dense_gradient(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return the gradient of a parameter, or the values of one that is sparse."""
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad.values()


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all `gradients` together, on the device of the first, at least float32.

    Uses the fused primitives of torch.nn.utils.get_total_norm, without its grouping of every call by
    device and dtype, which takes longer than the norm itself for small models.
    """
    if not gradients:
        return torch.zeros(())
    norms = foreach.norm(gradients)
    first = norms[0]
    if any(norm.dtype != first.dtype or norm.device != first.device for norm in norms):
        dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
        norms = tuple(norm.to(first.device, dtype) for norm in norms)
    elif first.dtype in (torch.float16, torch.bfloat16):
        norms = foreach.norm(gradients, torch.float32)  # not rounded to 16 bits
    norm: Tensor = torch.linalg.vector_norm(torch.stack(tuple(norms)))
    return norm


def as_scalar(count: Count, like: Tensor) -> Tensor:
    """Return `count` as a 0-dimensional tensor with the dtype and device of `like`."""
    if isinstance(count, Tensor):
        return count.detach().reshape(()).to(like)
    return like.new_full((), count)  # a kernel that fills, where a copy from the host would block

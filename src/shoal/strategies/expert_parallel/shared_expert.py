"""Shared experts, which get all tokens, and compute while tokens are sent to the routed experts.

The model calls them in its own order. The first step shows whether it calls them after the routed
experts, with the same activations or with those of the layer; from the next step on, their output is
computed ahead of this call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.autograd import in_backward, version
from shoal._torch.modules import call_hooks
from shoal.data.coupling.step import CoupledStep
from shoal.data.micro import CURRENT_DRAWS
from shoal.distributed.world import World

_PREFIX = "shared"
"""How the names of shared experts begin, in their models: shared_expert, shared_experts, …"""


def shared_experts(layer: nn.Module, world: World) -> tuple[SharedForward, ...]:
    """Replace the forward of the shared experts in a layer with routed experts."""
    children = [each for name, each in layer.named_children() if name.startswith(_PREFIX)]
    found = tuple(SharedForward(each, world) for each in children if "forward" not in vars(each))
    for forward in found:
        forward.module.forward = forward
    if found:
        layer.register_forward_pre_hook(_LayerHook(found))
    return found


class Computed:
    """The outputs of one layer that were computed ahead, and their contexts.

    Recomputing activations ends before it calls for them; the next layer drops them.
    """

    def __init__(self, world: World) -> None:
        self.outputs: dict[SharedForward, tuple[Tensor, tuple[Any, ...]]] = {}

    def close(self) -> None:
        """Forget them."""
        self.outputs.clear()


def _nothing() -> None:
    return None


class SharedForward:
    """The forward of a shared expert, which may have been computed ahead.

    Pickled or copied, it is the forward of the module's class.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        self.module = module
        self._of_layer: Callable[[], Tensor | None] = _nothing
        self._of_experts: Callable[[], Tensor | None] = _nothing
        self._step = world.service(CoupledStep)
        self._computed = world.service(Computed)
        self._observed: tuple[int, bool] | None = None
        self._ahead = False
        self._follows = False

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self.module, "forward")

    def before_layer(self, given: object) -> None:
        """Note the input of the layer."""
        self._of_layer = weakref.ref(given) if isinstance(given, Tensor) else _nothing
        self._follows = False
        self._computed.outputs.clear()

    def before_experts(self, hidden: Tensor) -> Callable[[], None] | None:
        """Expect a call; return a function that computes its output now, or None."""
        self._of_experts, self._follows = weakref.ref(hidden), True
        trains = self.module.training and torch.is_grad_enabled()
        if self._observed is None or not trains or call_hooks(self.module):
            return None
        step, from_layer = self._observed
        if not in_backward():  # a recomputed forward pass has the order of the first one
            self._ahead = step != self._step.applied
        given = self._of_layer() if from_layer else hidden
        return partial(self._compute, given) if self._ahead and given is not None else None

    def _compute(self, given: Tensor) -> None:
        context = _context(given)
        self._computed.outputs[self] = type(self.module).forward(self.module, given), context

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the output of the shared expert."""
        forward = partial(type(self.module).forward, self.module)
        alone = len(given) == 1 and isinstance(given[0], Tensor) and not named
        if torch.compiler.is_compiling() or not alone:
            return forward(*given, **named)
        computed = self._computed.outputs.pop(self, None)
        from_layer = given[0] is self._of_layer()
        same = self._follows and (from_layer or given[0] is self._of_experts())
        self._follows = False
        if computed is not None and same and computed[1] == _context(given[0]):
            return computed[0]
        draws = CURRENT_DRAWS.get()
        made = None if draws is None else dict(draws.made)
        result = forward(*given)
        if same and draws is not None and draws.made == made and self._observed is None:
            self._observed = self._step.applied, from_layer
        return result


def _context(given: Tensor) -> tuple[Any, ...]:
    """Return all that an output depends on: the tensor, changes of it, gradients and autocast."""
    kind = given.device.type
    mixed = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return id(given), version(given), torch.is_grad_enabled(), mixed


class _LayerHook:
    """Tell shared experts the input of their layer. A copied or pickled hook does nothing."""

    def __init__(self, shared: tuple[SharedForward, ...] = ()) -> None:
        self._shared = shared

    def __reduce__(self) -> tuple[object, ...]:
        return _LayerHook, ()

    def __call__(self, layer: nn.Module, given: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            for each in self._shared:
                each.before_layer(given[0] if given else None)

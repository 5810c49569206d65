"""Shared experts, which get all tokens, and compute while tokens are sent to the routed experts.

The model calls them in its own order. The first step shows whether it calls them after the routed
experts, with the same activations or with those of the layer; from the next step on, their output is
computed ahead of this call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal._torch.autograd import (
    in_backward,
    last_node_number,
    running_node_number,
    saved_tensor_hooks,
    version,
)
from shoal._torch.modules import call_hooks, call_uncompiled, has_global_hooks
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


class _Expected(NamedTuple):
    """A call that may follow in the layer that runs, and its output if that was computed ahead."""

    inputs: tuple[tuple[Tensor, Tensor], ...]
    """The input of the layer and that of the experts, each with the view with which the shared expert
    computes. Nodes of autograd run in the order of their numbers, so the gradient of an input adds up
    in the same order, ahead or not."""
    state: Sequence[tuple[object, int | None]]
    computed: Tensor | None = None
    """The input of the output."""
    output: Any = None


def _nothing() -> None:
    return None


class SharedForward:
    """The forward of a shared expert, which may have been computed ahead.

    Pickled or copied, it is the forward of the module's class.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        self.module = module
        self._entered: tuple[Callable[[], Tensor | None], int | None] | None = None
        self._step = world.service(CoupledStep)
        self._observed: tuple[int, bool] | None = None
        self._ahead, self._since = False, 0
        self._computing = False

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self.module, "forward")

    def before_layer(self, given: object) -> None:
        """Note the input of the layer."""
        of_layer = weakref.ref(given) if isinstance(given, Tensor) else _nothing
        self._entered = of_layer, saved_tensor_hooks()
        self._step.expected.clear()  # recomputing activations ends before it calls for them

    def before_experts(self, hidden: Tensor) -> Callable[[], None] | None:
        """Expect a call; return a function that computes its output now, or None."""
        entered, self._entered = self._entered, None
        hooks = saved_tensor_hooks()
        if entered is None or hooks is None or entered[1] != hooks:  # only the experts run again
            return None
        of_layer = entered[0]()
        given = of_layer if self._observed is not None and self._observed[1] else hidden
        ahead = self._is_ahead(given)
        if not (ahead or self._overlaps()):
            return None
        inputs = tuple(
            (each, each.view_as(each)) for each in dict.fromkeys((of_layer, hidden)) if each is not None
        )
        state = () if ahead else _state(self.module, inputs)
        self._step.expected[self] = _Expected(inputs, state)
        return partial(self._compute, given) if ahead and given is not None else None

    def _overlaps(self) -> bool:
        trains = self.module.training and torch.is_grad_enabled()
        return trains and not call_hooks(self.module) and not has_global_hooks()

    def _is_ahead(self, given: Tensor | None) -> bool:
        if in_backward():  # a recomputed forward pass has the order of the first one
            return self._ahead == ((running_node_number() or 0) > self._since)
        ahead = self._observed is not None and self._observed[0] != self._step.applied
        ahead = ahead and given is not None and self._overlaps()
        if ahead != self._ahead and torch.is_grad_enabled():
            self._ahead, self._since = ahead, last_node_number()
        return ahead

    def _compute(self, given: Tensor) -> None:
        inputs = self._step.expected.pop(self).inputs
        [view] = [view for each, view in inputs if each is given]
        self._computing = True
        try:
            output = call_uncompiled(self.module, view)  # draws belong to the module that is called
        finally:
            self._computing = False
        self._step.expected[self] = _Expected(inputs, _state(self.module, inputs), given, output)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the output of the shared expert."""
        forward = partial(type(self.module).forward, self.module)
        if torch.compiler.is_compiling() or self._computing or len(given) != 1 or named:
            return forward(*given, **named)
        expected: _Expected | None = self._step.expected.pop(self, None)
        if expected is None or not _same(expected.state, _state(self.module, expected.inputs)):
            return forward(*given)
        if expected.computed is not None and expected.computed is given[0]:
            return expected.output
        for each, view in expected.inputs:
            if each is given[0]:
                from_layer = each is not expected.inputs[-1][0]
                return self._observing(partial(forward, view), expected, from_layer=from_layer)
        return forward(*given)

    def _observing(self, forward: Callable[[], Any], expected: _Expected, *, from_layer: bool) -> Any:
        """Compute, and note whether this has changed nothing, so that it may be done ahead."""
        draws = CURRENT_DRAWS.get()
        made = None if draws is None else dict(draws.made)
        calls = dict(self._step.calls)
        result = forward()
        if self._observed is not None or draws is None or in_backward():
            return result
        unchanged = draws.made == made and self._step.calls == calls
        if unchanged and _same(expected.state, _state(self.module, expected.inputs)):
            self._observed = self._step.applied, from_layer
        return result


def _state(
    module: nn.Module, inputs: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[object, int | None]]:
    """Return all that an output depends on, with the number of in-place changes of tensors."""
    kind = inputs[0][0].device.type
    mixed = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    held: list[object] = [torch.is_grad_enabled(), mixed, *(each for each, _ in inputs)]
    for part in module.modules():
        held += vars(part).values()
        held += [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    changes = [
        version(each) if isinstance(each, Tensor) and not each.is_inference() else 0 for each in held
    ]
    return [*zip(held, changes, strict=True), (None, saved_tensor_hooks())]


def _same(one: Sequence[tuple[object, int | None]], other: Sequence[tuple[object, int | None]]) -> bool:
    return len(one) == len(other) and all(
        each is now and before == after for (each, before), (now, after) in zip(one, other, strict=True)
    )


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

"""Hooks that move the arguments of modules to the devices of the modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.autograd import version
from shoal._torch.modules import remove_forward_hooks
from shoal.distributed.to_device import move, send


class ForwardCopies:
    """Copies made in the current forward.

    An argument of several modules of a device, such as a mask, is copied to it once.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device, bool], tuple[Tensor, int, Tensor]] | None = None

    def begin(self, model: nn.Module, args: Any) -> None:
        """Begin the copies of a forward pass of the model; a hook."""
        self._made = {}

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """Drop the copies after a forward pass, complete or failed; a hook. It copies again later."""
        self._made = None

    def bring(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return `tensor` on `device`: itself, an earlier copy, or a new one."""
        if tensor.device == device:
            return tensor
        if self._made is None or tensor.is_inference():  # inference tensors have no version
            return send(tensor, device)
        key = (id(tensor), device, torch.is_grad_enabled())
        # The tensor is kept with its copy, so that no other tensor can get its id.
        _, copied, copy = self._made.get(key, (tensor, -1, tensor))
        if copied != version(tensor):
            copy = send(tensor, device)
            self._made[key] = (tensor, version(tensor), copy)
        return copy


class MoveArguments:
    """Hook before the forward of a module that moves the arguments to `device`.

    It still works after it was copied or pickled with its module.
    """

    def __init__(self, device: torch.device, copies: ForwardCopies) -> None:
        self.device = device
        self._copies = copies

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the moved arguments, or None if all are on the device."""
        here = self.device
        if not kwargs and all(isinstance(a, Tensor) and a.device == here for a in args):
            return None
        return move((args, kwargs), here, self._copies.bring)


def arrange(model: nn.Module, places: dict[nn.Module, torch.device]) -> None:
    """Add hooks that move the arguments of each module of `places`, before all other hooks."""
    copies = ForwardCopies()
    for module, device in places.items():
        # Before all others: activation checkpointing saves the inputs that it gets.
        module.register_forward_pre_hook(MoveArguments(device, copies), prepend=True, with_kwargs=True)
    model.register_forward_pre_hook(copies.begin, prepend=True)
    model.register_forward_hook(copies.end, always_call=True)


def without_arrivals(model: nn.Module) -> nn.Module:
    """Return `model`, a private copy, on the CPU and without the hooks."""
    for module in model.modules():
        remove_forward_hooks(module, _is_arrival)
    return model.cpu()


def _is_arrival(hook: Any) -> bool:
    return isinstance(hook, MoveArguments) or isinstance(getattr(hook, "__self__", None), ForwardCopies)

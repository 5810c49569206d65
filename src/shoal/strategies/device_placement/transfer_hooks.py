"""What modules are called with, brought to the devices that they are on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.autograd import version
from shoal._torch.modules import remove_forward_hooks
from shoal.distributed.to_device import move, send


class Copies:
    """The copies made in the forward that is under way.

    What several modules of a device are given, such as a mask, is copied to it once.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device, bool], tuple[Tensor, int, Tensor]] | None = None

    def begin(self, model: nn.Module, args: Any) -> None:
        """A forward of the whole model begins."""
        self._made = {}

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """It has ended, or failed. What runs again in backward copies anew."""
        self._made = None

    def bring(self, tensor: Tensor, device: torch.device) -> Tensor:
        """`tensor` on `device`: itself, a copy made before, or a new one."""
        if tensor.device == device:
            return tensor
        if self._made is None or tensor.is_inference():  # which has no version
            return send(tensor, device)
        key = (id(tensor), device, torch.is_grad_enabled())
        # The tensor is kept with its copy: another one can't have its id meanwhile.
        _, copied, copy = self._made.get(key, (tensor, -1, tensor))
        if copied != version(tensor):
            copy = send(tensor, device)
            self._made[key] = (tensor, version(tensor), copy)
        return copy


class Arrival:
    """A hook before the forward of a module: what it is called with comes to `device`.

    Copied or pickled with its module, it goes on doing so.
    """

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self.device = device
        self._copies = copies

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments, moved; None where nothing has to."""
        here = self.device
        if not kwargs and all(isinstance(a, Tensor) and a.device == here for a in args):
            return None
        return move((args, kwargs), here, self._copies.bring)


def arrange(model: nn.Module, places: dict[nn.Module, torch.device]) -> None:
    """Bring to each module of `places` what it is called with, before all other hooks see it."""
    copies = Copies()
    for module, device in places.items():
        # First of all: what runs again in backward keeps its inputs as they come to it.
        module.register_forward_pre_hook(Arrival(device, copies), prepend=True, with_kwargs=True)
    model.register_forward_pre_hook(copies.begin, prepend=True)
    model.register_forward_hook(copies.end, always_call=True)


def without_arrivals(model: nn.Module) -> nn.Module:
    """`model`, a copy that nobody else has, on the CPU and without the hooks."""
    for module in model.modules():
        remove_forward_hooks(module, _is_arrival)
    return model.cpu()


def _is_arrival(hook: Any) -> bool:
    return isinstance(hook, Arrival) or isinstance(getattr(hook, "__self__", None), Copies)

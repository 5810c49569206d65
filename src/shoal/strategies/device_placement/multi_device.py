"""Models on several devices of one process: placed by hand, or by `shoal.DevicePlacement`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.distributed.world import World
from shoal.strategies.activation_checkpoint import units_that_run_again
from shoal.util.errors import StepError

ATTRIBUTE = "_shoal_placing"


@dataclass(frozen=True, kw_only=True)
class Placing:
    """What `shoal.DevicePlacement` leaves on a model.

    `in_flight` is how many micro-batches run at once, None for as many as the devices can use;
    `hooked` says whether hooks move the arguments of its modules.
    """

    in_flight: int | None
    hooked: bool


@dataclass(frozen=True, kw_only=True)
class Span:
    """The devices that a model's parameters are on, how many micro-batches are under way at once
    (None for all of a batch), and whether hooks move what its modules are called with."""

    devices: tuple[torch.device, ...]
    in_flight: int | None
    hooked: bool


def span_of(model: nn.Module) -> Span | None:
    """The devices of a model that was placed, or that has its parameters on several; None for others.

    Micro-batches of a model that is placed by hand follow each other, as its forward was written for.
    """
    placing = getattr(model, ATTRIBUTE, None)
    devices = tuple(dict.fromkeys(parameter.device for parameter in model.parameters()))
    if placing is None:
        return Span(devices=devices, in_flight=1, hooked=False) if len(devices) > 1 else None
    ahead = placing.in_flight or (None if len(devices) > 1 else 1)
    return Span(devices=devices, in_flight=ahead, hooked=placing.hooked)


def bring(model: nn.Module, world: World) -> None:
    """Move `model` to the device of this rank, unless it has been placed on several."""
    if span_of(model) is None:
        model.to(world.device)


def check_strategies(model: nn.Module, strategies: Sequence[Any]) -> None:
    """Raise StepError where `model` is on several devices and a strategy wants it on one."""
    span = span_of(model)
    if span is None:
        return
    for each in strategies:
        if not getattr(each, "several", False):
            name = type(each).__name__
            raise StepError(
                given=f"shoal.{name}(…) around {_described(model, span)}",
                found="it keeps what a process has of a model on one device",
                fix="[shoal.DevicePlacement(…), shoal.DDP()]; or no shoal.DevicePlacement(…), a model "
                "that is on one "
                "device, and a process for each device",
            )
    for unit in units_that_run_again(model):
        if len({parameter.device for parameter in unit.parameters()}) > 1:
            raise StepError(
                given=f"shoal.ActivationCheckpointing(…) around {_described(model, span)}",
                found=f"a {type(unit).__name__} that runs again is on several devices, and torch keeps "
                "the random state of one",
                fix="shoal.ActivationCheckpointing(modules=…) with units that are on one device each",
            )


def check_replicas(model: nn.Module, world: World) -> None:
    """Raise StepError unless the replicas of a model on several devices fit each other. Collective.

    What is summed at once is on one device, the same on all ranks, counted from the one that the rank
    was given: NCCL has a communicator for each device of a rank, and pairs them by these.
    """
    span = span_of(model)
    if span is None or world.size == 1:
        return
    known: dict[torch.device, int] = {world.device: 0}
    places = [known.setdefault(parameter.device, len(known)) for parameter in model.parameters()]
    differ = any(other != places for other in world.gather(places))
    if differ or len({device.type for device in span.devices}) > 1:
        raise StepError(
            given=f"shoal.DDP() around {_described(model, span)}",
            found="other ranks have other parts of it on the first, the second … of their devices"
            if differ
            else "torch's DDP wants all parameters on devices of one type",
            fix="shoal.init(devices_per_rank=2) and Net(*world.devices), the same on every rank"
            if differ
            else "only GPUs or only the CPU; or one process",
        )


def _described(model: nn.Module, span: Span) -> str:
    by = "by shoal.DevicePlacement" if hasattr(model, ATTRIBUTE) else "by hand"
    places = ", ".join(map(str, span.devices))
    return f"a {type(model).__name__} that is placed {by} on {places}"

"""Models on several devices of one process: placed manually, or by `shoal.DevicePlacement`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shoal.distributed.world import World
from shoal.strategies.activation_checkpoint import units_that_run_again
from shoal.util.errors import StepError

ATTRIBUTE = "_shoal_placing"


@dataclass(frozen=True, kw_only=True)
class DeviceSpan:
    """The devices of a model's parameters. `shoal.DevicePlacement` attaches one without them.

    `in_flight` is the number of micro-batches that run forward before a backward pass, None for all of
    a batch. `hooked` says whether hooks move the arguments of its modules.
    """

    devices: tuple[torch.device, ...] = ()
    in_flight: int | None
    hooked: bool


def span_of(model: nn.Module) -> DeviceSpan | None:
    """Return the devices of a model that was placed or has parameters on several; None for others.

    Micro-batches of a manually placed model run one after the other, as its forward expects.
    """
    placing: DeviceSpan | None = getattr(model, ATTRIBUTE, None)
    devices = tuple(dict.fromkeys(parameter.device for parameter in model.parameters()))
    if placing is None:
        return DeviceSpan(devices=devices, in_flight=1, hooked=False) if len(devices) > 1 else None
    ahead = placing.in_flight or (None if len(devices) > 1 else 1)
    return replace(placing, devices=devices, in_flight=ahead)


def bring(model: nn.Module, world: World) -> None:
    """Move `model` to the device of this rank, unless it has been placed on several."""
    if span_of(model) is None:
        model.to(world.device)


def check_strategies(model: nn.Module, strategies: Sequence[Any]) -> None:
    """Raise StepError if `model` is on several devices and a strategy needs it on one."""
    span = span_of(model)
    if span is None:
        return
    for each in strategies:
        if not getattr(each, "several", False):
            name = type(each).__name__
            raise StepError(
                given=f"shoal.{name}(…) around {_described(model, span)}",
                found="this strategy needs the model, or its shard, on a single device in each process",
                fix="pass [shoal.DevicePlacement(…), shoal.DDP()]; or leave shoal.DevicePlacement(…) "
                "out, build the model on one device, and start one process per device",
            )
    for unit in units_that_run_again(model):
        if len({parameter.device for parameter in unit.parameters()}) > 1:
            raise StepError(
                given=f"shoal.ActivationCheckpointing(…) around {_described(model, span)}",
                found=f"a {type(unit).__name__} that is recomputed is on several devices, and torch "
                "saves the random state of only one",
                fix="use shoal.ActivationCheckpointing(modules=…) with units that are on one device "
                "each",
            )


def check_replicas(model: nn.Module, world: World) -> None:
    """Raise StepError unless all replicas have the same modules on the same devices. Collective.

    Each bucket is on one device, at the same place in the list of devices on all ranks: NCCL has a
    communicator for each device of a rank, and pairs the devices by their order.
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
            found="the ranks have different parts of it on the first, second, … of their devices"
            if differ
            else "torch's DDP needs all parameters on devices of one type",
            fix="use shoal.init(devices_per_rank=2) and Net(*world.devices) on every rank"
            if differ
            else "use only GPUs or only the CPU, or start one process",
        )


def _described(model: nn.Module, span: DeviceSpan) -> str:
    by = "by shoal.DevicePlacement" if hasattr(model, ATTRIBUTE) else "manually"
    places = ", ".join(map(str, span.devices))
    return f"a {type(model).__name__} that was placed {by} on {places}"

"""Options of device placement: modules on several devices of one process (naive model parallel)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from shoal.distributed.world import World
from shoal.strategies.device_placement.device_map import DeviceSlot, assigned, balance, place
from shoal.strategies.device_placement.transfer_hooks import arrange
from shoal.strategies.multi_device import ATTRIBUTE, DeviceSpan
from shoal.util import accelerator
from shoal.util.arguments import is_integer
from shoal.util.errors import StepError

MAP = 'shoal.DevicePlacement({"encoder": 0, "decoder": 1})'
"""An example of a device map, for errors."""


@dataclass(frozen=True)
class DevicePlacement:
    """Modules on several devices of one process (`device_map`, naive model parallelism).

    Hooks move the inputs of these modules to their devices. Outputs stay on the device of their module,
    and the loss gets its micro-batch on the device of the model's output. Put this strategy before the
    one that sums gradients. If you pass it alone, Shoal adds `DDP`.

    Args:
        device_map: A mapping from modules to devices, or a sequence of devices over which Shoal
            balances the memory of parameters and buffers. A device is a name such as "cuda:1", or the
            number of a device of the rank, so that one map is right on every rank. A module is given by
            its name, as in `named_modules()`; `*` stands for one part of a name. A submodule is on the
            device of its parent unless the map contains it too; "" is the model itself. None means all
            devices of the rank, `shoal.init(devices_per_rank=2)`. Default: None.
        in_flight: Number of forward passes before the first backward pass, so that the devices compute
            different micro-batches at the same time (GPipe: Huang et al. 2019). None means all
            micro-batches of a batch if there are several devices. Default: None.

    Raises:
        StepError: If the map is malformed, or a device does not exist or belongs to another rank.

    Examples:
        >>> mapped = shoal.DevicePlacement({"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 1})
        >>> balanced = [shoal.DevicePlacement(("cuda:0", "cuda:1"), in_flight=4), shoal.DDP()]
    """

    axes: ClassVar[tuple[str, ...]] = ()
    several: ClassVar[bool] = True

    device_map: Mapping[str, str | int | torch.device] | Sequence[str | int | torch.device] | None = (
        None
    )
    in_flight: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.device_map, Mapping | Sequence | None) or isinstance(
            self.device_map, str
        ):
            found = (
                f"a {type(self.device_map).__name__} is neither a mapping from modules to devices nor "
                "a sequence of devices"
            )
        elif isinstance(self.device_map, Mapping) and not all(
            isinstance(n, str) for n in self.device_map
        ):
            found = "the keys of a device map are names of modules, which are strings"
        elif self.device_map is not None and not self.device_map:
            found = "the device map is empty"
        elif self.in_flight is not None and not is_integer(self.in_flight, least=1):
            found = f"in_flight={self.in_flight!r} is not a number of micro-batches, 1 or more"
        else:
            return
        raise StepError(
            given=repr(self),
            found=found,
            fix=f"use {MAP}, or shoal.DevicePlacement(('cuda:0', 'cuda:1'), in_flight=4)",
        )

    def spread(self, model: nn.Module, world: World) -> None:
        """Move the modules to their devices, and add hooks that move their inputs."""
        given = f"shoal.DevicePlacement({'' if self.device_map is None else repr(self.device_map)})"
        if hasattr(model, ATTRIBUTE):
            raise StepError(
                given=f"two shoal.DevicePlacement(…) for one {type(model).__name__}",
                found="each of them would place the complete model",
                fix="use one shoal.DevicePlacement(…) with a map of all modules",
            )
        if isinstance(self.device_map, Mapping):
            entries = {
                n: DeviceSlot(*self._located(w, world, given)) for n, w in self.device_map.items()
            }
        else:
            entries = self._balanced(model, world, given)
        spots = assigned(model, entries, given)
        place(model, spots)
        hooked = len({*spots.values()}) > 1 or {s.device for s in spots.values()} != {world.device}
        if hooked:
            arrange(model, {module: spot.device for module, spot in spots.items()})
        object.__setattr__(model, ATTRIBUTE, DeviceSpan(in_flight=self.in_flight, hooked=hooked))

    def _balanced(self, model: nn.Module, world: World, given: str) -> dict[str, DeviceSlot]:
        own = range(len(world.devices))
        listed: Sequence[Any] = own if self.device_map is None else list(self.device_map)
        if len(listed) < 2:
            raise StepError(
                given=given,
                found=f"only one device, {world.devices[0]}"
                if self.device_map is None
                else "only one device",
                fix="shoal.init(devices_per_rank=2), or shoal.DevicePlacement(('cuda:0', 'cuda:1'))",
            )
        met: Counter[torch.device] = Counter()
        spots = []
        for where in listed:
            device, _ = self._located(where, world, given)
            spots.append(DeviceSlot(device, met[device]))
            met[device] += 1
        entries, held = balance(model, spots, given)
        parts = [f"on {spot.device} {part}" for spot, part in zip(spots, held, strict=True)]
        world.print(f"shoal: shoal.DevicePlacement() puts {'; '.join(parts)}")
        return entries

    def _located(self, where: Any, world: World, given: str) -> tuple[torch.device, int]:
        """Return the device, and how often this rank's device list contains it before that place."""
        if isinstance(where, int) and not isinstance(where, bool):
            if not 0 <= where < len(world.devices):
                own = ", ".join(map(str, world.devices))
                raise StepError(
                    given=given,
                    found=f"no device {where}: this rank has {len(world.devices)}, numbered from 0: "
                    f"{own}",
                    fix=f"shoal.init(devices_per_rank={max(where, 0) + 1})",
                )
            device = world.devices[where]
            return device, world.devices[:where].count(device)
        return _named(where, world, given), 0


def _named(where: Any, world: World, given: str) -> torch.device:
    """Return the device of that name. Raise StepError if it is missing or belongs to another rank."""
    fix = f"the number of a device of the rank: {MAP}"
    found = ""
    try:
        device = torch.device(where) if isinstance(where, str | torch.device) else torch.device("meta")
        if accelerator.streams(device) is not None:
            visible = torch.get_device_module(device).device_count()
            index = device.index if device.index is not None else world.device.index or 0
            device = torch.device(device.type, index)
            found = "" if index < visible else f"no GPU {index}: {visible} visible, numbered from 0"
        elif device.type == "cpu":
            found = "" if not device.index else "the CPU is a single device without a number"
            device = torch.device("cpu")
        elif device.type == "meta":
            found = f"{where!r} is not a device that holds values"
        else:
            device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = f"{where!r}: {str(error).splitlines()[0].partition('. ')[0]}"
    if found:
        raise StepError(given=given, found=found, fix='use "cpu", "cuda:0", or ' + fix)
    alone = world.placement.local_size == 1 or accelerator.streams(device) is None
    if not alone and device not in world.devices:
        own = ", ".join(map(str, world.devices))
        raise StepError(
            given=given,
            found=f"{device} does not belong to this rank, which has {own}; "
            f"{world.placement.local_size} ranks run on this machine",
            fix=f"call shoal.init(devices_per_rank=2), and use {fix}",
        )
    return device

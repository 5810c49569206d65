"""Parts of a model on several devices of one process: model parallelism by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from shoal.distributed.world import World
from shoal.strategies.device_placement.device_map import Spot, assigned, balance, place
from shoal.strategies.device_placement.multi_device import ATTRIBUTE, Placing
from shoal.strategies.device_placement.transfer_hooks import arrange
from shoal.util.errors import StepError

MAP = 'shoal.DevicePlacement({"encoder": 0, "decoder": 1})'
"""What a map may look like, for those who are told."""


@dataclass(frozen=True)
class DevicePlacement:
    """Modules on devices of this process; what they are called with is moved to them.

    `device_map` is a map from modules to devices, or the devices themselves, over which the model is
    then balanced by the memory of its parameters and buffers; without it, those that each rank was
    given: `shoal.init(devices_per_rank=2)`. A device is a name such as "cuda:1", or a number, which
    counts the devices of the rank, so that the same map is right on every rank. A map has names as in
    `named_modules()`, in which `*` stands for one part of a name; modules inside of a named one are
    where it is, unless they are named too, and "" is the whole model.

        shoal.DevicePlacement({"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 1})
        shoal.DevicePlacement(("cuda:0", "cuda:1"))

    Inputs of these modules are moved by hooks, their outputs stay where they are, and the loss gets its
    micro-batch on the device of the model's output. `in_flight` micro-batches of a batch run forward
    before the first of them runs backward, so that GPUs compute different ones at once (GPipe: Huang et
    al. 2019); unless given, all where there are several devices. Comes before the strategy that sums
    gradients, `[shoal.DevicePlacement(…), shoal.DDP()]`; alone it is followed by that.
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
                f"a {type(self.device_map).__name__} is neither a map of modules nor several devices"
            )
        elif isinstance(self.device_map, Mapping) and not all(
            isinstance(n, str) for n in self.device_map
        ):
            found = "a map has names of modules, which are texts"
        elif self.device_map is not None and not self.device_map:
            found = "no device at all"
        elif self.in_flight is not None and not _positive(self.in_flight):
            found = f"in_flight={self.in_flight!r} is no number of micro-batches, 1 or more"
        else:
            return
        raise StepError(
            given=repr(self),
            found=found,
            fix=f"{MAP}, or shoal.DevicePlacement(('cuda:0', 'cuda:1'), in_flight=4)",
        )

    def spread(self, model: nn.Module, world: World) -> None:
        """Move the modules, and hook those that are called."""
        given = f"shoal.DevicePlacement({'' if self.device_map is None else repr(self.device_map)})"
        if hasattr(model, ATTRIBUTE):
            raise StepError(
                given=f"two of shoal.DevicePlacement(…) for one {type(model).__name__}",
                found="each of them would place all of it",
                fix="one, with a map of all modules",
            )
        if isinstance(self.device_map, Mapping):
            entries = {n: Spot(*self._located(w, world, given)) for n, w in self.device_map.items()}
        else:
            entries = self._balanced(model, world, given)
        spots = assigned(model, entries, given)
        place(model, spots)
        hooked = len({*spots.values()}) > 1 or {s.device for s in spots.values()} != {world.device}
        if hooked:
            arrange(model, {module: spot.device for module, spot in spots.items()})
        object.__setattr__(model, ATTRIBUTE, Placing(in_flight=self.in_flight, hooked=hooked))

    def _balanced(self, model: nn.Module, world: World, given: str) -> dict[str, Spot]:
        own = range(len(world.devices))
        listed: Sequence[Any] = own if self.device_map is None else list(self.device_map)
        if len(listed) < 2:
            raise StepError(
                given=given,
                found=f"one device, {world.devices[0]}" if self.device_map is None else "one device",
                fix="shoal.init(devices_per_rank=2), or shoal.DevicePlacement(('cuda:0', 'cuda:1'))",
            )
        met: Counter[torch.device] = Counter()
        spots = []
        for where in listed:
            device, _ = self._located(where, world, given)
            spots.append(Spot(device, met[device]))
            met[device] += 1
        entries, held = balance(model, spots, given)
        parts = [f"on {spot.device} {part}" for spot, part in zip(spots, held, strict=True)]
        world.print(f"shoal: shoal.DevicePlacement() puts {'; '.join(parts)}")
        return entries

    def _located(self, where: Any, world: World, given: str) -> tuple[torch.device, int]:
        """The device, and how many of this rank's before it are the same one."""
        if isinstance(where, int) and not isinstance(where, bool):
            if not 0 <= where < len(world.devices):
                own = ", ".join(map(str, world.devices))
                raise StepError(
                    given=given,
                    found=f"no device {where}: this rank has {len(world.devices)}, from 0 on: {own}",
                    fix=f"shoal.init(devices_per_rank={max(where, 0) + 1})",
                )
            device = world.devices[where]
            return device, world.devices[:where].count(device)
        return _named(where, world, given), 0


def _positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _named(where: Any, world: World, given: str) -> torch.device:
    """The device of that name, if it is there and no other rank's."""
    visible = torch.cuda.device_count()
    fix = f"a number, which counts the devices of a rank: {MAP}"
    found = ""
    try:
        device = torch.device(where) if isinstance(where, str | torch.device) else torch.device("meta")
        if device.type == "cuda":
            index = device.index if device.index is not None else world.device.index or 0
            device = torch.device("cuda", index)
            found = "" if index < visible else f"no GPU {index}: {visible} visible, numbered from 0"
        elif device.type == "cpu":
            found = "" if not device.index else "the CPU is one device, without numbers"
            device = torch.device("cpu")
        elif device.type == "meta":
            found = f"{where!r} is no device that holds values"
        else:
            device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = f"{where!r}: {str(error).splitlines()[0].partition('. ')[0]}"
    if found:
        raise StepError(given=given, found=found, fix='"cpu", "cuda:0", or ' + fix)
    if device.type == "cuda" and world.placement.local_size > 1 and device not in world.devices:
        own = ", ".join(map(str, world.devices))
        raise StepError(
            given=given,
            found=f"{device} is not this rank's, which has {own}; {world.placement.local_size} ranks "
            "share the machine",
            fix=f"shoal.init(devices_per_rank=2), and {fix}",
        )
    return device

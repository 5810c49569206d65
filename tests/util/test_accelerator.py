"""Other accelerators than CUDA, played by a device module: torch has one for each type."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import recordings
from shoal.distributed.device import choose_device, neighbours
from shoal.distributed.env_vars import placement
from shoal.distributed.seeds import random_state, set_random_state
from shoal.telemetry.step_timer import DeviceTimeline, Timeline, timeline_of
from shoal.util import accelerator

XPU = torch.device("xpu", 1)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The device module of four GPUs, which notes its calls."""
    calls: list[Any] = []
    found = SimpleNamespace(
        calls=calls,
        Stream=object,
        Event=lambda **_: SimpleNamespace(record=lambda: None),
        synchronize=lambda device: calls.append(("synchronize", device)),
        set_device=lambda device: calls.append(("set_device", device)),
        get_device_name=lambda device: f"GPU of {device}",
        memory_allocated=lambda device: 5,
        max_memory_allocated=lambda device: 7,
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 4,
        get_rng_state=lambda *_: torch.ones(3, dtype=torch.uint8),
        set_rng_state=lambda state, *_: calls.append(("set_rng_state", state.tolist())),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    return found


def test_what_shoal_asks_of_any_accelerator(module: SimpleNamespace) -> None:
    accelerator.synchronize(XPU)
    accelerator.select(XPU)
    accelerator.set_random_state(XPU, accelerator.random_state(XPU))
    drawn = ("set_rng_state", [1, 1, 1])
    assert module.calls == [("synchronize", XPU), ("set_device", XPU), drawn]
    assert accelerator.name(XPU) == "GPU of xpu:1"
    assert accelerator.memory(XPU) == {"device_memory": 5, "device_peak": 7}
    assert type(timeline_of(XPU)) is DeviceTimeline
    set_random_state(random_state())
    assert module.calls[-1] == drawn


def test_its_devices_go_by_local_rank(module: SimpleNamespace) -> None:
    recorded = recordings.load("torchrun")
    env = {"HOME": "/nowhere", **recorded.environments[-1]}
    one = placement(env, cpus=recorded.cpus[-1], commands=lambda: recorded.ancestors)
    for given in (None, "xpu"):
        assert choose_device(given, one).value == torch.device("xpu", one.local_rank)
    assert neighbours(XPU, 2) == (XPU, torch.device("xpu", 2))


def test_an_accelerator_without_streams_has_none_of_it(module: SimpleNamespace) -> None:
    """Apple's GPUs."""
    for name in ("Stream", "set_device", "max_memory_allocated"):
        delattr(module, name)
    accelerator.select(XPU)
    assert (module.calls, accelerator.random_state(XPU), accelerator.memory(XPU)) == ([], [], {})
    assert type(timeline_of(XPU)) is Timeline
    assert "xpu" not in random_state()


def test_the_cpu_is_no_accelerator() -> None:
    cpu = torch.device("cpu")
    accelerator.select(cpu)
    accelerator.synchronize(cpu)
    found = accelerator.name(cpu), accelerator.memory(cpu), accelerator.random_state(cpu)
    assert found == ("", {}, [])
    with accelerator.random_state_kept(cpu):
        torch.rand(1)

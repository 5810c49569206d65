"""Work on a device that the host does not wait for, with stand-ins for the device's streams."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.checkpoint import async_save
from shoal.checkpoint.async_save import Staging
from shoal.training import logged_values
from shoal.training.logged_values import LogQueue
from shoal.util import accelerator


def test_memory_is_pinned_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own allocator would take a power of two for it, and keep that."""
    registered: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: registered.update({address: size}) or flags,
        cudaHostUnregister=registered.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    buffer = accelerator.pinned(33_000_001, torch.device("cuda", 0))
    assert registered == {buffer.data_ptr(): 33_000_001}
    view = memoryview(buffer.numpy().data)
    del buffer
    gc.collect()
    assert registered, "its content can still be read"
    del view
    gc.collect()
    assert not registered


class Event:
    """An event of a device that is at work until `done` is set."""

    def __init__(self) -> None:
        self.done = False
        self.waited = 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited += 1
        self.done = True


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> Event:
    """CPU tensors are taken for those of a device with streams."""
    found = Event()
    stream = SimpleNamespace(record_event=lambda: found)
    module = SimpleNamespace(current_stream=lambda device: stream)
    monkeypatch.setattr(accelerator, "streams", lambda device: module)
    monkeypatch.setattr(logged_values, "streams", lambda device: module)
    monkeypatch.setattr(async_save, "is_accelerator", lambda device: True)
    monkeypatch.setattr(async_save, "pinned", lambda size, _: torch.empty(size, dtype=torch.uint8))
    return found


def test_the_writer_of_a_save_waits_for_its_copies_and_the_step_does_not(event: Event) -> None:
    staging = Staging()
    staging.fill({"weight": torch.ones(3), "scale": torch.zeros(2, dtype=torch.float64)})
    assert event.waited == 0
    data = b"".join(map(bytes, staging.blocks()))
    assert event.waited == 1
    assert data.endswith(b"\0" * 16 + bytes(torch.ones(3).numpy().data))
    staging.fill({"weight": torch.ones(3)})
    assert (len(staging.blocks()), staging.size) == (2, len(staging.blocks()[0]) + 12)


class Written:
    """What a run's events and curves have got."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, *row: Any) -> None:
        self.rows.append(row)


def test_numbers_of_a_device_are_written_in_order_when_they_have_arrived(event: Event) -> None:
    events, curves = Written(), Written()
    queue = LogQueue(events, curves)  # type: ignore[arg-type]
    queue.add({"rate": 0.5}, 1, 8)
    queue.add({"loss": torch.tensor(2.0), "count": torch.tensor([3])}, 2, 16)
    queue.add({"rate": 0.25}, 3, 24)
    assert curves.rows == [({"rate": 0.5}, 1)]
    queue.write(wait=False)
    assert (len(curves.rows), event.waited) == (1, 0)
    event.done = True
    queue.write(wait=False)
    assert event.waited == 0
    assert curves.rows[1:] == [({"loss": 2.0, "count": 3.0}, 2), ({"rate": 0.25}, 3)]
    assert events.rows[1] == ("log", {"step": 2, "position": 16, "loss": 2.0, "count": 3.0})


def test_the_end_of_a_run_waits_for_its_numbers(event: Event) -> None:
    curves = Written()
    queue = LogQueue(Written(), curves)  # type: ignore[arg-type]
    queue.add({"loss": torch.tensor(2.0)}, 1, 8)
    queue.write(wait=True)
    assert (curves.rows, event.waited) == ([({"loss": 2.0}, 1)], 1)

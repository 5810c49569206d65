"""Tests of a real accelerator: when they skip, and how they notice a host that waits for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., Any])


def accelerator_type() -> str:
    """The type of this machine's accelerator, such as "cuda"; empty where torch finds none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def why_skipped(kind: str = "", count: int = 1) -> str:
    """Why a test of this many accelerators, maybe of one type, can't run here; empty if it can."""
    found = accelerator_type()
    if not found or (kind and found != kind):
        return f"needs an accelerator{f' ({kind})' if kind else ''}: torch finds {found or 'none'}"
    here = torch.accelerator.device_count()
    return f"needs an accelerator for each of {count} ranks: {here} here" if here < count else ""


def on_accelerator(kind: str = "", count: int = 1) -> Callable[[Test], Test]:
    """Mark a test that has nothing to do on a CPU."""
    reason = why_skipped(kind, count)
    skip = pytest.mark.skipif(bool(reason), reason=reason)
    return lambda test: pytest.mark.gpu(skip(test))


@contextlib.contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """An operation that lets the host wait for CUDA raises inside, with its line; elsewhere nothing."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def counted_waits(device: torch.device) -> Iterator[list[str]]:
    """A list to which each operation is added that lets the host wait for CUDA; elsewhere none is."""
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [
        f"{each.filename}:{each.lineno}"
        for each in caught
        if "called a synchronizing" in str(each.message)
    ]


def keep_busy(device: torch.device) -> None:
    """Give a device some tenths of a second of work, behind which everything else then queues."""
    if device.type == "cpu":
        return
    heavy = torch.randn(8192, 8192, device=device)
    for _ in range(20):
        heavy = torch.tanh(heavy @ heavy)

"""When tests of accelerators skip, and how they notice waits, on an accelerator that does not exist."""

from __future__ import annotations

import warnings

import pytest
import torch

from helpers.accelerators import counted_waits, no_waits, why_skipped

CUDA = torch.device("cuda", 0)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes that torch is given, which warns as it does of the first."""
    given: list[str] = []

    def take(mode: str) -> None:
        warnings.warn("a prototype, which does not detect all synchronizing operations", stacklevel=2)
        given.append(mode)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", take)
    return given


def test_waits_are_errors_inside_only(modes: list[str]) -> None:
    with (
        pytest.raises(ValueError, match="wait"),
        warnings.catch_warnings(action="ignore"),
        no_waits(CUDA),
    ):
        raise ValueError("a wait")
    assert modes == ["error", "default"]
    with no_waits(torch.device("cpu")):
        pass
    assert modes == ["error", "default"]


def test_waits_are_counted_with_their_lines(modes: list[str]) -> None:
    with counted_waits(CUDA) as found:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert [each.partition("test_accelerators.py:")[1] != "" for each in found] == [True, True]
    assert modes == ["warn", "default"]


@pytest.mark.parametrize(
    ("here", "count", "kind", "needed", "reason"),
    [
        (None, 0, "", 1, "needs an accelerator: torch finds none"),
        ("xpu", 2, "cuda", 1, "needs an accelerator (cuda): torch finds xpu"),
        ("cuda", 1, "cuda", 2, "needs an accelerator for each of 2 ranks: 1 here"),
        ("cuda", 2, "cuda", 2, ""),
        ("xpu", 1, "", 1, ""),
    ],
)
def test_why_a_test_skips(
    monkeypatch: pytest.MonkeyPatch, here: str | None, count: int, kind: str, needed: int, reason: str
) -> None:
    found = None if here is None else torch.device(here)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    assert why_skipped(kind, needed) == reason

"""Hints about speed: from given facts, once, and only on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.distributed import speed_hints as module
from shoal.distributed.speed_hints import SpeedFacts, SpeedHints, facts_of, speed_hints
from shoal.distributed.world import World
from shoal.util import accelerator

H100 = SpeedFacts(capability=(9, 0), allocator="", products="none")
ON = replace(H100, allocator="expandable_segments:True", products="tf32")
SEGMENTS, TF32 = "expandable_segments", 'torch.set_float32_matmul_precision("high")'


def test_nothing_is_said_where_all_is_on() -> None:
    assert speed_hints(ON) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(ON, unfused="AdamW"), ["torch.optim.AdamW(…, fused=True)"]),
        (replace(ON, waits="Lion can't skip"), ["waits for the host in each step: Lion can't skip"]),
        (replace(ON, allocator=""), [SEGMENTS]),
        (replace(ON, allocator="max_split_size_mb:64"), [SEGMENTS]),
        (replace(ON, allocator="expandable_segments:False"), []),  # the user has decided
        (replace(ON, allocator="backend:cudaMallocAsync"), []),  # which has no segments
        (replace(ON, products="none"), [TF32]),
        (replace(ON, products="ieee"), []),  # the user has decided
        (replace(ON, products="none", float32=False), []),  # mixed precision has no such products
        (replace(ON, products="none", capability=(7, 5)), []),  # a T4 has no TF32
        (replace(H100, capability=None), []),  # not NVIDIA's
        (replace(H100, unfused="SGD"), ["torch.optim.SGD(…, fused=True)", SEGMENTS, TF32]),
    ],
)
def test_a_hint_says_what_to_write(facts: SpeedFacts, words: list[str]) -> None:
    hints = speed_hints(facts)
    assert len(hints) == len(words)
    for hint, word in zip(hints, words, strict=True):
        assert word in hint


def test_the_facts_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    cpu = torch.device("cpu")
    assert facts_of(cpu) == SpeedFacts(capability=None, allocator="", products="none")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert facts_of(torch.device("cuda", 0)) == ON
    finally:
        torch.set_float32_matmul_precision(before)


def test_each_hint_is_printed_once(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = SpeedHints(world)
    told.tell(float32=True, unfused="AdamW", waits="")
    assert capsys.readouterr().out == ""  # a CPU
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    monkeypatch.setattr(module, "facts_of", lambda device: H100)
    told.tell(float32=True, unfused="AdamW", waits="")
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert all(words in line for words in ("AdamW(…, fused=True)", SEGMENTS, TF32))
    told.tell(float32=True, unfused="SGD", waits="")
    assert capsys.readouterr().out.count(";") == 0
    told.tell(float32=True, unfused="SGD", waits="")
    assert capsys.readouterr().out == ""

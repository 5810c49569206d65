"""What a rank uses: the thread that looks, GPUs as NVML tells them, peaks, FLOPs."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from helpers.commands import wait_for
from shoal.distributed.seeds import random_state
from shoal.telemetry.events import Events
from shoal.telemetry.usage.flops import FlopCounting, peak_here, peak_of
from shoal.telemetry.usage.sampler import GpuMeter, PeriodicTask, Usage, UsageSampler, noting
from shoal.training.run_monitor import RunMonitor


def test_a_job_that_fails_is_told_once_and_the_others_go_on() -> None:
    told: list[str] = []
    ran: list[float] = []

    def fail() -> None:
        raise OSError("no such thing")

    jobs = [
        PeriodicTask(name="this", seconds=0.001, run=fail, share=1.0, ends=True),
        PeriodicTask(name="that", seconds=0.001, run=lambda: ran.append(0.0), share=1.0),
    ]
    sampler = UsageSampler(jobs, step=lambda: 7, say=told.append)
    wait_for(lambda: len(ran) > 3 and bool(told))
    sampler.stop()
    assert told == ["shoal: this is no longer recorded: OSError: no such thing"]


def test_what_is_noted_has_its_time_and_step_and_waits_to_be_taken() -> None:
    job = PeriodicTask(name="a", seconds=3600.0, run=noting("usage", lambda: {"rss": 1}), ends=True)
    before, threads = time.time(), set(threading.enumerate())
    sampler = UsageSampler([job], step=lambda: 7, say=pytest.fail)
    assert list(sampler.taken()) == []
    sampler.stop()
    sampler.stop()
    ((kind, fields),) = sampler.taken()
    assert (kind, fields["step"], fields["rss"]) == ("usage", 7, 1)
    assert before - 1 <= fields["t"] <= time.time()
    assert list(sampler.taken()) == []
    assert set(threading.enumerate()) <= threads


def test_a_job_that_takes_long_is_run_rarely() -> None:
    counts = {"cheap": 0, "dear": 0}

    def dear() -> None:
        counts["dear"] += 1
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    def cheap() -> None:
        counts["cheap"] += 1

    jobs = [
        PeriodicTask(name="dear", seconds=0.001, run=dear, share=0.0005),
        PeriodicTask(name="cheap", seconds=0.001, run=cheap, share=1.0),
    ]
    sampler = UsageSampler(jobs, step=lambda: 0, say=pytest.fail)
    wait_for(lambda: counts["cheap"] >= 20 and counts["dear"] >= 1)
    sampler.stop()
    assert counts["dear"] == 1


def test_a_process_tells_its_memory_and_cores() -> None:
    usage = Usage(torch.device("cpu"))
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    fields = usage.fields()
    assert 0.5 < fields["rss"] / psutil.Process().memory_info().rss < 2
    assert 0 < fields["cpu"] < 64
    assert set(fields) == {"rss", "cpu"}


class Nvml:
    """NVML with one GPU, which has no power meter."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.energy = 5_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        return self.energy

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        raise self.NVMLError("not supported")

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=25)


def test_a_meter_tells_what_the_gpu_tells() -> None:
    nvml = Nvml()
    meter = GpuMeter(nvml, "a GPU")
    nvml.energy = 12_000
    assert meter.fields() == {"energy": 7.0, "utilization": 0.25}
    assert GpuMeter.of(torch.device("cpu")) is None


def test_the_meter_of_a_slice_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML knows a slice (MIG) by another prefix than a GPU."""

    class Sliced(Nvml):
        def nvmlInit(self) -> None: ...  # noqa: N802

        def nvmlDeviceGetHandleByUUID(self, name: bytes) -> str:  # noqa: N802
            if name != b"MIG-5f":
                raise self.NVMLError("not found")
            return "the slice"

    monkeypatch.setitem(sys.modules, "pynvml", Sliced())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="5f"))
    meter = GpuMeter.of(torch.device("cuda", 0))
    assert meter is not None
    assert meter.fields()["utilization"] == 0.25


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "teraflops", "reason"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312.0, "bfloat16, dense: NVIDIA A100"),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156.0, "tf32, dense: NVIDIA A100 data sheet"),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5, "fp32, dense: NVIDIA A100"),
        ("NVIDIA H100 80GB HBM3", torch.float16, False, 989.5, "float16, dense: NVIDIA H100"),
        ("NVIDIA H200", torch.bfloat16, False, 989.5, "bfloat16, dense: NVIDIA H200"),
        ("Tesla V100-SXM2-16GB", torch.float16, False, 125.0, "float16, dense: NVIDIA V100"),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, False, None, "no figure for bfloat16"),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, False, 165.2, "Ada GPU architecture"),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, False, None, "no data sheet"),
        ("AMD Instinct MI250X", torch.float16, True, 191.5, "float16, dense: AMD Instinct MI250X"),
        ("NVIDIA A100-SXM-64GB", torch.bfloat16, False, None, "no data sheet"),
        ("NVIDIA A10G", torch.bfloat16, False, None, "no data sheet of 'NVIDIA A10G'"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.bfloat16, False, None, "a part of a GPU"),
        ("NVIDIA GH200 480GB", torch.float64, False, None, "no figure for float64"),
    ],
)
def test_peaks_are_those_of_data_sheets_or_unknown(
    name: str, dtype: torch.dtype, tf32: bool, teraflops: float | None, reason: str
) -> None:
    peak = peak_of(name, dtype, tf32=tf32)
    assert peak.value == (None if teraflops is None else teraflops * 1e12)
    assert reason in peak.reason
    assert peak_here(torch.device("cpu"), torch.float32).value is None  # which nobody guesses


SWITCHED = """
import torch
from shoal.telemetry.usage.flops import tf32_allowed

found = [tf32_allowed()]
torch.set_float32_matmul_precision("high")
found.append(tf32_allowed())
for newer in ("ieee", "tf32"):
    torch.backends.cuda.matmul.fp32_precision = newer
    found.append(tf32_allowed())
print(found)
"""


@pytest.mark.full
def test_whether_tf32_is_allowed_is_known_by_any_switch() -> None:
    done = subprocess.run([sys.executable, "-c", SWITCHED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True, False, True]"


def test_a_linear_model_counts_as_its_formula() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    counting = FlopCounting()
    with counting:
        model(torch.ones(4, 5)).sum().backward()
    forward = 2 * 4 * (5 * 7 + 7 * 3)
    into_weights, into_hidden = forward, 2 * 4 * 7 * 3
    assert counting.flops == forward + into_weights + into_hidden


def test_what_no_formula_fits_is_said_and_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> int:
        raise AssertionError("shapes")

    packet = torch.ops.aten.mm
    monkeypatch.setitem(torch.utils.flop_counter.flop_registry, packet, broken)
    counting = FlopCounting()
    with counting:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.sum() == 8
    assert counting.flops is None
    assert "aten.mm" in (counting.failed or "")


class Noisy(nn.Module):
    """All that a step could disturb: a convolution, BatchNorm's buffers, dropout's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4 * 6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.convolution(x.unsqueeze(1)))
        out: torch.Tensor = self.out(F.dropout(hidden.flatten(1), training=self.training))
        return out


def trained(world: shoal.World, *, counted: bool) -> list[Any]:
    """Two steps, and all that they have left behind."""
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(Noisy(), world)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters()), shoal.Task(summed))
    data = torch.ones(8, 8), torch.ones(8, 2)
    for batch in shoal.Loader(data, world, batch_size=4).epochs(1):
        if counted:
            step.counting = FlopCounting()
        step(batch)
    return [*model.state_dict().values(), random_state()["torch"]]


def test_counting_a_step_changes_nothing(world: shoal.World) -> None:
    pairs = zip(trained(world, counted=False), trained(world, counted=True), strict=True)
    assert all(torch.equal(plain, seen) for plain, seen in pairs)


def summed(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.mse_loss(output, batch[1], reduction="sum"), len(output)


def test_the_thread_of_a_run_that_is_dropped_ends(world: shoal.World, tmp_path: Path) -> None:
    def begin() -> Any:
        model = shoal.parallelize(nn.Linear(8, 2), world)
        step = shoal.Step(model, torch.optim.SGD(model.parameters()), shoal.Task(summed))
        loader = shoal.Loader((torch.ones(8, 8),), world, batch_size=4)
        observer = RunMonitor(world, tmp_path, {"step": step}, loader, Events(tmp_path / "e"), None)
        observer.begin()
        return observer

    before = set(threading.enumerate())
    observer = begin()
    (thread,) = set(threading.enumerate()) - before
    del observer
    gc.collect()
    wait_for(lambda: not thread.is_alive())

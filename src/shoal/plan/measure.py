"""A machine file from measurements of this device."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shoal.bench.collectives.machine_file import (
    CollectiveSeries,
    MachineFile,
    read_machine_file,
)
from shoal.bench.processor import processor_name
from shoal.plan.collectives import BASE_LATENCY
from shoal.plan.machines import RANGES, Machine, parse_machine
from shoal.plan.traced_work import TracedWork
from shoal.telemetry.collective_stats import bus_factor
from shoal.util import accelerator
from shoal.util.errors import ShoalError

_SAMPLES, _SECONDS = 5, 0.5
"""The smallest number of calls of each measurement, and the seconds that they take together."""
_EDGE = {"cpu": 1024}
"""Rows and columns of the square product that measures the peak; 8192 on accelerators."""


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Bytes/s within a node and between nodes, as options or files of `shoal bench comm` give them.

    The latencies are seconds of one step of a collective, if files give them. `staging` is the seconds
    for each byte of a full tensor in which Gloo copies it in an all-gather or a reduce-scatter.
    """

    link: float | None
    network: float | None
    link_latency: float | None = None
    network_latency: float | None = None
    staging: float | None = None
    per_node: int = 1
    """The largest number of ranks of a node in the files."""


def read_rates(files: Sequence[Path], link: float | None, network: float | None) -> LinkRates:
    """Return bus bandwidth, unless GB/s are given, latency and staging of collectives in machine files.

    A file whose ranks are on one host has `link`, any other `network`, per rank of a host. Staging is
    that within a host, if a file has it. Rates of Gloo within a host are those of ranks that each have
    a core.
    """
    rates: dict[str, Any] = {"link": None if link is None else link * 1e9}
    rates["network"] = None if network is None else network * 1e9
    for path in files:
        found = read_machine_file(path)
        name = "link" if len(set(found.hosts)) == 1 else "network"
        bandwidth, latency = _ring_rates(path, found)
        turns = _turns(found)
        bandwidth, latency = bandwidth * turns, latency / turns
        rates["per_node"] = max(rates.get("per_node", 1), *Counter(found.hosts).values())
        if rates[name] is None:
            rates[name] = bandwidth
        rates[f"{name}_latency"] = latency
        staging = _staging(found)
        if staging is not None and (name == "link" or "staging" not in rates):
            rates["staging"] = staging / turns
    return LinkRates(**rates)


def _ring_rates(path: Path, found: MachineFile) -> tuple[float, float]:
    """Return the bus bandwidth of a rank, and the seconds of a step of a ring.

    The smallest and the largest message give both. A line through all sizes would deviate at the ends:
    short messages pass a limited link at once.
    """
    per_host = max(found.hosts.count(host) for host in found.hosts)
    several = len(set(found.hosts)) > 1
    for series in found.series:
        if series.operation != "all_reduce" or not _has_sizes(series):
            continue
        bus = bus_factor("all_reduce", series.ranks) / _seconds_per_byte(series)
        least = min(series.points, key=lambda point: point.bytes)
        latency = (least.seconds - BASE_LATENCY) / (2 * (series.ranks - 1))
        return bus / per_host if several else bus, latency
    raise ShoalError(
        given=f"--comm {path}",
        found="it has no all_reduce of two sizes",
        fix="measure again: shoal bench comm --operations all_reduce -o FILE",
    )


def _turns(found: MachineFile) -> float:
    """Return how many of the ranks of one host took turns on a core, where Gloo copied the bytes."""
    gloo = all(series.backend == "gloo" and series.memory == "cpu" for series in found.series)
    if len(set(found.hosts)) > 1 or not gloo:
        return 1.0
    return max(1.0, len(found.hosts) / len(os.sched_getaffinity(0)))


def _has_sizes(series: CollectiveSeries) -> bool:
    return len({point.bytes for point in series.points}) > 1


def _seconds_per_byte(series: CollectiveSeries) -> float:
    """Return the seconds that each byte adds, between the smallest and the largest message."""
    points = sorted(series.points, key=lambda point: point.bytes)
    seconds = max(1e-9, points[-1].seconds - points[0].seconds)
    return seconds / (points[-1].bytes - points[0].bytes)


def _staging(found: MachineFile) -> float | None:
    """Return the seconds for each byte that Gloo's all-gathers and reduce-scatters take to copy it.

    Without copies, an all-gather would take half of the time of an all-reduce, and a reduce-scatter
    as long as an all-reduce.
    """
    each = {
        series.operation: _seconds_per_byte(series)
        for series in found.series
        if series.backend == "gloo" and series.memory == "cpu" and _has_sizes(series)
    }
    if "all_reduce" not in each:
        return None
    sent = {"all_gather": each["all_reduce"] / 2, "reduce_scatter": each["all_reduce"]}
    copies = [max(0.0, each[operation] - sent[operation]) for operation in sent.keys() & each.keys()]
    return fmean(copies) if copies else None


def measure_machine(name: str, rates: LinkRates, devices: int) -> Machine:
    """Measure products, memory, attention and the host on this device, and return the machine.

    Raises ShoalError if the rate of a link is unknown.
    """
    missing = [key for key in ("link", "network") if getattr(rates, key) is None]
    if missing:
        raise ShoalError(
            given="shoal bench machine",
            found=f"the {' and the '.join(missing)} between ranks can't be measured by one process",
            fix="shoal bench comm -n 2 -o comm.json, then shoal bench machine --comm comm.json "
            "--network GB/s",
        )
    device = torch.device(accelerator.current()[0] or "cpu")
    edge = _EDGE.get(device.type, 8192)
    half = _product_rate(device, torch.bfloat16, (edge, edge, edge))
    single = _product_rate(device, torch.float32, (edge, edge, edge))
    # Ratios hold for the numbers in which a device trains.
    dtype, best = (torch.float32, single) if device.type == "cpu" else (torch.bfloat16, half)
    thin = _product_rate(device, dtype, (edge, edge, edge // 4))
    copied, added = _memory_rates(device, edge)
    table: dict[str, object] = {
        "half": half / 1e12,
        "fp32": single / 1e12,
        "memory": _memory_bytes(device) / 1e9,
        "memory_bandwidth": copied / 1e9,
        "link": (rates.link or 0.0) / 1e9,
        "network": (rates.network or 0.0) / 1e9,
        "devices": devices,
        "source": f"shoal bench machine, {datetime.now(UTC):%Y-%m-%d}, "
        f"{accelerator.name(device) or processor_name() or 'unknown processor'}",
        "efficiency": {
            key: _limited(key, value)
            for key, value in {
                "product": thin / best,
                "convolution": _convolution_rate(device, dtype) / best,
                "attention": _attention_rate(device, dtype) / best,
                "memory": added / copied,
                "link": 1.0,
                "network": 1.0,
                "host": _host_seconds(device),
                "link_latency": rates.link_latency,
                "network_latency": rates.network_latency,
                "staging": _staging_rate(rates.staging, copied) if device.type == "cpu" else None,
            }.items()
            if value is not None
        },
    }
    if device.type == "cpu":
        table |= {"cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        table["units"] = torch.cuda.get_device_properties(device).multi_processor_count
    return parse_machine(name, table)


def machine_toml(machine: Machine) -> str:
    """Return a machine in the form of the catalogue and of the files that `--machine` takes."""
    rates: tuple[str, ...] = ("half", "fp32", "memory", "memory_bandwidth", "link", "network")
    rates = rates if machine.tf32 is None else (*rates, "tf32")
    scale = {"half": 1e12, "fp32": 1e12, "tf32": 1e12}
    lines = [f"[{machine.name}]"]
    lines += [f"{key} = {getattr(machine, key) / scale.get(key, 1e9):.6g}" for key in rates]
    lines += [f"devices = {machine.devices}"]
    for key in ("units", "cores"):
        value = getattr(machine, key)
        lines += [] if value is None else [f"{key} = {value}"]
    lines += [] if machine.cores is None else [f"threads = {machine.threads}"]
    source = machine.source.replace("\\", "\\\\").replace('"', '\\"')
    lines += [f'source = "{source}"', "", f"[{machine.name}.efficiency]"]
    lines += [f"{key} = {getattr(machine.efficiency, key):.4g}" for key in RANGES]
    return "\n".join(lines) + "\n"


def _staging_rate(seconds: float | None, copied: float) -> float | None:
    """Return the rate of Gloo's copies relative to `copied`, in bytes/s, if it was measured."""
    if seconds is None:
        return None
    return 2 / (seconds * copied) if seconds else RANGES["staging"][1]


def _limited(key: str, value: float) -> float:
    low, high = RANGES[key]
    return min(high, max(low, value))


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls, after one that warms up.

    On a machine that others share, few successive calls may all be slow.
    """
    call()
    times: list[float] = []
    while len(times) < _SAMPLES or sum(times) < _SECONDS:
        _wait(device)
        begun = perf_counter()
        call()
        _wait(device)
        times.append(perf_counter() - begun)
    return min(times)


def _wait(device: torch.device) -> None:
    module = accelerator.streams(device)
    if module is not None:
        module.synchronize()


def _product_rate(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    """Return FLOP/s of a product of this many rows, columns and terms of each sum."""
    rows, columns, inner = shape
    left = torch.ones(rows, inner, device=device, dtype=dtype)
    right = torch.ones(inner, columns, device=device, dtype=dtype)
    return 2 * rows * columns * inner / _seconds(device, lambda: left @ right)


def _memory_rates(device: torch.device, edge: int) -> tuple[float, float]:
    """Return bytes/s of a copy and of a sum, of tensors that no cache holds."""
    source = torch.ones(16 * edge * edge, device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copied = 2 * size / _seconds(device, lambda: target.copy_(source))
    added = 3 * size / _seconds(device, lambda: torch.add(source, target, out=target))
    return copied, added


def _attention_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of causal attention, which skips half of the scores."""
    heads, seq, width = 8, 1024, 64
    one = torch.ones(1, heads, seq, width, device=device, dtype=dtype)
    seconds = _seconds(device, lambda: F.scaled_dot_product_attention(one, one, one, is_causal=True))
    return 4 * heads * seq * seq * width * 0.5 / seconds


def _convolution_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of a convolution of 3 x 3 pixels, forward and backward."""
    batch, width, edge = (8, 64, 56) if device.type == "cpu" else (64, 256, 56)
    image = torch.ones(batch, width, edge, edge, device=device, dtype=dtype, requires_grad=True)
    weight = torch.ones(width, width, 3, 3, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.ones_like(image)

    def call() -> None:
        torch.autograd.grad(F.conv2d(image, weight, padding=1), (image, weight), upstream)

    return 3 * 2 * batch * edge * edge * width * width * 9 / _seconds(device, call)


def _host_seconds(device: torch.device) -> float:
    """Return the seconds of the host for one operation, on average over forward and backward passes."""
    layers = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(8))
    ).to(device)
    rows = torch.ones(2, 8, device=device)

    def call() -> None:
        torch.autograd.grad(layers(rows).sum(), tuple(layers.parameters()))

    with TracedWork(lambda: "") as traced:
        call()
    operations: float = sum(each.work.operations for each in traced.segments)
    return _seconds(device, call) / operations


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

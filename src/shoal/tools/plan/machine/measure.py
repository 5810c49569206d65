"""A machine file from measurements of this device."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from shoal.telemetry.collective_stats import bus_factor
from shoal.tools.bench.collectives.machine_file import (
    CollectiveSeries,
    MachineFile,
    read_machine_file,
)
from shoal.tools.bench.processor import processor_name
from shoal.tools.plan.machine.machines import (
    BASE_LATENCY,
    RANGES,
    SCALE,
    Machine,
    limited_efficiency,
    parse_machine,
)
from shoal.tools.plan.work.traced_work import TracedWork
from shoal.util import accelerator
from shoal.util.clock import CLOCK, utc_now
from shoal.util.errors import ShoalError

_CALLS, _SECONDS = 3, 2.5
"""The smallest number of calls of each function, and the smallest sum of their seconds."""
_TURN = 0.1
"""Seconds of the calls of a function in each round; its first call brings values into the caches."""
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


class TimedCall(NamedTuple):
    """A function to time, and the FLOPs, bytes or operations of a call (`amount`)."""

    amount: float
    call: Callable[[], object]


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


def check_rates(rates: LinkRates) -> None:
    """Raise ShoalError if the rate of a link is unknown."""
    missing = [key for key in ("link", "network") if getattr(rates, key) is None]
    if missing:
        raise ShoalError(
            given="shoal bench machine",
            found=f"the {' and the '.join(missing)} between ranks can't be measured by one process",
            fix="shoal bench comm -n 2 -o comm.json, then shoal bench machine --comm comm.json "
            "--network GB/s",
        )


def measure_machine(name: str, rates: LinkRates, devices: int) -> Machine:
    """Measure products, memory, attention, convolutions and the host, and return the machine."""
    device = torch.device(accelerator.current()[0] or "cpu")
    # Ratios hold for the numbers in which a device trains.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    measured = _measurements(device, dtype)
    seconds = _fastest(device, {key: each.call for key, each in measured.items()})
    rate = {key: each.amount / seconds[key] for key, each in measured.items()}
    best = rate["fp32" if dtype == torch.float32 else "half"]
    table: dict[str, object] = {
        "half": rate["half"] / 1e12,
        "fp32": rate["fp32"] / 1e12,
        "memory": _memory_bytes(device) / 1e9,
        "memory_bandwidth": rate["copy"] / 1e9,
        "link": (rates.link or 0.0) / 1e9,
        "network": (rates.network or 0.0) / 1e9,
        "devices": devices,
        "source": f"shoal bench machine, {utc_now():%Y-%m-%d}, "
        f"{accelerator.name(device) or processor_name() or 'unknown processor'}",
        "efficiency": {
            key: limited_efficiency(key, value)
            for key, value in {
                "product": rate["thin"] / best,
                "convolution": rate["convolution"] / best,
                "attention": rate["attention"] / best,
                "memory": rate["sum"] / rate["copy"],
                "link": 1.0,
                "network": 1.0,
                "host": 1 / rate["host"],
                "link_latency": rates.link_latency,
                "network_latency": rates.network_latency,
                "staging": _staging_rate(rates.staging, rate["copy"]) if device.type == "cpu" else None,
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
    names = (*SCALE, "devices", "units", "cores", *(() if machine.cores is None else ("threads",)))
    values = ((name, getattr(machine, name)) for name in names)
    lines = [f"[{machine.name}]"]
    lines += [f"{name} = {each / SCALE.get(name, 1):.6g}" for name, each in values if each is not None]
    source = machine.source.replace("\\", "\\\\").replace('"', '\\"')
    lines += [f'source = "{source}"', "", f"[{machine.name}.efficiency]"]
    lines += [f"{key} = {getattr(machine.efficiency, key):.4g}" for key in RANGES]
    return "\n".join(lines) + "\n"


def _staging_rate(seconds: float | None, copied: float) -> float | None:
    """Return the rate of Gloo's copies relative to `copied`, in bytes/s, if it was measured."""
    if seconds is None:
        return None
    return 2 / (seconds * copied) if seconds else RANGES["staging"][1]


def _measurements(device: torch.device, dtype: torch.dtype) -> dict[str, TimedCall]:
    edge = _EDGE.get(device.type, 8192)
    return {
        "half": _product(device, torch.bfloat16, edge, edge),
        "fp32": _product(device, torch.float32, edge, edge),
        "thin": _product(device, dtype, edge, edge // 4),
        **_memory(device, edge),
        "attention": _attention(device, dtype),
        "convolution": _convolution(device, dtype),
        "host": _host(device),
    }


def _fastest(device: torch.device, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the seconds of the fastest call of each function.

    On a machine that others share, the speed changes within seconds. Rounds through all functions give
    each of them calls while the machine is fast.
    """
    times: dict[str, list[float]] = {key: [] for key in calls}
    while calls:
        for key, call in calls.items():
            before = sum(times[key])
            while sum(times[key]) - before <= _TURN:
                accelerator.synchronize(device)
                begun = CLOCK.now()
                call()
                accelerator.synchronize(device)
                times[key].append(CLOCK.now() - begun)
        calls = {
            key: call
            for key, call in calls.items()
            if len(times[key]) < _CALLS or sum(times[key]) < _SECONDS
        }
    return {key: min(each) for key, each in times.items()}


def _product(device: torch.device, dtype: torch.dtype, edge: int, inner: int) -> TimedCall:
    """Return a product whose result has `edge` rows and columns, and sums of `inner` terms."""
    left = torch.ones(edge, inner, device=device, dtype=dtype)
    right = torch.ones(inner, edge, device=device, dtype=dtype)
    return TimedCall(2 * edge * edge * inner, lambda: left @ right)


def _memory(device: torch.device, edge: int) -> dict[str, TimedCall]:
    """Return a copy and a sum of tensors that no cache holds."""
    source = torch.ones(16 * edge * edge, device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    return {
        "copy": TimedCall(2 * size, lambda: target.copy_(source)),
        "sum": TimedCall(3 * size, lambda: torch.add(source, target, out=target)),
    }


def _attention(device: torch.device, dtype: torch.dtype) -> TimedCall:
    """Return causal attention, which skips half of the scores."""
    heads, seq, width = 8, 1024, 64
    one = torch.ones(1, heads, seq, width, device=device, dtype=dtype)
    return TimedCall(
        4 * heads * seq * seq * width * 0.5,
        lambda: F.scaled_dot_product_attention(one, one, one, is_causal=True),
    )


def _convolution(device: torch.device, dtype: torch.dtype) -> TimedCall:
    """Return a convolution with a 3 x 3 kernel, forward and backward."""
    batch, width, edge = (8, 64, 56) if device.type == "cpu" else (64, 256, 56)
    image = torch.ones(batch, width, edge, edge, device=device, dtype=dtype, requires_grad=True)
    weight = torch.ones(width, width, 3, 3, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.ones_like(image)

    def call() -> None:
        torch.autograd.grad(F.conv2d(image, weight, padding=1), (image, weight), upstream)

    return TimedCall(3 * 2 * batch * edge * edge * width * width * 9, call)


def _host(device: torch.device) -> TimedCall:
    """Return passes of tiny layers, forward and backward. Their time is that of the host."""
    layers = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(8))
    ).to(device)
    rows = torch.ones(2, 8, device=device)

    def call() -> None:
        torch.autograd.grad(layers(rows).sum(), tuple(layers.parameters()))

    with TracedWork(lambda: "") as traced:
        call()
    return TimedCall(sum(each.work.operations for each in traced.segments), call)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""Machines as frozen values, from the catalogue or from a file of the same form."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.util.errors import ShoalError

_RESERVED = 1.5e9
"""Bytes that the CUDA context, cuBLAS and NCCL take: assumed, 1 to 2 GB on GPUs."""

BASE_LATENCY = 30e-6
"""Seconds of any collective, in addition to its steps: fitted to measured all-reduces on A100."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The thirteen free parameters of the time model: fractions of data-sheet rates, and seconds.

    The defaults are assumptions, for machines that were not measured. `RANGES` has plausible values.
    """

    product: float = 0.75
    """Matrix products, of the peak. Large products on an A100 reach 0.87 alone; a measured peak is that
    of one shape, and other shapes may exceed it."""
    convolution: float = 0.6
    """Convolutions, of the peak. They are counted as matrix products, of which Winograd's algorithm
    computes up to 2.25 times as many."""
    attention: float = 0.35
    """The two products of attention, of the peak."""
    memory: float = 0.8
    """Element-wise operations, of the memory bandwidth."""
    link: float = 0.75
    """Collectives within a node, of `link`."""
    network: float = 0.7
    """Collectives between nodes, of `network`."""
    link_latency: float = 3.4e-6
    """Seconds of one step of a collective within a node. The default is that of NCCL's tuner for its
    protocol Simple."""
    network_latency: float = 14e-6
    """The same between nodes."""
    staging: float = 0.3
    """Gloo's copies of the full tensor in all-gathers and reduce-scatters, of the memory bandwidth."""
    launch: float = 4e-6
    """Seconds on the device between two operations."""
    host: float = 44e-6
    """Seconds of the host for one operation."""
    step: float = 2e-3
    """Seconds of the host for the rest of a step: clipping, the optimizer's call, logging."""
    spread: float = 0.01
    """The standard deviation of the speed of devices, relative to its mean."""


RANGES: Mapping[str, tuple[float, float]] = {
    "product": (0.3, 1.2),
    "convolution": (0.05, 2.0),
    "attention": (0.05, 0.9),
    "memory": (0.2, 1.0),
    "link": (0.2, 1.0),
    "network": (0.1, 1.0),
    "link_latency": (0.5e-6, 5e-3),
    "network_latency": (1e-6, 0.1),
    "staging": (0.02, 10.0),
    "launch": (0.5e-6, 30e-6),
    "host": (2e-6, 100e-6),
    "step": (1e-4, 0.1),
    "spread": (0.001, 0.05),
}
"""The plausible values of each parameter; a calibration stays inside."""


def limited_efficiency(name: str, value: float) -> float:
    """Return the plausible value of a parameter that is nearest to a measured one."""
    low, high = RANGES[name]
    return min(high, max(low, value))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of equal devices. Rates are FLOP/s and bytes/s of one device and one direction.

    `half` is the peak of bf16 or fp16 products, `fp8` that of 8-bit ones, `tf32` and `fp32` of float32
    products. `link` connects devices of a node, `network` nodes; both are per device. `memory` is in
    bytes. `devices` is the number of devices of a node, of which one operating system has `host`
    (default: all). `units` is the number of processors of a device that compute one tile of a product
    each, if products are tiled. `source` says where the figures are from.

    Only CPUs have `cores`, the cores of a node. Each device uses `threads` of them while it is alone on
    the node; devices that together have more threads than the node has cores take turns.

    `known_step` are the fractions of the parts of a measured step, which the efficiencies fit.
    """

    name: str
    half: float
    fp32: float
    tf32: float | None = None
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    devices: int
    source: str
    units: int | None = None
    host: int | None = None
    fp8: float | None = None
    cores: int | None = None
    threads: int = 1
    efficiency: Efficiency = field(default_factory=Efficiency)
    known_step: Mapping[str, float] | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether its devices are CPUs."""
        return self.cores is not None or self.name == "cpu"

    def check_precision(self, precision: str) -> None:
        """Raise ShoalError for the precision fp8 without its rate."""
        if precision == "fp8" and self.fp8 is None:
            raise ShoalError(
                given=f"precision fp8 on {self.name}",
                found="the machine has no rate of FP8",
                fix="use --precision mixed, or a machine file with fp8 = …, the dense peak in TFLOP/s",
            )

    @property
    def per_host(self) -> int:
        """The devices of one operating system, which fail and are submitted together."""
        return self.host or self.devices

    @property
    def available(self) -> float:
        """Bytes of device memory without those of context and libraries."""
        return self.memory - _RESERVED

    def shared(self, devices: int) -> Machine:
        """Return the machine with the rates of collectives that `devices` devices of a node call.

        Cores copy the bytes within a node. More devices than cores take turns.
        """
        if self.cores is None or devices * self.threads <= self.cores:
            return self
        part = self.cores / (devices * self.threads)
        rates = replace(self.efficiency, link_latency=self.efficiency.link_latency / part)
        bandwidth = self.memory_bandwidth * part
        return replace(self, memory_bandwidth=bandwidth, link=self.link * part, efficiency=rates)


_PLAUSIBLE = {
    **dict.fromkeys(("half", "fp8", "tf32", "fp32"), (1e-4, 1e5)),
    "memory": (0.1, 1e4),
    **dict.fromkeys(("memory_bandwidth", "link", "network"), (1e-4, 1e5)),
    **dict.fromkeys(("devices", "host", "units", "cores", "threads"), (1, 10**5)),
}
"""The values of a machine file, in its units."""
_INTENSITY = (0.05, 5e3)
"""FLOP of `half` per byte of memory bandwidth: 20 to 420 in the catalogue, a thousandth or a thousand
times as much if one of them is in another unit."""
_WHOLE = ("devices", "host", "units", "cores", "threads")
SCALE = {
    "half": 1e12,
    "fp8": 1e12,
    "tf32": 1e12,
    "fp32": 1e12,
    "memory": 1e9,
    "memory_bandwidth": 1e9,
    "link": 1e9,
    "network": 1e9,
}
"""The units of a machine file, in FLOP/s, bytes and bytes/s."""


def machine_catalogue() -> dict[str, Machine]:
    """Return the machines of the catalogue by name."""
    text = resources.files(__package__).joinpath("machines.toml").read_text(encoding="utf-8")
    return {name: parse_machine(name, table) for name, table in tomllib.loads(text).items()}


def find_machine(name: str) -> Machine:
    """Return a machine of the catalogue, or the one of a TOML file if the name ends in `.toml`.

    Raises ShoalError for unknown names, with the nearest ones, and for invalid files.
    """
    if name.endswith(".toml"):
        return _machine_of_file(Path(name))
    known = machine_catalogue()
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    raise ShoalError(
        given=f"machine {name!r}",
        found=f"it is not in the catalogue: {', '.join(known)}",
        fix=f"use {' or '.join(near or ['h100-sxm'])}, or a TOML file that describes it: mine.toml",
    )


def _machine_of_file(path: Path) -> Machine:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(str(path), f"it can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _wrong(str(path), f"it is not TOML: {error}") from None
    if len(tables) != 1:
        raise _wrong(str(path), f"it has {len(tables)} tables, not one")
    ((name, table),) = tables.items()
    return parse_machine(name, table)


def parse_machine(name: str, table: object) -> Machine:
    """Return the machine that a table of TOML describes; raise ShoalError with all its mistakes."""
    if not isinstance(table, dict):
        raise _wrong(name, "it is not a table")
    known = {each.name for each in fields(Machine)} - {"name", "known_step"}
    required = known - {"fp8", "tf32", "units", "host", "cores", "threads", "efficiency"}
    mistakes = [f"{key} is unknown" for key in sorted(table.keys() - known)]
    mistakes += [f"{key} is missing" for key in sorted(required - table.keys())]
    for key in sorted((known - {"source", "efficiency"}) & table.keys()):
        mistakes += _number_mistake(key, table[key], _PLAUSIBLE[key], whole=key in _WHOLE)
    if "threads" in table and "cores" not in table:
        mistakes.append("threads needs cores")
    if not isinstance(table.get("source", ""), str):
        mistakes.append("source is not text")
    efficiency = table.get("efficiency", {})
    mistakes += _efficiency_mistakes(efficiency)
    if not mistakes:
        mistakes += _combination_mistakes(table)
    if mistakes:
        raise _wrong(name, "; ".join(mistakes))
    values: dict[str, Any] = {
        key: value * SCALE[key] if key in SCALE else value for key, value in table.items()
    }
    return Machine(**values | {"name": name, "efficiency": replace(Efficiency(), **efficiency)})


def _combination_mistakes(table: Mapping[str, Any]) -> list[str]:
    mistakes = []
    if table["memory"] * 1e9 <= _RESERVED:
        mistakes.append(f"memory is {table['memory']} GB, and context and libraries take 1.5 GB")
    if table["devices"] % table.get("host", 1):
        mistakes.append(f"host {table['host']} does not divide devices {table['devices']}")
    low, high = _INTENSITY
    half, bandwidth = table["half"], table["memory_bandwidth"]
    intensity = 1e3 * half / bandwidth
    if not low <= intensity <= high:
        mistakes.append(
            f"half is {half:g} TFLOP/s and memory_bandwidth {bandwidth:g} GB/s, {intensity:.2g} "
            "FLOP per byte: one of them is in another unit"
        )
    return mistakes


def _efficiency_mistakes(table: object) -> list[str]:
    if not isinstance(table, dict):
        return ["efficiency is not a table"]
    mistakes = [f"efficiency.{key} is unknown" for key in sorted(table.keys() - RANGES.keys())]
    for key in sorted(table.keys() & RANGES.keys()):
        mistakes += _number_mistake(f"efficiency.{key}", table[key], RANGES[key])
    return mistakes


def _number_mistake(
    key: str, value: object, plausible: tuple[float, float], *, whole: bool = False
) -> list[str]:
    kinds = (int,) if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        return [f"{key} is {value!r:.40}, not {'an integer' if whole else 'a number'}"]
    low, high = plausible
    return [] if low <= value <= high else [f"{key} is {value!r:.40}, not between {low:g} and {high:g}"]


def _wrong(name: str, found: str) -> ShoalError:
    return ShoalError(
        given=f"machine {name}",
        found=found,
        fix="describe it as docs/guides/plan.md shows: half, fp32, memory, memory_bandwidth, link, "
        "network, devices, source",
    )

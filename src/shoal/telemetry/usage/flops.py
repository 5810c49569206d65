"""The number of floating-point operations of a step, and the peak FLOP/s of devices.

The formulas are those of torch's FlopCounterMode, the peaks those of the makers' data sheets: dense,
without sparsity. Operations are counted in one real step, in which they pass through a dispatch mode.
Nothing is computed for it, so neither gradients nor buffers nor random states can differ. torch's own
mode also adds hooks to every module and the graph, and an operation that its formula does not fit makes
the step fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from shoal._torch.dispatch import UncompiledMode, overloads_of

_ON_CPU = "_for_cpu"


def flop_formula(operator: Any) -> Callable[..., Any] | None:
    """Return torch's formula for the FLOPs of an operator, or None if there is none.

    The arguments of fused attention on the CPU, which lacks a formula, begin with those of the GPU's.
    torch has none for products of groups of rows.
    """
    packet = overloads_of(operator)
    name = str(packet).rpartition(".")[2]
    if name == "_grouped_mm":
        return _grouped_flops
    if name.endswith((_ON_CPU, f"{_ON_CPU}_backward")):
        packet = getattr(torch.ops.aten, name.replace(_ON_CPU, ""))
    found: Callable[..., Any] | None = flop_registry.get(packet)
    return found


def _grouped_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the products of groups of rows with one matrix each, such as experts."""
    return 2 * int(rows.numel()) * int(weights.shape[-1])


class FlopCounting:
    """A counter of the operations inside a context, entered once, by the step to be counted.

    `flops` is None before that, and if an operation could not be counted.
    """

    def __init__(self) -> None:
        self.flops: int | None = None
        self.failed: str | None = None
        self._mode = _FlopMode()

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        self.failed = self._mode.failed
        self.flops = None if self.failed else self._mode.flops


class _FlopMode(UncompiledMode):
    """A mode below autograd, where composite operations are already decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.failed: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        formula = flop_formula(func)
        if formula is not None:
            try:
                self.flops += int(formula(*args, **named, out_val=out))
            except Exception as error:  # an error in a formula must not fail the step
                self.failed = f"{func}: {type(error).__name__}: {error}"
        return out


_HALVES = (torch.bfloat16, torch.float16)


class Peak(NamedTuple):
    """Peak FLOP/s of one device, None if unknown, and the source or the reason."""

    value: float | None
    reason: str


class _Sheet(NamedTuple):
    """A data sheet and its figures in TFLOP/s; None if the device lacks units for that type."""

    name: str
    source: str
    half: float
    tf32: float | None
    fp32: float
    bf16: bool = True


_SHEETS = (
    _Sheet(r"\bB200\b", "NVIDIA HGX B200 data sheet", 2250.0, 1125.0, 75.0),
    _Sheet(r"\bGH200\b", "NVIDIA GH200 data sheet", 989.5, 494.5, 67.0),
    _Sheet(r"\bH200 NVL\b", "NVIDIA H200 data sheet", 835.5, 417.5, 60.0),
    _Sheet(r"\bH200\b", "NVIDIA H200 data sheet", 989.5, 494.5, 67.0),
    _Sheet(r"\bH100 NVL\b", "NVIDIA H100 data sheet", 835.5, 417.5, 60.0),
    _Sheet(r"\bH100 PCIe\b", "NVIDIA H100 PCIe product brief", 756.0, 378.0, 51.0),
    _Sheet(r"\bH100\b.*\bHBM3\b", "NVIDIA H100 data sheet", 989.5, 494.5, 67.0),
    # CINECA's custom A100 with 64 GB has more cores, and NVIDIA has no data sheet of it.
    _Sheet(r"\bA100\b(?!-SXM-64GB)", "NVIDIA A100 data sheet", 312.0, 156.0, 19.5),
    _Sheet(r"\bA30\b", "NVIDIA A30 data sheet", 165.0, 82.0, 10.3),
    _Sheet(r"\bA40\b", "NVIDIA A40 data sheet", 149.7, 74.8, 37.4),
    _Sheet(r"\bA10\b", "NVIDIA A10 data sheet", 125.0, 62.5, 31.2),
    _Sheet(r"\bRTX A6000\b", "NVIDIA RTX A6000 data sheet", 154.8, 77.4, 38.7),
    _Sheet(r"\bL40S\b", "NVIDIA L40S data sheet", 362.0, 183.0, 91.6),
    _Sheet(r"\bL40\b", "NVIDIA L40 data sheet", 181.0, 90.5, 90.5),
    _Sheet(r"\bL4\b", "NVIDIA L4 data sheet", 121.0, 60.0, 30.3),
    _Sheet(r"\bV100S\b", "NVIDIA V100 data sheet", 130.0, None, 16.4, bf16=False),
    _Sheet(r"\bV100-SXM", "NVIDIA V100 data sheet", 125.0, None, 15.7, bf16=False),
    _Sheet(r"\bV100-PCIE\b", "NVIDIA V100 data sheet", 112.0, None, 14.0, bf16=False),
    _Sheet(r"\bT4\b", "NVIDIA T4 data sheet", 65.0, None, 8.1, bf16=False),
    # For tensor cores that add in float32, as torch uses them; adding in float16 is twice as fast.
    _Sheet(r"\bRTX 4090$", "NVIDIA Ada GPU architecture white paper", 165.2, 82.6, 82.6),
    _Sheet(r"\bRTX 3090$", "NVIDIA Ampere GA102 white paper", 71.0, 35.6, 35.6),
    # torch has each of the two dies as a device: half of the sheet's figure.
    _Sheet(r"\bMI250X$", "AMD Instinct MI250X data sheet", 191.5, None, 47.9),
    _Sheet(r"\bMI300X\b", "AMD Instinct MI300X data sheet", 1307.4, 653.7, 163.4),
)
"""The first match counts: special names come before those that they resemble."""


def peak_of(name: str, dtype: torch.dtype, *, tf32: bool) -> Peak:
    """Return the peak of a device, by the name that torch gives it, for computing in `dtype`.

    `tf32` allows matrix products of float32 in TF32.
    """
    if "MIG" in name:
        return Peak(None, f"{name} is a part of a GPU, for which there is no data sheet")
    sheet = next((each for each in _SHEETS if re.search(each.name, name)), None)
    if sheet is None:
        return Peak(None, f"no data sheet of {name!r} is known")
    if dtype in _HALVES and (sheet.bf16 or dtype == torch.float16):
        return _peak(sheet, sheet.half, _short(dtype))
    if dtype == torch.float32 and tf32 and sheet.tf32 is not None:
        return _peak(sheet, sheet.tf32, "tf32")
    if dtype == torch.float32:
        return _peak(sheet, sheet.fp32, "fp32")
    return Peak(None, f"the {sheet.source} has no figure for {_short(dtype)}")


def peak_here(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of this rank's device; None for a CPU, whose data sheet has no reachable peak."""
    if device.type != "cuda":
        return Peak(None, "a CPU, whose peak is unknown unless it was measured")
    return peak_of(torch.cuda.get_device_name(device), dtype, tf32=tf32_allowed())


def tf32_allowed() -> bool:
    """Return whether products of float32 may be computed in TF32 on CUDA, by either torch switch.

    torch.get_float32_matmul_precision knows only the older switch, and raises an error if the newer
    one was used.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _peak(sheet: _Sheet, teraflops: float, how: str) -> Peak:
    return Peak(teraflops * 1e12, f"{how}, dense: {sheet.source}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

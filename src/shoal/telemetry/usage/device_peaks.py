"""Peak FLOP/s of devices, from their makers' data sheets: dense, without sparsity."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

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

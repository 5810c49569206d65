"""Check the GPUs of each host by NVML: driver, health, other processes on them."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from shoal.distributed import env_vars
from shoal.tools.doctor.findings import (
    CheckResult,
    RankFacts,
    by_host,
    describe_ranks,
    failure,
    ok,
    warning,
)
from shoal.util.grouping import group_by
from shoal.util.units import size

DEVICE, AMD = Path("/dev/nvidiactl"), Path("/dev/kfd")
_INSTALL = "run pip install '.[gpu]' in your Shoal checkout"
_BUSY = 0.1
_MARGIN = 5

# NVML's reasons for lower clocks other than idle: nvmlClocksEventReasons in its reference.
_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class Gpu(TypedDict):
    """One GPU, as NVML numbers it; values that its driver lacks are 0. Bytes, degrees Celsius."""

    index: int
    name: str
    total: int
    used: int
    temperature: int
    slowdown: int
    reasons: int
    uncorrected: int
    pending: bool
    unrepaired: bool


class Gpus(TypedDict):
    """All GPUs of a host, or in `lacking` the reason why they are unknown; empty if there are none."""

    driver: str
    lacking: str
    gpus: list[Gpu]
    visible: dict[str, str]


def has_gpus() -> bool:
    """Return whether this machine has GPUs of NVIDIA or AMD that are visible to this process."""
    return (DEVICE.exists() or AMD.exists()) and "" not in env_vars.visible_devices().values()


def describe_gpus() -> Gpus:
    """Query NVML, a part of NVIDIA's driver, through nvidia-ml-py."""
    found = Gpus(driver="", lacking="", gpus=[], visible=env_vars.visible_devices())
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        found["lacking"] = "nvidia-ml-py is not installed" if DEVICE.exists() else ""
        return found
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        found["lacking"] = str(error) if DEVICE.exists() else ""
        return found
    try:
        found["driver"] = str(nvml.nvmlSystemGetDriverVersion())
        count = nvml.nvmlDeviceGetCount()
        found["gpus"] = [_gpu(nvml, index) for index in range(count)]
    finally:
        nvml.nvmlShutdown()
    return found


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Callable[[], Any], otherwise: Any) -> Any:
        # A value that this kind of GPU or driver lacks must not prevent the others.
        with suppress(nvml.NVMLError, AttributeError):
            return question()
        return otherwise

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    remapped = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle), (0, 0, 0, 0))
    return Gpu(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        total=memory.total,
        used=memory.used,
        temperature=ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), 0),
        slowdown=ask(
            lambda: nvml.nvmlDeviceGetTemperatureThreshold(
                handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            ),
            0,
        ),
        reasons=ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0),
        uncorrected=ask(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            0,
        ),
        pending=bool(remapped[2]),
        unrepaired=bool(remapped[3]),
    )


def check_gpus(ranks: Sequence[RankFacts[Gpus]]) -> Iterator[CheckResult]:
    """Yield drivers that differ, and GPUs that are broken, hot, slowed down or in use."""
    lacking = [one for one in ranks if one.facts["lacking"]]
    if lacking:
        why = lacking[0].facts["lacking"]
        fix = _INSTALL if "not installed" in why else "run nvidia-smi; ask the administrators"
        yield warning("GPU health", f"unknown on {describe_ranks(lacking)}: {why}", fix)
    drivers = group_by((one for one in ranks if one.facts["driver"]), lambda one: one.facts["driver"])
    if len(drivers) > 1:
        text = "; ".join(
            f"{driver} on {describe_ranks(members)}" for driver, members in drivers.items()
        )
        yield warning("GPU driver", text, "ask the administrators for the same driver on all hosts")
    elif drivers:
        yield ok("GPU driver", next(iter(drivers)))
    yield from _check_health([one for one in ranks if one.facts["gpus"]])


@by_host
def _check_health(ranks: Sequence[RankFacts[Gpus]]) -> Iterator[CheckResult]:
    gpus = ranks[0].facts["gpus"]
    problems = [problem for gpu in gpus for problem in _problems(gpu)]
    yield from problems
    if not problems:
        counts = Counter(gpu["name"] for gpu in gpus)
        names = ", ".join(f"{count} x {name}" for name, count in counts.items())
        yield ok("GPU health", f"{names}: no ECC error, no slowdown, free")


def _problems(gpu: Gpu) -> Iterator[CheckResult]:
    name = f"GPU {gpu['index']}"
    report = "exclude the host (sbatch --exclude=HOST) and report it to the administrators"
    if gpu["uncorrected"] or gpu["unrepaired"]:
        found = f"{gpu['uncorrected']} uncorrected ECC errors since the driver was loaded"
        yield failure(name, found + ", rows beyond repair" * gpu["unrepaired"], report)
    if gpu["pending"]:
        yield warning(
            name,
            "a row of its memory is pending remapping",
            f"reset it with nvidia-smi -r, or {report}",
        )
    slowed = [text for bit, text in _REASONS.items() if gpu["reasons"] & bit]
    if slowed:
        hot = f" at {gpu['temperature']} °C" if gpu["temperature"] else ""
        yield warning(name, f"{', '.join(slowed)}{hot}", f"run nvidia-smi -q -d PERFORMANCE; {report}")
    elif 0 < gpu["slowdown"] <= gpu["temperature"] + _MARGIN:
        found = f"{gpu['temperature']} °C; it slows down at {gpu['slowdown']} °C"
        yield warning(name, found, report)
    if gpu["used"] > _BUSY * gpu["total"]:
        found = f"{size(gpu['used'])} of its {size(gpu['total'])} are in use before training"
        yield warning(
            name, found, "list the processes with nvidia-smi; request exclusive GPUs (--exclusive)"
        )

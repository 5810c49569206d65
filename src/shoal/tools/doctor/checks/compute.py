"""Check the speed of each rank in matrix products, on all ranks at once."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypedDict, TypeVar

import torch

from shoal.tools.doctor.findings import CheckResult, RankFacts, describe_ranks, failure, ok, warning
from shoal.util import accelerator
from shoal.util.clock import CLOCK
from shoal.util.grouping import group_by

K = TypeVar("K", bound=Hashable)

NOTABLE = 0.75
"""Fraction of the others' rate below which something may be slow."""

HALF = 0.5
"""Fraction below which a slow one costs all others half of their time."""

_MANY = 5
_DEVIATIONS = 5.0
_NORMAL = 1.4826


def find_slow(rates: Mapping[K, float]) -> dict[K, float]:
    """Return the slow ones, with their rate as a fraction of the median of the others.

    Slow is below NOTABLE. Among many it must also be an outlier: by more than five standard deviations,
    estimated from the median absolute deviation, so that no slow one hides another by its effect on the
    spread; Leys et al. 2013, "Detecting outliers", J. Exp. Soc. Psychol. 49. Among few, only the
    fraction decides, since their spread is unknown.
    """
    found: dict[K, float] = {}
    if len(rates) < 2:
        return found
    middle = statistics.median(rates.values())
    spread = _NORMAL * statistics.median(abs(rate - middle) for rate in rates.values())
    for key, rate in rates.items():
        usual = statistics.median(other for name, other in rates.items() if name != key)
        far = len(rates) < _MANY or middle - rate > _DEVIATIONS * spread
        if usual > 0 and rate < NOTABLE * usual and far:
            found[key] = rate / usual
    return found


WINDOW = 0.3
WINDOWS = 3
_SIZES = {"cpu": (512, torch.float32), "cuda": (4096, torch.bfloat16)}
_OTHER = (1024, torch.float32)


class Compute(TypedDict):
    """FLOP/s by device, and the kind of these devices: only the same kind can be compared.

    If ranks take turns on cores, `compared` is False.
    """

    kind: str
    compared: bool
    rates: dict[str, float]


def measure_compute(devices: Sequence[torch.device], *, compared: bool = True) -> Compute:
    """Return the best of several windows of each device, one after the other.

    A window is long compared with the periods in which a cgroup throttles a process, so that throttling
    shows. A short disturbance of one window does not count.
    """
    rates = {str(device): max(_rates(device)) for device in devices}
    first = devices[0]
    kind = accelerator.name(first) or first.type
    return Compute(kind=kind, compared=compared, rates=rates)


def best_rates(one: Compute, other: Compute) -> Compute:
    """Return the best rate of each device."""
    rates = {name: max(rate, other["rates"][name]) for name, rate in one["rates"].items()}
    return Compute(kind=one["kind"], compared=one["compared"], rates=rates)


def visible_gpus() -> list[torch.device]:
    """Return all GPUs that torch sees. Raises RuntimeError if it sees none."""
    count = torch.cuda.device_count()
    if not count:
        raise RuntimeError(f"torch {torch.__version__} sees none of this machine's GPUs")
    return [torch.device("cuda", index) for index in range(count)]


def multiply(matrix: torch.Tensor) -> torch.Tensor:
    """Do the work that is timed."""
    return matrix @ matrix


def _rates(device: torch.device) -> Iterator[float]:
    size, dtype = _SIZES.get(device.type, _OTHER)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    multiply(matrix)
    _finish(device)
    for _ in range(WINDOWS):
        count, begun = 0, CLOCK.now()
        while (taken := CLOCK.now() - begun) < WINDOW or not count:
            multiply(matrix)
            _finish(device)
            count += 1
        yield count * 2 * size**3 / taken


def _finish(device: torch.device) -> None:
    accelerator.synchronize(device)


def check_compute(ranks: Sequence[RankFacts[Compute]]) -> Iterator[CheckResult]:
    """Yield devices that are slower than others of their kind."""
    crowded = [one for one in ranks if not one.facts["compared"]]
    if crowded:
        text = f"{describe_ranks(crowded)} take turns on too few cores, and are not compared"
        yield ok("compute", text)
    rest = [one for one in ranks if one.facts["compared"]]
    for kind, members in group_by(rest, lambda one: one.facts["kind"]).items():
        rates = {
            (one.rank, one.host, device): rate
            for one in members
            for device, rate in one.facts["rates"].items()
        }
        yield from _judge_kind(kind, rates)


def _judge_kind(kind: str, rates: Mapping[tuple[int, str, str], float]) -> Iterator[CheckResult]:
    found = find_slow(rates)
    for (rank, host, device), share in found.items():
        text = f"rank {rank} ({host}), {device}: {_flops(rates[rank, host, device])}, "
        text += f"{share:.0%} of the speed of the others"
        fix = f"check other processes on {host} (top, nvidia-smi), its core binding and temperature; "
        fix += f"or leave it out (sbatch --exclude={host})"
        yield (failure if share < HALF else warning)("compute", text, fix)
    if not found:
        slowest, fastest = min(rates.values()), max(rates.values())
        alike = f"{_flops(slowest)} to {_flops(fastest)}" if len(rates) > 1 else _flops(fastest)
        yield ok("compute", f"{kind}: {alike} in matrix products")


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"

"""The first configuration in the output of `shoal plan --json`, for scripts and runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.util.errors import StepError

PREDICTED = ("forward and backward", "optimizer", "communication and waiting")
"""The parts of a step that a plan predicts."""
STEP_PRECISIONS = {"fp32": "fp32", "mixed": "bf16", "fp8": "bf16", "fp16": "fp16"}
"""The precision of a `shoal.Step` for those precisions of a plan that it has."""


@dataclass(frozen=True, kw_only=True)
class SavedPlan:
    """The first configuration of a plan, which `shoal.load_plan` returns.

    Attributes:
        layout: The layout, for `shoal.init(layout=…)`.
        devices: Number of ranks.
        batch_size: Global batch size in samples, for `shoal.Loader(batch_size=…)`.
        micro_batch: Samples of a micro-batch on a rank.
        micro_batches: Micro-batches of a rank in one step, for `shoal.Loader(micro_batches=…)`.
        recompute: Recomputation of activations: "none", "selective" or "full".
        precision: "mixed", "fp8", "fp16", "half" or "fp32".
        schedule: Schedule of the pipeline, for `shoal.Pipeline`; None without a pipeline.
        stages_per_rank: Pipeline stages of a rank.
        split_points: Modules with which stages begin, of a traced pipeline.
        reshard_after_forward: Option of `shoal.FSDP`.
        accumulate: Option of `shoal.FSDP`.
        predicted: Predicted seconds of a step by part.

    Example:
        >>> parts = {"forward and backward": 0.5, "optimizer": 0.1}
        >>> plan = shoal.SavedPlan(
        ...     layout="shard=2",
        ...     devices=2,
        ...     batch_size=64,
        ...     micro_batch=16,
        ...     micro_batches=2,
        ...     recompute="none",
        ...     precision="fp32",
        ...     schedule=None,
        ...     stages_per_rank=1,
        ...     predicted=parts,
        ... )
        >>> plan.step_seconds
        0.6
    """

    layout: str
    devices: int
    batch_size: int
    micro_batch: int
    micro_batches: int
    recompute: str
    precision: str
    schedule: str | None
    stages_per_rank: int
    split_points: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    accumulate: str = "sharded"
    predicted: Mapping[str, float]

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of an optimizer step."""
        return sum(self.predicted.values())

    @property
    def step_precision(self) -> str:
        """The precision for `shoal.Step`: "bf16" for "mixed" and "fp8".

        A plan with "half" keeps the parameters in 16 bits: convert the model to `torch.bfloat16`. The
        step then has "fp32", without autocast.
        """
        return STEP_PRECISIONS.get(self.precision, "fp32")


def load_plan(path: str | Path) -> SavedPlan:
    """Return the first configuration of a plan that `shoal plan --json` has printed.

    Args:
        path: A file with the output of `shoal plan --json`. With `--try`, its first configuration is
            the fastest measured one.

    Returns:
        The configuration.

    Raises:
        StepError: If the file can't be read, is not such a plan, or no configuration fits.

    Example:
        >>> import pathlib, subprocess, sys, tempfile
        >>> command = [sys.executable, "-m", "shoal", "plan", "--model", "llama-7b", "--json"]
        >>> printed = subprocess.run([*command, "-n", "8", "--batch", "64"], capture_output=True)
        >>> file = pathlib.Path(tempfile.mkdtemp(), "plan.json")
        >>> count = file.write_bytes(printed.stdout)
        >>> plan = shoal.load_plan(file)
        >>> plan.devices, plan.batch_size
        (8, 64)
    """
    return read_plan(path, f"shoal.load_plan({str(path)!r})", "-n N --batch B")


def read_plan(path: str | Path, given: str, size: str) -> SavedPlan:
    """Return the plan in a file; `given` and `size` are for the errors."""
    command = f"shoal plan --model MODEL {size} --json > plan.json"
    try:
        best = json.loads(Path(path).read_bytes())["best"]
        if not best:
            raise StepError(
                given=given,
                found="no configuration of this plan fits the memory of its machine",
                fix="plan for more devices, or for another machine",
            )
        first = best[0]
        predicted = {part: float(first["parts"][part]) for part in PREDICTED}
        if not 0 < sum(predicted.values()) < math.inf or min(predicted.values()) < 0:
            raise ValueError(predicted)
        return SavedPlan(
            layout=_text(first["layout"]),
            devices=_count(first["devices"]),
            batch_size=_count(first["global_batch"]),
            micro_batch=_count(first["micro_batch"]),
            micro_batches=_count(first["micro_batches"]),
            recompute=_text(first["recompute"]),
            precision=_text(first["precision"]),
            schedule=None if first["schedule"] is None else _text(first["schedule"]),
            stages_per_rank=_count(first["stages_per_rank"]),
            split_points=tuple(_text(each) for each in list(first["split_points"])),
            reshard_after_forward=bool(first["reshard_after_forward"]),
            accumulate=_text(first["accumulate"]),
            predicted=predicted,
        )
    except OSError as error:
        raise StepError(given=given, found=f"it can't be read: {error.strerror}", fix=command) from None
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
        found = "it is not the output of shoal plan --json for one number of devices"
        raise StepError(given=given, found=found, fix=command) from None


def _count(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(value)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value

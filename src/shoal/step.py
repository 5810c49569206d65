"""One optimizer step: precision, scaling, correction by the true count, clipping, update, schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.errors import CheckpointError, StepError
from shoal.parallel import engine_of
from shoal.task import Batch, Engine, Micro, Task, Totals, correct, not_finite
from shoal.world import random_state, set_random_state

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILERS = ("inductor", "script")


class Result(NamedTuple):
    """What one step came to, the same on all ranks; times in seconds on this rank.

    `loss` is the mean over the global batch, `norm` the gradient norm before clipping. A step whose
    fp16 gradients overflowed is `skipped`: the parameters did not change.
    """

    loss: float
    norm: float
    counted: float
    skipped: bool
    forward: float
    backward: float
    update: float


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018), with torch.amp.GradScaler's policy.

    GradScaler decides on the device for each optimizer alone; here all ranks decide from the one
    norm that the step computes anyway, so scaling costs no further pass over the gradients.
    """

    value: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good: int = 0

    def adapt(self, *, finite: bool) -> None:
        """Halve after an overflow, double after `interval` steps without one."""
        if not finite:
            self.value, self.good = self.value * self.backoff, 0
        elif self.good + 1 == self.interval:
            self.value, self.good = self.value * self.growth, 0
        else:
            self.good += 1


class Step:
    """Takes a Batch through forward, backward and one optimizer step, equally at any split.

    `precision` is "fp32" (the parameters' own dtype, no autocast), "bf16" or "fp16" (autocast; fp16
    with loss scaling). `clip` bounds the global gradient norm. `schedule` is stepped once per
    optimizer step. `compile` is "inductor" (torch.compile) or "script" (TorchScript).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        *,
        precision: str = "fp32",
        clip: float | None = None,
        schedule: LRScheduler | None = None,
        compile: str | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise StepError(
                given=f"precision={precision!r}",
                found=f"the precisions are {', '.join(PRECISIONS)}",
                fix="precision='bf16' on recent hardware; 'fp32' keeps the parameters' own dtype",
            )
        if compile is not None and compile not in COMPILERS:
            raise StepError(
                given=f"compile={compile!r}",
                found=f"the compilers are {', '.join(COMPILERS)}",
                fix="compile='inductor', or leave it out",
            )
        if clip is not None and not clip > 0:
            raise StepError(
                given=f"clip={clip}",
                found="the largest gradient norm allowed is a positive number",
                fix="clip=1.0, or leave it out",
            )
        self.model = model
        self.engine = engine_of(model)
        self.optimizer = optimizer
        self.task = task
        self.precision = precision
        self.clip = clip
        self.schedule = schedule
        self.number = 0
        self.last: Result | None = None
        self._autocast = PRECISIONS[precision]
        self._scale = LossScale() if precision == "fp16" else None
        self._names = _parameter_names(model, optimizer)
        self._compile = compile

    def __call__(self, batch: Batch) -> Result:
        """One optimizer step on the global batch. Collective.

        Raises StepError, on all ranks alike, when loss or gradients are not finite (with fp16 the
        step is skipped and the scale lowered instead); the parameters are untouched then.
        """
        if self.last is None:
            self._prepare(batch)
        scale = 1.0 if self._scale is None else self._scale.value
        totals = self.engine.gradients(self.task, batch, autocast=self._autocast, scale=scale)
        begun = time.perf_counter()
        decided = correct(totals, size=batch.size, scale=scale, clip=self.clip)
        skipped = self._scale is not None and math.isfinite(decided.loss) and not decided.finite
        if decided.finite:
            self.engine.update(self.optimizer, decided.factor)
            if self.schedule is not None:
                self.schedule.step()
        else:
            self.engine.discard()
            if not skipped:
                raise not_finite(decided, batch)
        if self._scale is not None:
            self._scale.adapt(finite=decided.finite)
        self.number += 1
        self.last = _result(decided.loss, decided.norm, totals, skipped, begun)
        return self.last

    def infer(self, micro: Micro, seed: int) -> Any:
        """The model's output on a micro-batch in this step's precision. Collective."""
        return self.engine.infer(self.task, micro, seed, autocast=self._autocast)

    def state_dict(self) -> dict[str, Any]:
        """Everything from which this step goes on; the optimizer's state by parameter name."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": _named(self.optimizer.state_dict(), self._names),
            "number": self.number,
            "engine": self.engine.state(),
        }
        if self.schedule is not None:
            state["schedule"] = self.schedule.state_dict()
        if self._scale is not None:
            state["scale"] = {"value": self._scale.value, "good": self._scale.good}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Raises CheckpointError, before anything changes, when the state is of another model,
        optimizer, schedule or precision.
        """
        _check_model(self.model, state["model"])
        optimizer = _numbered(state["optimizer"], self._names)
        parts = {"schedule": self.schedule, "scale": self._scale}
        for part, here in parts.items():
            if (part in state) != (here is not None):
                raise CheckpointError(
                    given=f"a Step {'with' if here is not None else 'without'} a {part}",
                    found=f"a checkpoint {'with' if part in state else 'without'} one",
                    fix="build the Step as in the run that wrote the checkpoint (schedule=, "
                    "precision=), or choose another run directory",
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(optimizer)
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self._scale is not None:
            self._scale.value = state["scale"]["value"]
            self._scale.good = state["scale"]["good"]
        self.engine.load_state(state["engine"])
        self.number = state["number"]

    def _prepare(self, batch: Batch) -> None:
        self._check_loss_adds_up(batch)
        if self._compile is not None:
            self.engine.compile(self._compile)

    def _check_loss_adds_up(self, batch: Batch) -> None:
        """Once: the loss of a micro-batch must be the sum of the losses of its halves.

        Only losses and outputs that can be cut along their first dimension are tried. The model runs
        once, in eval mode, and all random states are put back: fresh or resumed, nothing changes.
        """
        micro = batch.micros[0]
        if micro.samples < 2:
            return
        middle = micro.samples // 2
        with _aside(self.engine):
            output = self.infer(micro, batch.seed)
            pieces = _halves(output, micro, middle)
            if pieces is None:
                return
            whole, _ = self.task.reduce(output, micro, batch.seed)
            halves = [self.task.reduce(half, part, batch.seed) for half, part in pieces]
        first, second = (loss.item() for loss, _ in halves)
        total = whole.item()
        if math.isclose(total, first + second, rel_tol=0.02, abs_tol=1e-4):
            return
        mean = (first * middle + second * (micro.samples - middle)) / micro.samples
        if not math.isclose(total, mean, rel_tol=0.02, abs_tol=1e-4):
            return  # samples are coupled (contrastive losses and the like): their own business
        raise StepError(
            given=f"a loss of {total:.6g} for {micro.samples} samples",
            found=f"its halves give {first:.6g} and {second:.6g}: it is a mean, not a sum",
            fix="reduction='sum' in the loss function, and the number of samples as the count",
        )


def _result(loss: float, norm: float, totals: Totals, skipped: bool, begun: float) -> Result:
    seconds = time.perf_counter() - begun
    return Result(loss, norm, totals.counted, skipped, totals.forward, totals.backward, seconds)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module is in the mode that it was found in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _aside(engine: Engine) -> Iterator[None]:
    """Evaluation without gradients that leaves no trace in any random state, the user's included.

    Eval mode is for all models of the world: a GAN's loss runs through the other one.
    """
    devices = {p.device for p in engine.module.parameters()}
    cuda = [device.index for device in devices if device.type == "cuda"]
    kept = random_state()
    try:
        with torch.no_grad(), torch.random.fork_rng(cuda), ExitStack() as modes:
            for one in engine.world.engines:
                modes.enter_context(evaluation(one.module))
            yield
    finally:
        set_random_state(kept)


def _halves(output: Any, micro: Micro, middle: int) -> list[tuple[Any, Micro]] | None:
    size = micro.samples
    parts = []
    for start, stop in ((0, middle), (middle, size)):
        cut = (_cut(output, start, stop, size), _cut(micro.value, start, stop, size))
        if cut[0] is None or cut[1] is None:
            return None
        parts.append((cut[0], Micro(cut[1], micro.first + start, stop - start, micro.weight)))
    return parts


def _cut(value: Any, start: int, stop: int, size: int) -> Any:
    """Samples [start, stop) of tensors in tuples, lists and dicts; None where that can't be done."""
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() and len(value) == size else None
    if type(value) is dict:
        cut = {key: _cut(item, start, stop, size) for key, item in value.items()}
        return None if any(item is None for item in cut.values()) else cut
    if type(value) in (tuple, list):
        items = [_cut(item, start, stop, size) for item in value]
        return None if any(item is None for item in items) else type(value)(items)
    return None


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The user's names of the optimizer's parameters, in the order of its state's numbers."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in parameters if id(p) not in names]
    if strange:
        raise StepError(
            given=f"{type(optimizer).__name__} over {len(parameters)} parameters",
            found=f"{len(strange)} of them are not the model's (the first: shape "
            f"{tuple(strange[0].shape)}); gradients of others are not reduced over ranks",
            fix="optimizer = torch.optim.AdamW(model.parameters()) after parallelize; make further "
            "parameters, such as loss weights, part of the model",
        )
    return [names[id(p)] for p in parameters]


def _named(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    return {"state": {names[n]: item for n, item in state["state"].items()}, "groups": groups}


def _numbered(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    saved = [name for group in state["groups"] for name in group["params"]]
    if saved != names:
        missing = [name for name in names if name not in saved]
        unexpected = [name for name in saved if name not in names]
        raise CheckpointError(
            given=f"an optimizer over {len(names)} parameters",
            found=f"a checkpoint of one over {len(saved)}; missing in it: {_first(missing)}; "
            f"unexpected: {_first(unexpected)}" + ("" if missing or unexpected else " (other order)"),
            fix="give the optimizer the same parameters in the same groups, or choose another run "
            "directory",
        )
    numbers = {name: number for number, name in enumerate(names)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]} for group in state["groups"]
    ]
    return {
        "state": {numbers[name]: item for name, item in state["state"].items()},
        "param_groups": groups,
    }


def _check_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    there = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    missing = [name for name in here if name not in there]
    unexpected = [name for name in there if name not in here]
    reshaped = [
        f"{name}: {there[name]} instead of {here[name]}"
        for name in here
        if name in there and here[name] != there[name]
    ]
    if missing or unexpected or reshaped:
        raise CheckpointError(
            given=f"a {type(model).__name__} with {len(here)} tensors",
            found="a checkpoint of another model; "
            + "; ".join(
                f"{what}: {_first(names)}"
                for what, names in (
                    ("missing", missing),
                    ("unexpected", unexpected),
                    ("other shapes", reshaped),
                )
                if names
            ),
            fix="build the same model, or choose another run directory",
        )


def _first(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) or "none") + more

"""Bad input in one process: each row must say what was given, what was found and what to type."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shoal
from helpers.small_training import backward
from helpers.small_training import cross_entropy as loss
from shoal.util.errors import DataError, LaunchError, LayoutError, ShoalError, StepError

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3
TYPABLE = re.compile(r"\w\(|\w=|\w\[|shoal run|\(ls ")


class Rig:
    """A world of one with all that a training needs; rows below misuse one part each."""

    def __init__(self, world: shoal.World) -> None:
        self.world = world
        self.model = shoal.parallelize(nn.Linear(4, 3), world)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, loss: Any = loss, *, task: Any = None, **options: Any) -> shoal.Step:
        return shoal.Step(self.model, self.optimizer, task or shoal.Task(loss), **options)

    def loader(self, data: Any = (X, Y), batch_size: Any = 8, **options: Any) -> shoal.Loader:
        return shoal.Loader(data, self.world, batch_size=batch_size, **options)

    def batch(self, **options: Any) -> shoal.Batch:
        return next(self.loader(**options).epochs(1))

    def train(self, loss: Any) -> Any:
        return self.step(loss)(self.batch())

    def finish(self, **options: Any) -> Any:
        batch = self.batch()
        backward(batch, self.model, loss)
        return batch.finish(self.model, **options)

    def evaluate(self, metric: Any, data: Any = (X, Y), **options: Any) -> Any:
        return shoal.evaluate(self.step(), data, metrics={"share": metric}, **options)

    def two_models(self) -> None:
        other = shoal.parallelize(nn.Linear(4, 3), self.world)
        batch = self.batch()
        for micro in batch:
            total, count = loss(self.model(micro[0]), micro)
            batch.backward(total=total, count=count)
        other.zero_grad()

    def twice_backward(self) -> Any:
        batch = self.batch()
        for micro in batch:
            for _ in range(2):
                total, count = loss(self.model(micro[0]), micro)
                batch.backward(total=total, count=count)
        return batch.finish(self.model)


@pytest.fixture
def rig(world: shoal.World) -> Rig:
    return Rig(world)


class Exhausted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@dataclass(frozen=True)
class Bad:
    name: str
    act: Callable[[Rig], object]
    kind: type[ShoalError]
    given: str
    found: str
    fix: str


def sized(size: Any, **options: Any) -> Callable[[Rig], object]:
    return lambda rig: rig.loader(batch_size=size, **options)


def data(value: Any, **options: Any) -> Callable[[Rig], object]:
    return lambda rig: rig.loader(value, 2, **options)


def lossy(value: Callable[[Tensor, Any], Any]) -> Callable[[Rig], object]:
    return lambda rig: rig.train(value)


def init(**options: Any) -> Callable[[Rig], object]:
    return lambda _: shoal.init(**options)


def step(**options: Any) -> Callable[[Rig], object]:
    return lambda rig: rig.step(**options)


def finish(**options: Any) -> Callable[[Rig], object]:
    return lambda rig: rig.finish(**options)


def strategy(value: Any) -> Callable[[Rig], object]:
    return lambda rig: shoal.parallelize(nn.Linear(2, 2), rig.world, value)


def counted(count: float) -> Callable[[Rig], object]:
    return lossy(lambda output, _: (output.square().sum(), count))


def metric(value: Any) -> Callable[[Rig], object]:
    return lambda rig: rig.evaluate(value)


PRECISIONS = "'fp32', 'bf16', 'fp16'"
WHOLE = "an integer, 1 or more"
PAIR = "a tuple of two"
RETURN = "return F.cross_entropy(output, y, reduction='sum'), len(y)"
LOSS = r"the loss function <lambda> \(.*test_bad_input.py:\d+\)"
TASK = "Task(loss, inputs=lambda batch: batch)"
FOREIGN = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
PARALLELIZE = "model = shoal.parallelize(model, world)"
LOADER = DataLoader(TensorDataset(X))
OWN_LOOP = "for micro in batch: batch.backward"
METRICS = "metrics={'accuracy': shoal.Accuracy()}"

TABLE = [
    *(
        Bad(f"size {size!r}", sized(size), DataError, re.escape(f"batch_size={size!r}"), WHOLE, fix)
        for size, fix in (
            *((each, "=512") for each in (0, -4, 2.5, True, None, np.int64(0), np.float32(8))),
            ("8", "=8"),
        )
    ),
    Bad(
        "micro batches 0", sized(8, micro_batches=0),
        DataError, "micro_batches=0", WHOLE, "micro_batches=1",
    ),
    Bad(
        "more micro-batches than samples", sized(2, micro_batches=4),
        DataError, "batch_size=2, micro_batches=4", "2 of them would never get", "batch_size=4",
    ),
    Bad(
        "drop_last", sized(32, drop_last=True),
        DataError, "batch_size=32", "20 samples", "drop_last=False",
    ),
    *(
        Bad(
            f"wrapped {i}", act, StepError, "in torch's DataParallel",
            "its names begin with 'module.'", "shoal.parallelize(model, world)",
        )
        for i, act in enumerate((
            lambda rig: shoal.parallelize(nn.DataParallel(nn.Linear(4, 3)), rig.world),
            lambda rig: shoal.Step(nn.DataParallel(rig.model), rig.optimizer, shoal.Task(loss)),
        ))
    ),
    Bad(
        "schedule of a class", step(schedule=torch.optim.lr_scheduler.CosineAnnealingLR), StepError,
        "schedule=", "it is not a torch.optim.lr_scheduler.LRScheduler", "shoal.LRSchedule(",
    ),
    Bad(
        "torch's loader in a Run",
        lambda rig: shoal.Run("nowhere", rig.step(), cast(Any, LOADER)),
        DataError,
        "DataLoader", "no global batch", "shoal.Loader(dataset, world",
    ),
    Bad("no sample", data(X[:0]), DataError, "Tensor", "without samples", r"len\(dataset\)"),
    Bad("empty list", data([]), DataError, "list", "without samples", r"len\(dataset\)"),
    Bad(
        "iterable",
        lambda rig: next(shoal.Loader(Exhausted(), rig.world, batch_size=2).epochs(1)),
        DataError, "Exhausted", "has 0 samples", "let its __iter__ start from the beginning",
    ),
    Bad("generator", data(iter([1])), DataError, "list_iterator", "lacks __len__", "dataset"),
    Bad("DataLoader", data(LOADER), DataError, "DataLoader", "lacks __len__", r"\.dataset"),
    Bad("uneven", data((X, Y[:3])), DataError, "several", "{0: 20, 1: 3}", r"len\(t\)"),
    Bad(
        "no dimension", data(torch.ones(())),
        DataError, "without dimensions", "samples", r"tensor\[None\]",
    ),
    Bad(
        "names", data(np.array(["a", "b"])),
        DataError, "dtype <U1", "no such dtype", r"astype\('float32'\)",
    ),
    Bad("tensor and list", data((X, [1] * 20)), DataError, "tuple", "holds a list", "tensor"),
    Bad("splits", data({"train": [1]}), DataError, "dict", "holds a list", r"dataset\['train'\]"),
    *(
        Bad(
            f"layout {text}", init(layout=text),
            LayoutError, given, found, "layout=",
        )
        for text, given, found in (
            ("fsdp", "layout='fsdp'", "'fsdp' is not one of pipeline=N, replicate=N, shard=N"),
            ("replicate=two", "replicate=two", "'replicate=two' is not one of"),
            ("replicate=0", "replicate=0", "positive integer"),
            ("shard=2,shard=2", "shard=2,shard=2", "'shard' appears twice"),
            ("shard=-1,tensor=-1", "shard=-1 and tensor=-1", "only one degree"),
            ("shard=3", "layout='shard=3' on 1 process", "need 3 processes"),
            ("", "layout=''", "no axis"),
            (4, "layout=4", "a int, not a string"),
        )
    ),
    *(
        Bad(
            f"device {name}", init(device=name),
            LaunchError, given, found, "device='cpu'",
        )
        for name, given, found in (
            ("gpu", "device='gpu'", "at start of device string: gpu"),
            ("cuda:99", "device='cuda:99'", "GPU|CUDA"),
            ("xpu", "device='xpu'", "XPU|xpu"),
        )
    ),
    *(
        Bad(
            f"time limit {limit}", init(timeout=limit),
            LaunchError, f"timeout={limit}", "positive number of seconds", "timeout=600",
        )
        for limit in (0, -1, float("nan"), float("inf"))
    ),
    Bad(
        "backend", init(backend="fast"),
        LaunchError, "'fast'", "gloo", "backend='gloo'",
    ),
    *(
        Bad(
            f"strategy {value!r}",
            strategy(value),
            StepError, re.escape(repr(value)), "an object such as shoal.DDP()", r"shoal.DDP\(\)",
        )
        for value in ("ddp", shoal.DDP)
    ),
    Bad(
        "no module", lambda r: shoal.parallelize(len, r.world),  # type: ignore[arg-type]
        StepError, "parallelize.builtin", "a torch.nn.Module", r"parallelize\(Model\(\), world\)",
    ),
    Bad(
        "no parameters", lambda r: shoal.parallelize(nn.ReLU(), r.world),
        StepError, "ReLU", "without trainable parameters", r"requires_grad_\(True\)",
    ),
    Bad(
        "parallelized twice", lambda r: shoal.parallelize(r.model, r.world),
        StepError, r"parallelize\(Linear", "already belong", r"copy.deepcopy\(model\)",
    ),
    Bad(
        "part parallelized before", lambda r: shoal.parallelize(nn.Sequential(r.model), r.world),
        StepError, r"parallelize\(Sequential", "already belong to a parallelized Linear", "once",
    ),
    Bad(
        "not parallelized", lambda r: shoal.Step(nn.Linear(4, 3), r.optimizer, shoal.Task(loss)),
        StepError, "Linear.*not parallelized$", "no engine", re.escape(PARALLELIZE),
    ),
    Bad(
        "a copy", lambda r: shoal.Step(copy.deepcopy(r.model), r.optimizer, shoal.Task(loss)),
        StepError, "a copy of one that was", "no engine", re.escape(PARALLELIZE),
    ),
    Bad(
        "foreign parameters", lambda r: shoal.Step(r.model, FOREIGN, shoal.Task(loss)),
        StepError, "SGD over 1 parameters", r"1 of them.*shape \(2,\)", r"model.parameters\(\)",
    ),
    Bad(
        "precision", step(precision="fp8"),
        StepError, "'fp8'", PRECISIONS, "precision='bf16'",
    ),
    Bad(
        "dtype", step(precision=torch.half),
        StepError, "torch.float16", PRECISIONS, "'bf16'",
    ),
    Bad(
        "compile", step(compile="jit"),
        StepError, "'jit'", "'inductor', 'blocks', 'script'", "'inductor'",
    ),
    Bad("no task", step(task=loss), StepError, "function", "a Task", r"shoal.Task\(loss\)"),
    *(
        Bad(f"clip {clip} in {where}", act, StepError, f"clip={clip}", "a number above 0", "clip=1.0")
        for clip in (0, -1.0, float("nan"))
        for where, act in (("Step", step(clip=clip)), ("finish", finish(clip=clip)))
    ),
    Bad(
        "only a loss", lossy(lambda o, b: o.sum()),
        StepError, LOSS, f"a Tensor instead of {PAIR}", RETURN,
    ),
    Bad("three", lossy(lambda o, b: (o.sum(), 1, 2)), StepError, LOSS, f"a tuple of 3.*{PAIR}", RETURN),
    Bad("a list", lossy(lambda o, b: [o.sum(), 1]), StepError, LOSS, f"a list of 2.*{PAIR}", RETURN),
    Bad("nothing", lossy(lambda o, b: None), StepError, LOSS, f"a NoneType.*{PAIR}", RETURN),
    Bad(
        "per sample", lossy(lambda o, b: (o.sum(1), 8)),
        StepError, LOSS, r"a loss of shape \(8,\)", RETURN,
    ),
    Bad(
        "a float", lossy(lambda o, b: (o.sum().item(), 8)),
        StepError, LOSS, "a loss of type float", RETURN,
    ),
    Bad("swapped", lossy(lambda o, b: (8, o.sum())), StepError, LOSS, "a loss of type int", RETURN),
    Bad(
        "text count", lossy(lambda o, b: (o.sum(), "8")),
        StepError, LOSS, "a count of type str", RETURN,
    ),
    Bad(
        "mask", lossy(lambda o, b: (o.sum(), b[1] > 0)),
        StepError, LOSS, r"count.*shape \(8,\)", RETURN,
    ),
    *(
        Bad(
            f"count {count}", counted(count),
            StepError, "8 samples", f"count of {count} in total", r"len\(batch\[1\]\)",
        )
        for count in (0, -3, float("nan"))
    ),
    Bad(
        "detached", lossy(lambda o, b: (o.detach().sum(), 8)),
        StepError, "the loss", "not depend on any trainable", r"without .detach\(\)",
    ),
    Bad(
        "NaN", lossy(lambda o, b: (o.sum() * torch.nan, 8)),
        StepError, "0 to 7", "loss of nan", "clip=1.0",
    ),
    Bad(
        "NaN in the data", lambda r: r.step()(r.batch(data=(X.clone().fill_(torch.nan), Y))),
        StepError, "0 to 7", r"; batch\[0\] has values that are not finite, among samples 0 to 7",
        r"replace them in the dataset \(torch.nan_to_num\)",
    ),
    Bad(
        "infinite gradient", lossy(lambda o, b: ((o * 0).sum().abs().sqrt(), 8)),
        StepError, "samples 0 to 7", "gradient norm of nan", "set_detect_anomaly",
    ),
    Bad(
        "bare batch", lambda r: r.step()(r.batch(data=X)),
        DataError, "Tensor.*inputs", "neither", "inputs=",
    ),
    Bad(
        "outside", lambda r: r.batch().backward(total=X.sum(), count=1),
        StepError, "outside a loop", "no current micro", OWN_LOOP,
    ),
    Bad(
        "nothing to finish", lambda r: r.batch().finish(r.model),
        StepError, r"batch.finish\(model\) for 1", "called 0 times", OWN_LOOP,
    ),
    Bad("twice", lambda r: r.twice_backward(), StepError, "for 1 micro", "called 2 times", OWN_LOOP),
    Bad(
        "finish another", lambda r: r.batch().finish(nn.Linear(1, 1)),
        StepError, "a custom training loop", "no engine", r"batch.backward\(.*model=model\)",
    ),
    Bad(
        "which model", Rig.two_models,
        StepError, "loop", "2 parallelized", r"backward\(.*model=model\)",
    ),
    Bad(
        "one number", metric(lambda o, t: 1.0),
        StepError, "share", "a float, not two numbers: 1.0", "lambda",
    ),
    Bad("rubbish", metric(lambda o, t: ("a", 2)), StepError, "share", r"\('a', 2\)", "return"),
    Bad("unreduced", metric(lambda o, t: (t == 0, 2)), StepError, "share", "not two numbers", "return"),
    Bad("a class", metric(shoal.Accuracy), StepError, "share", "Accuracy is a class", METRICS),
    Bad("a name", metric("accuracy"), StepError, "share", "'accuracy' can't be called", METRICS),
    Bad(
        "shapes", lambda r: r.evaluate(shoal.Accuracy(), targets=lambda b: b[1][:2]),
        DataError, r"scores of shape \(20, 3\)", r"targets of shape \(2,\), not \(20,\)", "lambda",
    ),
    Bad(
        "metrics unnamed", lambda r: shoal.evaluate(r.step(), X, metrics=[1]),  # type: ignore[arg-type]
        StepError, "list", "mapping of names", METRICS,
    ),
    Bad(
        "a metric named loss", lambda r: shoal.evaluate(r.step(), (X, Y), metrics={"loss": loss}),
        StepError, "'loss'", "itself returns", METRICS,
    ),
    Bad(
        "evaluate in batches of 0", lambda r: r.evaluate(shoal.Accuracy(), batch_size=0),
        DataError, "batch_size=0", WHOLE, "batch_size=512",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE])
def test_bad_input(rig: Rig, row: Bad) -> None:
    before = copy.deepcopy(rig.model.state_dict())
    with pytest.raises(ShoalError) as caught:
        row.act(rig)
    error = caught.value
    assert type(error) is row.kind
    for name in ("given", "found", "fix"):
        text, wanted = getattr(error, name), getattr(row, name)
        assert wanted in text or re.search(wanted, text), f"{name}: {text}"
    assert TYPABLE.search(error.fix), error.fix
    # Nothing has moved, and the next batch is trained as if this had never been.
    assert rig.optimizer.state_dict()["state"] == {}
    for name, value in rig.model.state_dict().items():
        assert torch.equal(value, before[name])
    if "which" not in row.name:
        assert rig.train(loss).loss == pytest.approx(plain_loss(before, rig.batch()), rel=1e-6)


def plain_loss(state: dict[str, Tensor], batch: shoal.Batch) -> float:
    [micro] = batch.micros
    return float(
        F.cross_entropy(F.linear(micro.value[0], state["weight"], state["bias"]), micro.value[1])
    )


def test_numpy_integers_are_sizes_and_counts(rig: Rig) -> None:
    loader = rig.loader(batch_size=np.int64(8), micro_batches=np.uint8(2))
    assert type(loader.batch_size) is int
    result = rig.step(lambda o, b: (loss(o, b)[0], np.int64(len(b[1]))))(next(loader.epochs(1)))
    assert result.counted == 8


def test_models_that_were_dropped_are_no_choice(rig: Rig) -> None:
    backbone = nn.Linear(4, 3)
    for _ in range(3):
        del rig.model
        rig.model = shoal.parallelize(nn.Sequential(backbone), rig.world)
        rig.optimizer = torch.optim.AdamW(rig.model.parameters())
        rig.finish()

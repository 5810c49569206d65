"""A mean returned as a sum is told at the first step; no other loss is taken for one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import shoal
from helpers.small_training import Loss, cross_entropy, mean_cross_entropy, sgd, squared_error
from shoal.distributed.to_device import values_kept
from shoal.strategies.eval_mode import evaluation
from shoal.training.loss_check import is_mean

SAMPLES = 24
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 6, generator=GENERATOR)
Y = torch.arange(SAMPLES) % 5
# As tokens: every third has no target, and of one half all but one.
TOKENS = torch.where(torch.arange(SAMPLES * 3).reshape(SAMPLES, 3) % 3 == 0, -100, Y[:, None])
TOKENS[12:23] = -100


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Own(nn.Module):
    """Returns what models of other libraries do: an object that holds their loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=F.cross_entropy(self.linear(x), y, reduction=self.reduction))


class Sampling(nn.Module):
    """Noise also in eval mode, as in a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output + torch.randn(output.shape)


class OtherInEval(nn.Module):
    """Predictions instead of scores in eval mode, as detectors give them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor | list[int]:
        output: Tensor = self.linear(x)
        return output if self.training else output.argmax(-1).tolist()


def tokens(reduction: str, output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    scores = output[:, None].expand(-1, 3, -1).flatten(0, 1)
    targets = batch[1].flatten()
    return F.cross_entropy(scores, targets, reduction=reduction), (targets != -100).sum()


def contrastive(reduction: str, output: Tensor, batch: Any) -> tuple[Tensor, int]:
    similar = output @ output.T
    return F.cross_entropy(similar, torch.arange(len(output)), reduction=reduction), len(output)


def noisy(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    shift = torch.rand(()) + random.random() + np.random.random()
    return (output + shift).square().sum(), len(output)


def own_noise(output: Tensor, batch: Any, noise: shoal.Noise) -> tuple[Tensor, int]:
    return (output - noise.normal(5)).square().sum(), len(output)


def cancelling(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    advantages = torch.linspace(-1, 1, len(output), dtype=output.dtype)[:, None]
    return (advantages * (output * 0 + 100)).sum(), len(output)


def of_fixed_size(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.reshape(SAMPLES, 5).square().sum(), SAMPLES


def train(model: nn.Module, loss: Any, data: Any = (X, Y), **options: Any) -> shoal.StepResult:
    given = {"batch_size": SAMPLES, "micro_batches": 1, "collate_fn": None}
    loading = {name: options.pop(name, value) for name, value in given.items()}
    task = shoal.Task(loss, inputs=options.pop("inputs", None))
    with shoal.init() as world:
        shoal.parallelize(model, world)
        step = shoal.Step(model, sgd(model), task, **options)
        return step(next(shoal.Loader(data, world, **loading).epochs(1)))


LINEAR = lambda: nn.Linear(6, 5)  # noqa: E731 - short in the tables below
HALF = lambda: nn.Linear(6, 5, dtype=torch.bfloat16)  # noqa: E731
DICT = {"input": X, "y": Y}
NAMED = {"inputs": lambda batch: batch["input"]}
BOTH = {"inputs": lambda batch: (batch[0], batch[1])}


@pytest.mark.parametrize(
    ("model", "loss", "data", "options"),
    [
        pytest.param(LINEAR, lambda o, b: (F.cross_entropy(o, b[1]), len(b[1])), (X, Y), {}, id="mean"),
        pytest.param(LINEAR, lambda o, b: (F.cross_entropy(o, b[1]), 1), (X, Y), {}, id="count 1"),
        pytest.param(LINEAR, lambda o, b: (F.mse_loss(o, b[0][:, :5]), 24), (X, Y), {}, id="squares"),
        pytest.param(LINEAR, lambda o, b: (o.square().mean() * 1e-9, 24), (X, Y), {}, id="tiny"),
        pytest.param(LINEAR, lambda o, b: tokens("mean", o, b), (X, TOKENS), {}, id="tokens"),
        pytest.param(LINEAR, lambda o, b: (F.cross_entropy(o, b["y"]), 24), DICT, NAMED, id="mapping"),
        pytest.param(
            LINEAR,
            lambda o, b: (F.cross_entropy(o, b[1]), len(b[1])),
            (X, Y),
            {"batch_size": 15, "micro_batches": 3, "precision": "bf16"},
            id="micro-batches in mixed precision",
        ),
        pytest.param(
            HALF, lambda o, b: (F.cross_entropy(o, b[1]), 24), (X.bfloat16(), Y), {}, id="half"
        ),
        pytest.param(lambda: Own("mean"), lambda o, b: (o.loss, 24), (X, Y), BOTH, id="model's own"),
    ],
)
def test_means_are_told_before_anything_moves(
    model: Callable[[], nn.Module], loss: Loss, data: Any, options: dict[str, Any]
) -> None:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(shoal.StepError, match="it is a mean, not a sum") as caught:
        train(net, loss, data, **options)
    assert "reduction='sum'" in caught.value.fix
    assert "output.loss * n, n" in caught.value.fix
    assert "test_loss_check.py:" in caught.value.given
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("model", "loss", "data", "options"),
    [
        pytest.param(LINEAR, cross_entropy, (X, Y), {}, id="sum"),
        pytest.param(LINEAR, cross_entropy, Pair(X, Y), {"batch_size": 7}, id="namedtuple, odd"),
        pytest.param(LINEAR, lambda o, b: (o.sum() * 0, 24), (X, Y), {}, id="zero"),
        pytest.param(LINEAR, lambda o, b: (o.square().sum() * 1e-10, 24), (X, Y), {}, id="tiny"),
        pytest.param(LINEAR, squared_error, (X, X[:, :5]), {}, id="squares"),
        pytest.param(
            LINEAR, lambda o, b: (F.cross_entropy(o, b[1]), 1), (X, Y), {"batch_size": 1}, id="of one"
        ),
        pytest.param(LINEAR, lambda o, b: tokens("sum", o, b), (X, TOKENS), {}, id="tokens"),
        pytest.param(LINEAR, lambda o, b: contrastive("sum", o, b), (X, Y), {}, id="contrastive"),
        pytest.param(LINEAR, lambda o, b: contrastive("mean", o, b), (X, Y), {}, id="its mean"),
        pytest.param(LINEAR, noisy, (X, Y), {}, id="noise in the loss"),
        pytest.param(LINEAR, own_noise, (X, Y), {}, id="noise by position"),
        pytest.param(Sampling, cross_entropy, (X, Y), {}, id="noise in the model"),
        pytest.param(LINEAR, cancelling, (X, Y), {}, id="cancelling"),
        pytest.param(HALF, cancelling, (X.bfloat16(), Y), {}, id="cancelling in half precision"),
        pytest.param(HALF, cross_entropy, (X.bfloat16(), Y), {}, id="half precision"),
        pytest.param(LINEAR, of_fixed_size, (X, Y), {}, id="of a fixed size"),
        pytest.param(OtherInEval, cross_entropy, (X, Y), {}, id="another output in eval mode"),
        pytest.param(
            LINEAR,
            lambda o, b: (F.cross_entropy(o, b["y"], reduction="sum"), len(b["y"])),
            DICT,
            NAMED,
            id="mapping",
        ),
        pytest.param(lambda: Own("sum"), lambda o, b: (o.loss, 24), (X, Y), BOTH, id="model's own"),
    ],
)
def test_nothing_else_is_taken_for_a_mean(
    model: Callable[[], nn.Module], loss: Loss, data: Any, options: dict[str, Any]
) -> None:
    assert np.isfinite(train(model(), loss, data, **options).loss)


def test_the_trial_leaves_no_trace() -> None:
    seen: list[bool] = []

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.training)
            random.random()
            np.random.random()
            torch.rand(())
            output: Tensor = super().forward(x)
            return output

    norm = nn.BatchNorm1d(5)
    net = Net(nn.Linear(6, 5), norm)
    norm.eval()  # frozen, as when fine-tuning
    with shoal.init() as world:
        shoal.parallelize(net, world, random="ranks")
        step = shoal.Step(net, torch.optim.SGD(net.parameters(), lr=0.1), shoal.Task(cross_entropy))
        batch = next(shoal.Loader((X, Y), world, batch_size=8).epochs(1))
        draws = draw_after(lambda: net(batch.micros[0].value[0]))
        assert draw_after(lambda: step(batch)) == draws
    assert seen == [True, True, True]
    assert [module.training for module in net.modules()] == [True, True, False]
    assert norm.running_mean is not None
    assert not norm.running_mean.any()


class Columns:
    """A batch of an object that can't be cut in halves."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.x, self.y = (torch.stack(column) for column in zip(*samples, strict=True))


class Flowing(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples one after the other, none of which can be fetched again."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, Y, strict=True)


class Jittered(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from the global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + torch.randn(6), Y[index]


def of_columns(reduction: str, output: Tensor, batch: Columns) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch.y, reduction=reduction), len(batch.y)


def token_loss(reduction: str, output: Tensor, batch: Any) -> tuple[Tensor, int]:
    scores = output[:, None].expand(-1, 3, -1).flatten(0, 1)
    return F.cross_entropy(scores, (batch[1] % 5).flatten(), reduction=reduction), batch[1].numel()


COLUMNS: dict[str, Any] = {"inputs": lambda batch: batch.x, "collate_fn": Columns}
SAMPLES_OF = list(zip(X, Y, strict=True))


@pytest.mark.parametrize("data", [SAMPLES_OF, Jittered()], ids=["samples", "augmented"])
def test_a_mean_over_batches_that_cannot_be_cut_is_told(data: Any) -> None:
    with pytest.raises(shoal.StepError, match="it is a mean, not a sum"):
        train(nn.Linear(6, 5), partial(of_columns, "mean"), data, **COLUMNS)
    with pytest.warns(match="draws random") if isinstance(data, Jittered) else nullcontext():
        assert np.isfinite(train(nn.Linear(6, 5), partial(of_columns, "sum"), data, **COLUMNS).loss)


def test_a_mean_over_the_tokens_of_one_sample_is_told() -> None:
    tokens = (X, torch.arange(SAMPLES * 3).reshape(SAMPLES, 3))
    with pytest.raises(shoal.StepError, match="it is a mean, not a sum"):
        train(nn.Linear(6, 5), partial(token_loss, "mean"), tokens, batch_size=1)
    assert np.isfinite(train(nn.Linear(6, 5), partial(token_loss, "sum"), tokens, batch_size=1).loss)


def of_sum_of_columns(output: Tensor, batch: Columns) -> tuple[Tensor, int]:
    return of_columns("sum", output, batch)


def broken(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.sum(), len(batch[2])


def test_a_loss_that_fails_in_the_step_too_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IndexError):
        train(nn.Linear(6, 5), broken)
    assert "could not be checked" not in capsys.readouterr().out


def test_a_loss_that_could_not_be_tried_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    train(nn.Linear(6, 5), of_sum_of_columns, Flowing(), **COLUMNS)
    said = capsys.readouterr().out
    assert "the loss function of_sum_of_columns (" in said
    assert "could not be checked: its batches hold a Columns that can't be cut in halves" in said
    assert "not their mean" in said
    train(nn.Linear(6, 5), cross_entropy)
    assert "could not be checked" not in capsys.readouterr().out


def draw_after(action: Callable[[], object]) -> tuple[float, float, float]:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    action()
    return random.random(), np.random.random(), torch.rand(()).item()


def test_what_a_mean_looks_like() -> None:
    nan, inf = float("nan"), float("inf")
    means = [(1.0, 1.0, 1.0), (1.5, 1.0, 2.0), (1.25, 1.0, 2.0)]  # the last by counts, 3 to 1
    others = [(2.0, 1.0, 1.0), (1.7, 1.0, 2.0), (0.0, 0.0, 0.0)]
    others += [(nan, 1.0, 1.0), (1.0, 1.0, nan), (inf, inf, 1.0)]
    for whole, first, second in means + others:
        expected = (whole, first, second) in means
        assert is_mean(whole, ((first, 3.0), (second, 1.0)), (2, 2)) is expected, (whole, first, second)


class Merging(nn.Module):
    """Merges an adapter into its weight in eval mode, as LoRA layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def test_layers_that_do_more_than_note_the_mode_are_put_back_too() -> None:
    frozen = Merging().eval()
    model = nn.Sequential(nn.Sequential(Merging(), frozen), nn.Sequential(frozen), nn.Dropout().eval())
    modules = list(model.modules())
    modes = [module.training for module in modules]
    with evaluation(model):
        assert not any(module.training for module in modules)
    assert [module.training for module in modules] == modes
    assert [module.merged for module in modules if isinstance(module, Merging)] == [False, True]


class InPlace(nn.Module):
    """Scales its input in place."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2.0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("objects", [False, True])
def test_a_model_that_works_in_place_trains_on_the_batch_as_it_was(
    world: shoal.World, objects: bool
) -> None:
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    model = shoal.parallelize(InPlace(), world)
    expected = nn.functional.cross_entropy(model.linear(2.0 * x), y).item()

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        labels = torch.tensor([label for _, label in batch[1]]) if objects else batch[1]
        return nn.functional.cross_entropy(output, labels, reduction="sum"), len(labels)

    samples = list(zip(x, y.tolist(), strict=True))

    def collate(rows: list[Any]) -> Any:
        labels = [("label", label) for _, label in rows]
        numbers = torch.tensor([label for _, label in rows])
        return torch.stack([row for row, _ in rows]), labels if objects else numbers

    loader = shoal.Loader(samples, world, batch_size=8, shuffle=False, collate_fn=collate)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    assert step(next(loader.epochs(1))).loss == pytest.approx(expected, rel=1e-5)


class Keeping(nn.Module):
    """Keeps what it computes, in all the ways that Python has."""

    buffer: Tensor

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("buffer", torch.zeros(()))
        self.calls, self.list, self.tensor = 0, [0.0], torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.list.append(1.0)
        self.tensor += 1
        self.buffer = self.buffer + 1
        self.last = x
        self.linear.weight.data.mul_(2)
        return self.linear(x)  # type: ignore[no-any-return]


def test_the_trial_leaves_no_trace_in_the_model(world: shoal.World) -> None:
    model = shoal.parallelize(Keeping(), world)
    weight, buffer = model.linear.weight.clone(), model.buffer
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(cross_entropy))
    data = shoal.Loader((torch.randn(8, 3), torch.arange(8) % 2), world, batch_size=8)
    step.try_loss(next(data.epochs(1)))
    assert torch.equal(model.linear.weight, weight)
    assert model.buffer is buffer
    assert not model.buffer
    assert (model.calls, model.list, float(model.tensor)) == (0, [0.0], 0.0)
    assert not hasattr(model, "last")


@pytest.mark.parametrize("inference", [False, True])
def test_values_are_put_back_whose_shape_has_changed(inference: bool) -> None:
    with torch.inference_mode(inference):
        value = torch.arange(6.0).view(2, 3)
    with values_kept({"x": value}), torch.inference_mode(inference):
        value.unsqueeze_(1).mul_(2)
    assert torch.equal(value, torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(("compile", "tried"), [(None, [8]), ("inductor", [4])])
def test_the_loss_of_a_model_to_be_compiled_is_tried_on_four_samples(
    compile: str | None, tried: list[int], world: shoal.World
) -> None:
    """Uncompiled, a whole batch of it may need more memory than there is."""
    seen: list[int] = []

    class Seen(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            seen.append(len(given))
            return super().forward(given)

    model = shoal.parallelize(Seen(6, 5), world)
    batch = next(iter(shoal.Loader((X, Y), world, batch_size=8).epochs(1)))
    for loss, raised in (
        (cross_entropy, nullcontext()),
        (mean_cross_entropy, pytest.raises(shoal.StepError)),
    ):
        seen.clear()
        with raised:
            shoal.Step(model, sgd(model), shoal.Task(loss), compile=compile).try_loss(batch)
        assert seen == tried

"""Sequences and logits that stay divided, and plans that are proved on the first batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from helpers.one_process import check_refused
from helpers.ranks import RankError, Ranks
from shoal.strategies.dtensor import share

LAYOUT = "tensor=2"
pytestmark = pytest.mark.processes

VOCABULARY, WIDTH, HEADS, LONGEST = 12, 8, 4, 6

PLAN = {
    **{f"blocks.*.{name}": "column" for name in ("q", "k", "v", "wide")},
    "blocks.*.o": "row",
    "blocks.*.narrow": "row",
    "tokens": "vocabulary",
    "head": "head",
}
FULL = pytest.mark.full
SEQUENCE = PLAN | dict.fromkeys(("positions", "norm", "blocks.*.norm[12]"), "sequence")
LOGITS = PLAN | {"head": "logits"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = (*y.shape[:2], -1, WIDTH // HEADS)
        q, k, v = (layer(y).view(heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def cross_entropy(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Token-weighted, with labels that are ignored and scores in (batch, classes, length)."""
    labels = batch[0].roll(-1, 1).masked_fill(batch[0] == 3, -100)
    sums = F.cross_entropy(output.transpose(1, 2), labels, reduction="sum", ignore_index=-100)
    return sums, (labels != -100).sum()


def log_softmax(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return -F.log_softmax(output, -1).square().sum(), len(output)


def smoothed(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    labels = batch[0].flatten()
    loss = F.cross_entropy(output.flatten(0, 1), labels, reduction="sum", label_smoothing=0.1)
    return loss, len(output)


def prepare(world: shoal.World, plan: Any, length: int, loss: Any) -> tuple[Any, Any, Tensor]:
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(GPT().double(), world, shoal.TensorParallel(plan=plan))
    step = shoal.Step(model, torch.optim.AdamW(model.parameters()), shoal.Task(loss), clip=0.1)
    shape, generator = (16, length), torch.Generator().manual_seed(0)
    return model, step, torch.randint(0, VOCABULARY, shape, generator=generator)


def trained(world: shoal.World, plan: Any, length: int, loss: Any = cross_entropy) -> list[float]:
    """Losses and norms, then loss and accuracy over all samples."""
    _, step, tokens = prepare(world, plan, length, loss)
    numbers = []
    for batch in shoal.Loader((tokens, tokens), world, batch_size=8).epochs(2):
        result = step(batch)
        numbers += [result.loss, result.norm]
    found = shoal.evaluate(step, (tokens, tokens), metrics={"accuracy": shoal.Accuracy()})
    return [*numbers, found["loss"], found["accuracy"]]


@FULL
@pytest.mark.parametrize(
    "plan", [SEQUENCE, LOGITS, SEQUENCE | LOGITS], ids=["sequence", "logits", "both"]
)
@pytest.mark.parametrize(
    "length", [*(pytest.param(each, marks=pytest.mark.long) for each in (1, 6)), 5]
)
def test_a_gpt_trains_like_one_process_at_any_length(
    ranks: Ranks, plan: dict[str, str], length: int
) -> None:
    with shoal.init() as world:
        expected = trained(world, PLAN, length)
    for found in ranks.call(trained, plan, length):
        assert found == pytest.approx(expected, rel=1e-9)


class Sent(TorchDispatchMode):
    """Counts elements that each of two ranks sends: an all-reduce takes as many as both others."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "_c10d_functional":
            name = function.overloadpacket.__name__
            share_sent = {"all_reduce": 1, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 0.5}
            self.elements += share_sent.get(name, 0) * args[0].numel()
        return function(*args, **(kwargs or {}))


def cost(world: shoal.World, plan: Any, loss: Any) -> tuple[float, int]:
    """Elements sent by a forward and a backward, and the bytes that are kept between the two."""
    _, step, tokens = prepare(world, plan, LONGEST, loss)
    (batch,) = shoal.Loader((tokens,), world, batch_size=len(tokens)).epochs(1)
    step(batch)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = share(tensor).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Sent() as sent, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step.engine.gradients(step.task, batch, autocast=None, scale=1.0)
    step.engine.discard()
    return sent.elements, sum(kept.values())


@pytest.mark.full
def test_divided_sequences_and_logits_take_less_memory_and_no_more_bytes(ranks: Ranks) -> None:
    plain, sequence, logits = (
        ranks.call(cost, plan, cross_entropy)[0] for plan in (PLAN, SEQUENCE, LOGITS)
    )
    assert sequence[0] <= plain[0]
    assert sequence[1] < plain[1]
    assert logits[0] < plain[0]
    assert logits[1] < plain[1]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (log_softmax, "a log-softmax of them that is not part of a cross-entropy"),
        (smoothed, "mixed torch.Tensor and DTensor"),
    ],
)
def test_a_loss_that_needs_whole_logits_is_refused(ranks: Ranks, loss: Any, words: str) -> None:
    check_refused(ranks, (words, 'instead of "logits"'), trained, LOGITS, LONGEST, loss)
    with shoal.init() as world:
        expected = trained(world, PLAN, LONGEST, loss)
    assert ranks.call(trained, PLAN, LONGEST, loss)[0] == pytest.approx(expected, rel=1e-9)


def compiled(world: shoal.World, plan: Any, how: str) -> None:
    model, step, tokens = prepare(world, plan, LONGEST, cross_entropy)
    step = shoal.Step(model, step.optimizer, step.task, compile=how)
    step(next(iter(shoal.Loader((tokens,), world, batch_size=16).epochs(1))))


@pytest.mark.parametrize(
    ("plan", "how"), [(SEQUENCE, "inductor"), (LOGITS, "inductor"), (PLAN, "script")]
)
def test_what_torch_cannot_compile_is_refused(ranks: Ranks, plan: Any, how: str) -> None:
    check_refused(ranks, "torch cannot compile", compiled, plan, how)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "softmax": lambda x: x.softmax(-1),
    "statistics": lambda x: F.layer_norm(x, x.shape[-1:]),
    "shape": lambda x: x.view(4, 16),
}


class Between(nn.Module):
    """A wide and a narrow layer, and in between what the name says."""

    def __init__(self, between: str, zeros: bool = False) -> None:
        super().__init__()
        self.between = between
        self.wide, self.narrow = nn.Linear(6, 16), nn.Linear(16, 6)
        self.drop = nn.Dropout(0.5)
        if zeros:
            nn.init.zeros_(self.narrow.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.drop(BETWEEN[self.between](self.wide(x))))  # type: ignore[no-any-return]


class Unpaired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x).mean(-1, keepdim=True)  # type: ignore[no-any-return]


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def step_once(world: shoal.World, model: nn.Module, plan: dict[str, str], raw: bool) -> float:
    """The loss of one step with the plan, or with one that is derived where it is empty."""
    model = shoal.parallelize(copy.deepcopy(model), world, shoal.TensorParallel(plan=plan))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = shoal.Loader((torch.ones(4, 6),), world, batch_size=4).epochs(1)
    if not raw:
        return shoal.Step(model, optimizer, shoal.Task(squares))(batch).loss
    for micro in batch:
        total, count = squares(model(micro[0]), micro)
        batch.backward(total=total, count=count, model=model)
    return batch.finish(model).loss


BOTH = {"wide": "column", "narrow": "row"}


@pytest.mark.parametrize("raw", [False, True], ids=["step", "loop"])
@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (
            Between("softmax", False),
            BOTH,
            "the input of narrow differs from",
        ),
        (Between("softmax", zeros=True), {}, "the input of narrow differs"),
        (Between("statistics"), BOTH, "the input of narrow differs"),
        (Unpaired(), {"wide": "column"}, "the output of the model differs"),
    ],
)
def test_a_plan_that_changes_the_numbers_is_refused(
    ranks: Ranks, model: nn.Module, plan: dict[str, str], words: str, raw: bool
) -> None:
    check_refused(ranks, words, step_once, model, plan, raw)


def test_a_plan_that_fails_is_refused_and_not_a_model_that_does(ranks: Ranks) -> None:
    words = "it raises an error that the original does not raise"
    check_refused(ranks, words, step_once, Between("shape"), BOTH, False)
    for found in ranks.attempt(step_once, nn.Sequential(nn.Flatten(7), Between("relu")), {}, False):
        assert isinstance(found, RankError)
        assert found.error is None  # torch's own words about dimensions


def test_positions_that_meet_a_divided_sequence_are_named(ranks: Ranks) -> None:
    plan = {name: way for name, way in SEQUENCE.items() if name != "positions"}
    check_refused(ranks, "an nn.Embedding for positions", trained, plan, LONGEST)


@pytest.mark.parametrize("raw", [False, pytest.param(True, marks=FULL)], ids=["step", "loop"])
def test_a_derived_plan_trains(ranks: Ranks, raw: bool) -> None:
    model = Between("relu")
    model.drop.p = 0.0
    with shoal.init() as world:
        expected = step_once(world, model, {}, raw)
    assert ranks.call(step_once, model, {}, raw) == pytest.approx([expected] * 2)

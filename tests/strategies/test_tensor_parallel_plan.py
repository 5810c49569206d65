"""Plans of tensor parallelism: what is derived, and what a degree can't divide."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from shoal.strategies.tensor_parallel.plan import (
    check_divisible,
    check_sequences,
    derived_plan,
    planned,
)


class Gated(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, wide), nn.Linear(width, wide)
        self.down = nn.Linear(wide, width)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads = heads
        if key_heads is not None:
            self.config = SimpleNamespace(num_key_value_heads=key_heads, num_attention_heads=heads)
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(width, width) for _ in range(3))


class Net(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(10, 4), blocks, nn.Linear(4, 10)


WIDE, NARROW = nn.Linear(4, 8), nn.Linear(8, 4)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (nn.TransformerEncoderLayer(4, 2, 8), {"linear1": "column", "linear2": "row"}),
        (
            nn.ModuleDict({"mlps": nn.ModuleList([Gated(4, 8), Gated(4, 8)])}),
            {"mlps.*.gate": "column", "mlps.*.up": "column", "mlps.*.down": "row"},
        ),
        (
            nn.ModuleDict({"mlps": nn.ModuleList([Gated(4, 8), Gated(4, 7)])}),
            {"mlps.0.gate": "column", "mlps.0.up": "column", "mlps.0.down": "row"},
        ),
        (nn.Sequential(WIDE, nn.GELU(), nn.Dropout(), NARROW), {"0": "column", "3": "row"}),
        (
            Net(nn.ModuleList([nn.Sequential(WIDE, nn.ReLU(), NARROW)])),
            {
                "blocks.*.0": "column",
                "blocks.*.2": "row",
                "embedding": "vocabulary",
                "head": "head",
            },
        ),
    ],
)
def test_a_plan_is_derived_from_pairs_that_widen_and_narrow(
    model: nn.Module, plan: dict[str, str]
) -> None:
    derived = derived_plan(model, 2)
    if "blocks.*.0" in plan:  # numbers of a Sequential below a number stay numbers or not, as they fit
        assert planned(model, derived) == planned(model, plan)
    else:
        assert derived == plan


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(WIDE, nn.LayerNorm(8), NARROW),
        nn.Sequential(WIDE, nn.Softmax(-1), NARROW),
        nn.Sequential(NARROW, nn.ReLU(), WIDE),
        nn.ModuleList([WIDE, NARROW]),
        Gated(4, 7),
        Attention(4, 2),
        nn.MultiheadAttention(4, 2),
    ],
)
def test_what_is_not_recognised_is_not_divided(model: nn.Module) -> None:
    with pytest.raises(shoal.StepError, match="no feed-forward pairs with a width divisible by 2"):
        derived_plan(model, 2)


@pytest.mark.parametrize(
    ("heads", "key_heads", "words"),
    [
        (3, None, "the num_heads of attention = 3, not divisible by 2"),
        (2, 1, "the num_key_value_heads of attention.config = 1, not divisible by 2"),
        (4, 2, None),
    ],
)
def test_a_degree_that_does_not_divide_the_heads_is_refused(
    heads: int, key_heads: int | None, words: str | None
) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"attention": Attention(12, heads, key_heads)})
    layers = planned(model, {"attention.[qk]_proj": "column", "attention.o_proj": "row"})
    if words is None:
        check_divisible(model, layers, 2)
    else:
        with pytest.raises(shoal.LayoutError, match=words) as caught:
            check_divisible(model, layers, 2)
        assert "attention.q_proj" in caught.value.given


def test_two_axes_that_split_sequences_are_refused() -> None:
    layers = {"norm": "sequence", "wide": "column"}
    check_sequences(layers, shoal.Layout.parse("shard=2,tensor=2"))
    check_sequences({"wide": "column"}, shoal.Layout.parse("context=2,tensor=2"))
    with pytest.raises(shoal.LayoutError, match="splits the sequences already"):
        check_sequences(layers, shoal.Layout.parse("context=2,tensor=2"))


class Linear(nn.Module):
    """A library's own, which is not torch's."""


def test_a_layer_of_the_same_name_as_torchs_is_told_apart() -> None:
    with pytest.raises(shoal.StepError) as caught:
        planned(nn.Sequential(Linear()), {"0": "column"})
    found = f"the module 0 is a {__name__}.Linear, not a torch.nn.modules.linear.Linear"
    assert caught.value.found == found

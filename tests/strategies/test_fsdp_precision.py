"""FSDP with a Step's mixed precision: bytes gathered, bytes alive, the dtypes of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers import fsdp_bytes
from helpers.fsdp_bytes import CLASSES, WIDTH, Block, batches, measured, step_of
from helpers.ranks import Ranks

LAYOUT = "shard=2"
pytestmark = pytest.mark.processes


class Net(nn.Module):
    """Modules of either dtype under autocast, a buffer in float32, a unit with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.register_buffer("places", torch.randn(WIDTH))
        self.first = nn.LayerNorm(WIDTH)
        norms = (nn.LayerNorm(WIDTH), nn.GroupNorm(4, WIDTH), nn.RMSNorm(WIDTH), nn.BatchNorm1d(WIDTH))
        self.blocks = nn.ModuleList(map(Block, norms))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embedding(x) + self.places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Exact(Net):
    """The same without BatchNorm, which computes with the samples of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1] = Block(nn.LayerNorm(WIDTH))


def test_parameters_are_gathered_in_16_bits_and_not_copied(ranks: Ranks) -> None:
    wide, half = fsdp_bytes.expected()
    assert ranks.call(measured, "fp32") == [wide, wide]
    assert ranks.call(measured, None) == [half, half]


def dtypes(world: shoal.World, strategy: Any, precision: str) -> dict[str, str]:
    """The dtypes of the outputs of modules, and of the gradients that the optimizer gets."""
    step = step_of(world, Net, strategy, precision=precision)
    found: dict[str, str] = {}

    def note(name: str) -> Any:
        return lambda _, inputs, output: found.update({name: f"{inputs[0].dtype} {output.dtype}"})

    for name, module in step.model.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(note(name))
    optimizer = step.optimizer
    optimizer.register_step_pre_hook(
        lambda *_: found.update(
            {n: str(p.grad.dtype) for n, p in step.model.named_parameters() if p.grad is not None}
        )
    )
    for batch in batches(world, Net):
        step(batch)
    return found


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_modules_compute_in_the_dtypes_of_one_process(ranks: Ranks, precision: str) -> None:
    with shoal.init() as world:
        expected = dtypes(world, None, precision)
    assert expected["embedding"] == "torch.int64 torch.float32"
    assert expected["blocks.0.norm"] == "torch.float32 torch.float32"
    for found in ranks.call(dtypes, shoal.FSDP(), precision):
        assert found == expected


def trained(world: shoal.World, strategy: Any, precision: str, compile: str | None) -> list[Tensor]:
    """Losses of steps, of evaluations, and outputs of the model between steps."""
    step = step_of(world, Exact, strategy, precision=precision, compile=compile, clip=1.0)
    tokens = torch.arange(10)
    found: list[Tensor] = []
    for batch in batches(world, Exact, micro_batches=2):
        result = step(batch)
        step.model.eval()
        with torch.no_grad():
            outputs = step.model(tokens)
        assert outputs.dtype == torch.float32
        step.model.train()
        evaluated = shoal.evaluate(step, (tokens, tokens % CLASSES), batch_size=10)
        found += [torch.tensor(result.loss), outputs, torch.tensor(evaluated["loss"])]
    return found


WHOLE = shoal.FSDP(accumulate="whole", reshard_after_forward=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "precision", "compile"),
    [
        (shoal.FSDP(), "bf16", None),
        (WHOLE, "fp16", None),
        pytest.param(shoal.FSDP(), "bf16", "inductor", marks=pytest.mark.full),
    ],
)
def test_between_steps_the_model_computes_in_its_own_dtype(
    ranks: Ranks, strategy: shoal.FSDP, precision: str, compile: str | None
) -> None:
    with shoal.init() as world:
        expected = trained(world, None, precision, None)
    for found in ranks.call(trained, strategy, precision, compile):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)


def computed_in(world: shoal.World, strategy: Any, precision: str) -> str:
    return str(step_of(world, fsdp_bytes.Plain, strategy, precision=precision).dtype)


@pytest.mark.full
def test_a_step_knows_the_dtype_in_which_it_computes(ranks: Ranks) -> None:
    """For the peak of the device, and for hints about products in float32."""
    half = shoal.FSDP(param_dtype="bf16")
    assert set(ranks.call(computed_in, half, "fp32")) == {"torch.bfloat16"}
    assert set(ranks.call(computed_in, shoal.FSDP(), "fp32")) == {"torch.float32"}
    assert set(ranks.call(computed_in, shoal.FSDP(), "bf16")) == {"torch.bfloat16"}

"""Every random operation of torch draws numbers that belong to samples, or is listed with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.keyed_draws import draw, keyed
from shoal.data.micro import MicroBatch
from shoal.strategies.random_draws import operations
from shoal.strategies.random_draws.draws import register

SAMPLES, WIDTH = 6, 5

LEFT = {
    operation: reason
    for reason, operations in {
        "a fused kernel of GPUs; scaled_dot_product_attention takes another one if it has dropout": (
            "_cudnn_attention_backward",
            "_cudnn_attention_forward",
            "_efficient_attention_forward",
            "_fill_mem_eff_dropout_mask_",
            "_flash_attention_forward",
            "_flash_attention_forward.quantized",
            "_flash_attention_forward_no_dropout_inplace",
            "_scaled_dot_product_attention_math_for_mps",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention.quantized",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_fused_attention_overrideable",
            "_triton_scaled_dot_attention",
            "_triton_scaled_dot_attention.out",
        ),
        "recurrent layers of GPU libraries; rank 0 prints that the layer draws by rank": (
            "_cudnn_init_dropout_state",
            "_cudnn_init_dropout_state.out",
            "_cudnn_rnn",
            "_cudnn_rnn.out",
            "_lstm_mps",
            "_lstm_mps.out",
            "miopen_rnn",
            "miopen_rnn.out",
        ),
        "no function of torch calls it": ("_fused_dropout", "_fused_dropout.out"),
        "draws nothing": ("_fused_sdp_choice", "_nested_tensor_softmax_with_shape"),
        "a function of TorchScript": (
            "_no_grad_normal_",
            "_no_grad_uniform_",
            "initial_seed",
            "manual_seed.generator",
            "seed",
        ),
        "raises StepError": ("binomial", "binomial.out"),
    }.items()
    for operation in operations
}
"""Overloads whose numbers do not belong to samples, with the reasons."""


def random_operations() -> dict[str, Any]:
    """The overloads of aten that draw, by their tag or a generator among their arguments."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
            overload = getattr(packet, schema.overload_name or "default", None)
            tags = getattr(overload, "tags", ())
            draws = torch.Tag.nondeterministic_seeded in tags
            if draws or any("Generator" in str(each.type) for each in schema.arguments):
                suffix = f".{schema.overload_name}" if schema.overload_name else ""
                found[schema.name.removeprefix("aten::") + suffix] = overload
    return found


GIVEN: dict[str, Any] = {
    "p": 0.5,
    "size": [SAMPLES, WIDTH],
    "n": 40,
    "from": 0,
    "low": 0,
    "to": 9,
    "high": 9,
    "num_samples": 3,
    "replacement": True,
    "train": True,
    "training": True,
    "dropout_p": 0.5,
    "std": 1.0,
    "mean": 0.0,
    "generator": None,
}
"""Arguments by their names; others have defaults."""


def called(operation: Any) -> Tensor:
    """A result of an operation, called with small arguments that its schema asks for."""
    packet = operation._schema.name.removeprefix("aten::")
    if packet in RECURRENT:
        return recurrent(packet, packed=operation._overloadname == "data")
    given: dict[str, Any] = {}
    for each in operation._schema.arguments:
        if each.is_out:
            shape: Any = (SAMPLES, WIDTH)
            dtype = torch.bool if each.name == "out1" else torch.float32
            if packet in ("multinomial", "randperm"):
                shape, dtype = (0,), torch.int64
            given[each.name] = torch.empty(shape, dtype=dtype)
        elif str(each.type) == "Tensor":
            value = -0.5 if packet.startswith("rrelu") else 0.5
            tensor = torch.full((SAMPLES, WIDTH), value)
            given[each.name] = torch.tensor(9) if each.name == "high" else tensor
        elif each.name in GIVEN:
            given[each.name] = GIVEN[each.name]
    result = operation(**given)
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


def recurrent(kind: str, *, packed: bool) -> Tensor:
    """Two layers with dropout between them."""
    named = {"nonlinearity": kind.removeprefix("rnn_")} if kind.startswith("rnn") else {}
    layer: Any = RECURRENT[kind](WIDTH, WIDTH, 2, dropout=0.5, **named)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.1)
    x: Any = torch.ones(3, SAMPLES, WIDTH)
    x = nn.utils.rnn.pack_padded_sequence(x, torch.full((SAMPLES,), 3)) if packed else x
    output = layer(x)[0]
    found: Tensor = output.data if packed else output
    return found


@pytest.mark.parametrize(("name", "operation"), random_operations().items())
def test_every_random_operation_of_torch_is_keyed_or_listed(name: str, operation: Any) -> None:
    if name in LEFT:
        return
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(draw(lambda: called(operation), samples=SAMPLES))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    other = draw(lambda: called(operation), samples=SAMPLES, seed=1)
    assert not torch.equal(found[0], other), "nothing was drawn"


def test_the_list_names_operations_of_torch() -> None:
    assert set(LEFT) <= set(random_operations())
    assert set(operations.REPLACED) <= set(random_operations())


def many(make: Callable[[], Tensor]) -> Tensor:
    return draw(make).double()


@pytest.mark.parametrize(
    ("make", "mean", "variance"),
    [
        (lambda: torch.empty(64, 4096).geometric_(0.2), 5, 20),
        (lambda: torch.empty(64, 4096, dtype=torch.int64).geometric_(0.2), 5, 20),
        (lambda: torch.empty(64, 4096).log_normal_(0, 0.5), math.exp(0.125), 0.3646),
        (lambda: torch.empty(64, 4096).cauchy_(2, 3).sub(2).div(3).atan(), 0, math.pi**2 / 12),
        (lambda: torch.normal(torch.full((64, 4096), 2.0), 3.0), 2, 9),
        (lambda: torch.normal(2.0, torch.full((64, 4096), 3.0)), 2, 9),
        (lambda: torch.normal(torch.full((64, 1), 2.0), torch.full((64, 4096), 3.0)), 2, 9),
        (lambda: torch.poisson(torch.full((64, 1024), 0.3)), 0.3, 0.3),
        (lambda: torch.poisson(torch.full((64, 1024), 170.0)), 170, 170),
        (lambda: torch._standard_gamma(torch.full((64, 256), 0.4)), 0.4, 0.4),
        (lambda: torch._standard_gamma(torch.full((64, 256), 9.0)), 9, 9),
        (lambda: torch._sample_dirichlet(torch.full((64, 256, 4), 2.0))[..., 0], 0.25, 3 / 144),
        (lambda: torch.multinomial(torch.tensor([[1.0, 0, 2, 1]] * 64), 4096, True), 1.75, 1.1875),
        (lambda: torch.empty(64, 4096, dtype=torch.int16).random_(), 2**14, 2**30 / 12),
        (lambda: torch.empty(64, 4096, dtype=torch.int64).random_() / 2.0**63, 0.5, 1 / 12),
        (lambda: torch.empty(64, 4096).random_() / 2.0**24, 0.5, 1 / 12),
        (lambda: torch.randint(-(2**40), 2**40, (64, 4096)) / 2.0**40, 0, 1 / 3),
        (lambda: torch.randint(0, 3, (64, 4096)), 1, 2 / 3),
        (lambda: torch.rand(64, 4096, dtype=torch.complex64).imag, 0.5, 1 / 12),
        (lambda: torch.randn(64, 4096, dtype=torch.complex64).real, 0, 0.5),
    ],
)
def test_means_and_variances(make: Callable[[], Tensor], mean: float, variance: float) -> None:
    found = many(make)
    assert float(found.mean()) == pytest.approx(mean, abs=5 * (variance / found.numel()) ** 0.5)
    assert float(found.var()) == pytest.approx(variance, rel=0.1)
    assert not torch.equal(found[0], found[1]), "two samples have the same numbers"


def test_classes_of_weight_0_are_not_drawn() -> None:
    weights = torch.tensor([0.0, 3, 0, 1, 0])
    for replacement, count in ((True, 4096), (False, 2)):
        found = draw(lambda: torch.multinomial(weights.expand(64, 5), count, replacement))  # noqa: B023
        assert found.unique().tolist() == [1, 3]
        if not replacement:
            assert (found[:, 0] != found[:, 1]).all()


def test_wrong_arguments_raise_torchs_errors() -> None:
    for wrong in (
        lambda: torch.multinomial(torch.tensor([[-1.0, 1.0]] * 64), 3, True),
        lambda: torch.empty(64).geometric_(2.0),
        lambda: torch.poisson(torch.full((64,), -1.0)),
    ):
        with pytest.raises(RuntimeError):
            draw(wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_never_reaches_1(dtype: torch.dtype) -> None:
    assert float(draw(lambda: torch.rand(64, 4096, dtype=dtype)).max()) < 1


def test_a_permutation_belongs_to_the_step() -> None:
    def permuted() -> Tensor:
        return torch.randperm(64)

    found = draw(permuted)
    assert sorted(found.tolist()) == list(range(64))
    assert torch.equal(found, draw(permuted, first=128))  # another micro-batch of the same step
    assert not torch.equal(found, draw(permuted, seed=1))


def test_gradients_are_torchs() -> None:
    shapes = torch.full((8, 3), 2.0, dtype=torch.float64, requires_grad=True)
    draw(lambda: torch._standard_gamma(shapes).sum(), samples=8).backward()
    assert shapes.grad is not None
    assert bool((shapes.grad > 0).all())
    for inplace in (False, True):
        x = torch.full((8, 3), -1.0, dtype=torch.float64, requires_grad=True)
        slope = draw(lambda: F.rrelu(x.clone(), 0.1, 0.3, True, inplace), samples=8)  # noqa: B023
        slope.sum().backward()
        assert torch.equal(x.grad, -slope)  # type: ignore[arg-type]


def test_binomial_is_an_error() -> None:
    def drawn() -> Tensor:
        return torch.binomial(torch.ones(8, 3), torch.full((8, 3), 0.5))

    with pytest.raises(shoal.StepError, match=r"add up torch\.bernoulli draws"):
        draw(drawn, samples=8)
    drawn()  # outside a step it is torch's


# shoal.samples


def test_a_declared_dimension() -> None:
    def drawn() -> Tensor:
        with shoal.samples(dim=-1):
            return torch.rand(3, 4, 6)

    whole = draw(drawn, samples=6)
    parts = [draw(lambda: declared(2, (3, 4, 2)), first=first, samples=2) for first in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts, 2))


def declared(dim: int | None, shape: tuple[int, ...]) -> Tensor:
    with shoal.samples(dim=dim):
        return torch.rand(shape)


def test_no_dimension() -> None:
    found = draw(lambda: declared(None, (6, 2)), samples=6)
    assert torch.equal(found, draw(lambda: declared(None, (6, 2)), first=6, samples=3))
    assert not torch.equal(found, draw(lambda: torch.rand(6, 2), samples=6))


@pytest.mark.parametrize(("dim", "shape"), [(1, (6, 5)), (2, (6, 5)), (-3, (6, 5)), (0, (4,))])
def test_a_dimension_without_the_samples_is_an_error(dim: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(shoal.StepError, match=r"(?s)has 6 samples.*dim=None"):
        draw(lambda: declared(dim, shape), samples=6)
    assert declared(dim, shape).shape == shape  # outside a step


@pytest.mark.parametrize("wrong", ["0", 0.0, True])
def test_a_dimension_is_an_integer(wrong: Any) -> None:
    with pytest.raises(shoal.StepError, match="an integer, or None"), shoal.samples(dim=wrong):
        pass


def test_compiled_code_ignores_the_declaration() -> None:
    compiled = torch.compile(declared, backend="eager", fullgraph=True)
    assert compiled(1, (6, 5)).shape == (6, 5)


# Attention


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_with_dropout_takes_a_kernel_that_is_not_fused(dropout: float) -> None:
    taken = []

    def original() -> Tensor:
        taken.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
        return torch.zeros(())

    x = torch.zeros(4, 2, 3, 5)
    for is_drawing in (True, False):
        operations.attention(lambda: is_drawing, original, x, x, x, None, dropout)  # noqa: B023
    assert taken == [(dropout == 0, True), (True, True)]
    assert torch.backends.cuda.flash_sdp_enabled()


def test_whether_a_draw_is_keyed() -> None:
    from shoal.strategies.random_draws.draws import _is_drawing

    assert not _is_drawing()
    drop = nn.Dropout(0.5)
    register(drop)
    found = []
    drop.register_forward_hook(lambda *_: found.append(_is_drawing()))
    drop(torch.ones(4))
    keyed(lambda: drop(torch.ones(4)), MicroBatch(None, 0, 4, 1.0))
    assert found == [False, True]

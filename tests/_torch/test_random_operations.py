"""Random operations of torch are intercepted, in the module that calls them."""

from __future__ import annotations

import subprocess
import sys
import traceback
from types import FrameType

import pytest
import torch
from torch import nn

from shoal._torch.modules import module_called_in

pytestmark = pytest.mark.compat


def test_the_module_of_a_frame() -> None:
    frames: list[FrameType] = []
    model = nn.Linear(1, 1)
    model.register_forward_hook(lambda *_: frames.append(sys._getframe(1)))
    model(torch.ones(1, 1))
    assert any(module_called_in(frame) is model for frame, _ in traceback.walk_stack(frames[0]))
    assert module_called_in(sys._getframe()) is None


@pytest.mark.full
def test_random_operations_are_replaced() -> None:
    program = """
import torch
from torch import nn
from shoal._torch.random_operations import in_backward, replace_draws

def instead(original, tensor, low=0.0, high=1.0, *, generator=None):
    return original() if generator is not None else tensor.fill_(7)

assert replace_draws({"uniform_": instead})
assert torch.rand(2).tolist() == [7, 7]
assert torch.rand(2, generator=torch.Generator()).max() < 1
seen = []
x = torch.ones(1, requires_grad=True)
x.register_hook(lambda _: seen.append(in_backward()))
x.sum().backward()
assert seen == [True] and not in_backward()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_attention_is_replaced() -> None:
    program = """
import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from shoal._torch.random_operations import replace_attention

def result(x):
    x = x.clone().requires_grad_()
    y = attention(x, x, x, is_causal=True)
    y.square().sum().backward()
    return y.detach(), x.grad

x = torch.randn(2, 3, 4, 8)
expected, seen = result(x), []

def instead(original, query, key, value, mask=None, dropout_p=0.0, *rest, **named):
    seen.append(dropout_p)
    return original()

replace_attention(instead, "AutogradCPU")
assert all(map(torch.equal, result(x), expected))
torch.nn.MultiheadAttention(8, 2, 0.25)(x[0], x[0], x[0], need_weights=False)
assert seen == [0.0, 0.25]
"""
    subprocess.run([sys.executable, "-c", program], check=True)

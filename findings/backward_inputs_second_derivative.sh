#!/bin/sh
# torch 2.13.0: through a function that can be differentiated once only, `loss.backward()` of a gradient
# penalty raises, but `torch.autograd.backward(loss, inputs=parameters)` does not: it runs only the nodes
# that lead to the given leaves, and the node that would raise leads to none. The term of the second
# derivative is missing from the gradient, without an error. One might expect the same error.
# Source: documentation of torch.autograd.backward (inputs) and of once_differentiable.
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$directory/twice.py" <<'PYTHON'
import torch
from torch.autograd.function import once_differentiable


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def penalty():
    weight = torch.tensor(3.0, requires_grad=True)
    x = torch.tensor(2.0, requires_grad=True)
    (slope,) = torch.autograd.grad(Square.apply(weight * x), x, create_graph=True)
    return weight, slope  # the slope is 2 w^2 x, its derivative by w is 4 w x = 24


weight, slope = penalty()
try:
    slope.backward()
    raise SystemExit("backward() did not raise")
except RuntimeError as error:
    print("backward():", error)
weight, slope = penalty()
torch.autograd.backward(slope, inputs=[weight])
print("backward(inputs=[weight]): gradient", float(weight.grad), "of 24")
assert float(weight.grad) == 12.0
PYTHON
"$directory/venv/bin/python" "$directory/twice.py"
# Output seen:
# backward(): trying to differentiate twice a function that was marked with @once_differentiable
# backward(inputs=[weight]): gradient 12.0 of 24

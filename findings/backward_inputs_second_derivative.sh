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
    (slope,) = torch.autograd.grad(weight * Square.apply(x), x, create_graph=True)
    return weight, slope + weight  # 2 w x + w, whose derivative by w is 2 x + 1 = 5


weight, loss = penalty()
try:
    loss.backward()
    raise SystemExit("backward() did not raise")
except RuntimeError as error:
    print("backward():", error)
weight, loss = penalty()
torch.autograd.backward(loss, inputs=[weight])
print("backward(inputs=[weight]): gradient", float(weight.grad), "of 5")
assert float(weight.grad) == 1.0
PYTHON
"$directory/venv/bin/python" "$directory/twice.py"
# Output seen:
# backward(): trying to differentiate twice a function that was marked with @once_differentiable
# backward(inputs=[weight]): gradient 1.0 of 5

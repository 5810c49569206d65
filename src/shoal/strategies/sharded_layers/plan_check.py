"""Comparison of a sharded model with the original model: both run on the first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shoal._torch.dispatch import tree_leaves
from shoal._torch.modules import parameters
from shoal.strategies.coupling.batch_norm import coupled_layers
from shoal.strategies.dtensor import whole
from shoal.strategies.eval_mode import each_in_eval_mode, untouched
from shoal.strategies.random_draws.draws import constant_draws
from shoal.strategies.random_draws.slices import DTensorDraws, Slices


class PlanCheck:
    """Comparison of the inputs of each layer of a plan in the sharded and in the original model.

    Inputs are compared and not only outputs, because a layer that starts with weights of zero would
    hide differences of its input. In the original model, each layer has its full parameters only while
    it runs.

    With `slices`, both run in the mode of the model, and the shapes of their random draws are recorded.
    The original runs only if `needed`, called after the sharded one, returns True.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        slices: Slices | None = None,
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._mesh = mesh
        self._slices = slices
        self._needed = needed
        self._whole = False
        self._seen: list[tuple[str, Tensor]] = []
        self._replaced: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}
        self.found: str | None = None

    def run(self, model: nn.Module, call: Callable[[], Any], values: Any) -> None:
        """Run both models with `call` on `values`. `found` is the first difference. Collective.

        If both fail, the plan is not the cause, and there is no finding.
        """

        def without_trace() -> Any:
            with untouched(model, values):
                return call()

        with _calm(model) if self._slices is None else _drawing(model):
            self._run(without_trace)

    def _run(self, call: Callable[[], Any]) -> None:
        error: Exception | None = None
        try:
            self._see("the output of the model", call())
        except Exception as caught:
            error = caught
        if not self._needed():
            return
        self._seen.reverse()
        self._whole = True
        stack = ExitStack()
        if self._slices is not None:
            stack.enter_context(self._slices.without("tensor"))
        try:
            with stack:
                self._compare("the output of the model", call())
        except Exception:
            return
        finally:
            for layer in list(self._replaced):
                self.leave(layer)
        if error is not None:
            text = str(error).partition("\n")[0]
            self.found = (
                f"it raises an error that the original does not raise: {type(error).__name__}: {text}"
            )

    def enter(self, name: str, layer: nn.Module, arguments: Any) -> bool:
        """Record or compare the inputs of a layer. Return whether it runs with full parameters."""
        what = f"the input of {name}"
        if not self._whole:
            self._see(what, arguments)
            return False
        self._compare(what, arguments)
        self._replaced[layer] = [
            (part, key, parameter)
            for part in layer.modules()
            for key, parameter in part.named_parameters(recurse=False)
        ]
        for part, key, parameter in self._replaced[layer]:
            parameters(part)[key] = nn.Parameter(whole(parameter.detach()), requires_grad=False)
        return True

    def leave(self, layer: nn.Module) -> bool:
        """Restore the parameters of a layer after its call. Return whether they were full ones."""
        for part, key, parameter in self._replaced.pop(layer, []):
            parameters(part)[key] = parameter
        return self._whole

    def _see(self, what: str, tree: Any) -> None:
        self._seen += [(what, whole(t).detach()) for t in tree_leaves(tree) if isinstance(t, Tensor)]

    def _compare(self, what: str, tree: Any) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, Tensor) or self.found is not None:
                continue
            name, seen = self._seen.pop() if self._seen else ("nothing", tensor)
            if name != what:
                self.found = f"the calls differ: {what} in one process, {name} in the sharded model"
            elif not self._equal(seen, tensor.detach()):
                self.found = f"{what} differs from that in one process"

    def _equal(self, seen: Tensor, expected: Tensor) -> bool:
        """Return whether `seen` is `expected`, or this rank's features of it, up to rounding."""
        if seen.shape != expected.shape and expected.dim():
            expected = expected.tensor_split(self._mesh.size(), -1)[self._mesh.get_local_rank()]
        if seen.shape != expected.shape:
            return False
        if not expected.is_floating_point():
            return torch.equal(seen, expected)
        tolerance = torch.finfo(expected.dtype).eps ** 0.5
        distance = torch.linalg.vector_norm((seen - expected).double())
        size = torch.linalg.vector_norm(expected.double())
        return not bool(distance > tolerance * size)  # values that are not finite count as equal


@contextmanager
def _calm(model: nn.Module) -> Iterator[None]:
    """Set eval mode without gradients. Sets only the flags, since `train` may do more, as in LoRA.

    Functions that draw in eval mode too draw constants: sharded activations would get other numbers.
    """
    with each_in_eval_mode(model.modules()), constant_draws(), torch.no_grad():
        yield


@contextmanager
def _drawing(model: nn.Module) -> Iterator[None]:
    """Run without gradients in the mode of the model, with the draws of DTensors known."""
    with each_in_eval_mode(coupled_layers(model)), DTensorDraws(), torch.no_grad():
        yield

"""Mixed precision of models that FSDP2 has sharded: parameters are gathered in the dtype of autocast.

Autocast alone would gather parameters in float32 and then copy them to 16 bits: twice the bytes, and
after forward each rank would hold a 16-bit copy of the complete model for backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shoal._torch.fsdp import parameter_dtypes, use_policy

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FLOAT32 = (*_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Bilinear)
"""Modules whose operations need parameters in the dtype of their buffers or inputs."""


class GatheredPrecision:
    """The dtype in which sharded modules gather their parameters: that of a Step's mixed precision.

    The forward still runs under torch's autocast, which decides the dtype of each operation and finds
    parameters that it need not convert. Norms and embeddings return float32 where they would from
    parameters in float32. A unit keeps its dtype if that is not float32, or if it has modules that do
    not work with parameters in 16 bits (BatchNorm).

    `divided` are the modules that FSDP2 has sharded with the policy `given`, inner ones first.
    """

    def __init__(
        self, divided: Sequence[Any], given: MixedPrecisionPolicy, reduce_dtype: torch.dtype
    ) -> None:
        self._given = given
        self._reduce_dtype = reduce_dtype
        self._wanted: torch.dtype | None = None
        self._used: torch.dtype | None = None
        self._parts: list[Any] = []
        if given.param_dtype is not None:
            return  # the user has chosen the dtype in which parameters are gathered
        inner: set[int] = set()
        for part in divided:
            own = [module for module in part.modules() if id(module) not in inner]
            inner |= {id(module) for module in own}
            learned = [m for m in own if next(m.parameters(recurse=False), None) is not None]
            if any(isinstance(module, _FLOAT32) for module in learned):
                continue
            if parameter_dtypes(part) == {torch.float32}:
                self._parts.append(part)
                part.register_forward_pre_hook(self._follow, prepend=True)
                _return_float32(own)

    def use(self, autocast: torch.dtype | None) -> None:
        """Gather parameters in the dtype `autocast` from now on; None is their own dtype."""
        self._wanted = autocast
        if self._used is not autocast:
            policy = self._given
            if autocast is not None:
                policy = MixedPrecisionPolicy(autocast, self._reduce_dtype, cast_forward_inputs=False)
            for part in self._parts:
                use_policy(part, policy)
            self._used = autocast

    @contextmanager
    def under(self, autocast: torch.dtype | None) -> Iterator[None]:
        """Gather parameters in the dtype `autocast` within a `with` block."""
        before = self._wanted
        self.use(autocast)
        try:
            yield
        finally:
            self._wanted = before  # used by the next forward pass, if there is one

    def _follow(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self.use(self._wanted)


def _return_float32(modules: Sequence[nn.Module]) -> None:
    """Let embeddings and norms return float32 where they would from parameters in float32."""
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.register_forward_hook(_widened)
        for kind, forward in ((nn.LayerNorm, _layer_norm), (nn.GroupNorm, _group_norm)):
            if type(module).forward is kind.forward and "forward" not in vars(module):
                module.forward = MethodType(forward, module)


def _widened(module: nn.Module, _: object, output: Tensor) -> Tensor:
    return output.float() if torch.is_autocast_enabled(output.device.type) else output


# torch's CPU kernels don't take inputs in float32 with parameters in 16 bits.
def _layer_norm(norm: nn.LayerNorm, input: Tensor) -> Tensor:
    weight, bias = _as_wide_as(input, norm.weight), _as_wide_as(input, norm.bias)
    return F.layer_norm(input, norm.normalized_shape, weight, bias, norm.eps)


def _group_norm(norm: nn.GroupNorm, input: Tensor) -> Tensor:
    weight, bias = _as_wide_as(input, norm.weight), _as_wide_as(input, norm.bias)
    return F.group_norm(input, norm.num_groups, weight, bias, norm.eps)


def _as_wide_as(input: Tensor, parameter: Tensor | None) -> Tensor | None:
    return (
        None if parameter is None else parameter.to(torch.promote_types(input.dtype, parameter.dtype))
    )

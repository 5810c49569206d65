"""Attention over sliced sequences: ranks exchange slices for heads (Ulysses).

Jacobs et al. 2023, section 3. An all-to-all turns a slice with all heads into the full sequence with
some of the heads, torch's kernel computes their attention, and another all-to-all turns the result
back. So all ranks have the same work with a causal mask too, and nothing is approximated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.strategies.comm_timing import waiting
from shoal.telemetry.step_timer import Timeline
from shoal.util import accelerator
from shoal.util.errors import LayoutError, StepError


@dataclass(frozen=True)
class SlicePeers:
    """The ranks with slices of the same sequences: their group, its size, and this rank's index."""

    group: Any
    size: int
    index: int
    timeline: Timeline


class HeadParallelAttention(TorchFunctionMode):
    """Function mode in which each rank computes attention for some heads, over the full sequence.

    A function mode intercepts calls however they are imported, and keeps torch's layers from using
    special kernels in evaluation. Where random numbers do not belong to samples, dropout draws separate
    numbers for each slice, and all other random numbers are the same on all ranks of a sequence,
    because decisions must be the same.
    """

    def __init__(self, unit: str, peers: SlicePeers) -> None:
        super().__init__()
        self._unit = unit or "the model"
        self._peers = peers
        # Its calls are not intercepted again: modes are off while one of them handles a call.
        self._multi_head = _calling(F.multi_head_attention_forward, self._attend)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **named)
        if function is F.multi_head_attention_forward:
            self._check_multi_head(named)
            return self._multi_head(*args, **named)
        if function is F.dropout and named["training"] and named["p"]:
            with self._own_noise(args[0].device):
                return function(*args, **named)
        return function(*args, **named)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self._check(query, key, attn_mask)
        query, key, value = self._to_heads(*map(_cast, (query, key, value)))
        noise = self._own_noise(query.device) if dropout_p else contextlib.nullcontext()
        with noise:
            result = F.scaled_dot_product_attention(
                query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return self._to_slices(result)

    def _to_heads(self, *slices: Tensor) -> list[Tensor]:
        """Exchange (batch, heads, length / n, features) for (batch, heads / n, length, features)."""
        size = self._peers.size
        outgoing = [each.unflatten(1, (size, -1)).movedim(1, 0) for each in slices]
        packed = torch.cat([each.reshape(size, -1) for each in outgoing], 1)
        sizes = [each[0].numel() for each in outgoing]
        incoming = _Exchange.apply(packed, self._peers).split(sizes, 1)
        return [
            part.reshape(each.shape).movedim(0, 2).flatten(2, 3)
            for part, each in zip(incoming, outgoing, strict=True)
        ]

    def _to_slices(self, heads: Tensor) -> Tensor:
        outgoing = heads.unflatten(2, (self._peers.size, -1)).movedim(2, 0).contiguous()
        incoming: Tensor = _Exchange.apply(outgoing, self._peers)
        return incoming.movedim(0, 1).flatten(1, 2)

    def _check(self, query: Tensor, key: Tensor, mask: Tensor | None) -> None:
        if mask is not None:
            raise _masked(self._unit)
        if query.dim() != 4 or query.size(2) != key.size(2):
            raise StepError(
                given=f"shoal.ContextParallel() and attention in {self._unit}",
                found=f"queries of shape {tuple(query.shape)} and keys of {tuple(key.shape)}, not one "
                "sequence of (batch, heads, length, features)",
                fix="pass modules=(…) with self-attention only",
            )
        heads = {query.size(1), key.size(1)}
        odd = [count for count in sorted(heads) if count % self._peers.size]
        if odd:
            what = "heads for keys and values" if odd[0] != query.size(1) else "heads"
            raise LayoutError(
                given=f"layout with context={self._peers.size} and attention in {self._unit}",
                found=f"it has {odd[0]} {what} on this rank, not divisible by {self._peers.size}",
                fix=f"pass context=N with an N that divides {odd[0]}; use shard=N for the other ranks",
            )

    def _check_multi_head(self, named: dict[str, Any]) -> None:
        masks = named["attn_mask"] is not None and not named["is_causal"]
        if masks or named["key_padding_mask"] is not None:
            raise _masked(self._unit)
        if named["need_weights"]:
            raise StepError(
                given=f"shoal.ContextParallel() and nn.MultiheadAttention in {self._unit}",
                found="need_weights is set, and each rank has the weights of its slice only",
                fix="pass need_weights=False in the call",
            )

    @contextlib.contextmanager
    def _own_noise(self, device: torch.device) -> Iterator[None]:
        """Draw random numbers that differ between ranks, from a seed that is the same on all ranks."""
        # A draw of torch, which does not count as a draw of the module.
        generator = None if torch.compiler.is_compiling() else torch.default_generator
        seed = int(torch.randint(2**62, (), device="cpu", generator=generator))
        with accelerator.random_state_kept(device):
            torch.manual_seed(seed + self._peers.index)
            yield


class _Exchange(torch.autograd.Function):
    """All-to-all: part i of the first dimension goes to rank i, and part i of the result is from it."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, peers: SlicePeers) -> Tensor:
        ctx.peers = peers
        result = torch.empty_like(parts)
        with waiting(peers.timeline):
            dist.all_to_all_single(result, parts, group=peers.group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient.contiguous(), ctx.peers), None


def _cast(tensor: Tensor) -> Tensor:
    """Cast as autocast does before attention, but before the exchange, which then sends fewer bytes."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _calling(function: Callable[..., Any], attention: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return torch's multi-head attention with `attention` in place of the function it calls."""
    code: Any = function
    names = {**code.__globals__, "scaled_dot_product_attention": attention}
    return FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)


def _masked(unit: str) -> StepError:
    return StepError(
        given=f"shoal.ContextParallel() and an attention mask in {unit}",
        found="a mask relates all positions to each other, and each rank has only a slice of them",
        fix="use is_causal=True instead of a causal mask; for padding at the end of causal sequences, "
        "pass no mask: earlier tokens do not attend to it, so exclude it from the loss",
    )

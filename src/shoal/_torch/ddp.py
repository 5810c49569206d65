"""torch's DistributedDataParallel as a reducer of gradients, without its forward.

The public class reduces only what was computed through its own forward. Everything here is a private
name of the reducer behind it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal._torch.autograd import after_backward
from shoal._torch.dispatch import RealIntegers
from shoal._torch.versions import required

_OF_REDUCERS = (
    *("prepare_for_forward", "prepare_for_backward"),
    *("_rebuild_buckets", "_delay_all_reduce"),
)


class _AnyNorm(nn.parallel.DistributedDataParallel):
    """DistributedDataParallel that takes SyncBatchNorm on the CPU, where Shoal runs it itself."""

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Raise no error; where torch lacks the method, its check is in another place."""


class GradientReducer:
    """Reducer of the gradients of a module's parameters, in buckets during backward.

    `options` are those of DistributedDataParallel. The ranks have the same parameters. With `fake`, the
    other ranks do not exist.
    """

    def __init__(self, module: nn.Module, *, fake: bool, **options: Any) -> None:
        self._fake = fake
        with warnings.catch_warnings():
            # torch 2.13 renamed broadcast_buffers; 2.11 has only the old name.
            warnings.simplefilter("ignore", FutureWarning)
            self._ddp = _AnyNorm(module, init_sync=False, **options)
        self._reducer: Any = self._ddp.reducer
        for name in _OF_REDUCERS:
            required(self._reducer, name, "DataParallel")  # fail now, and not during training

    def splitting(self) -> AbstractContextManager[None]:
        """Return a context in which torch.compile splits its graphs where buckets end.

        A graph returns all its gradients at once, at its end. Without the split no reduction would
        start before backward has ended. Does nothing where torch lacks the name, or where buckets are
        smaller than torch's first one, for which torch can't split.
        """
        first = getattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 20)
        if self._ddp.bucket_bytes_cap < first:
            return nullcontext()
        inside = getattr(self._ddp, "_inside_ddp_forward", nullcontext)
        return cast(AbstractContextManager[None], inside())

    def begin(self, roots: Sequence[Tensor] = ()) -> None:
        """Reduce the gradients of the next backward pass.

        With `roots`, the reducer walks the graph from them and marks unused parameters as ready.
        """
        self._reducer.prepare_for_forward()
        self._reducer.prepare_for_backward(list(roots))

    def rebuild_buckets(self) -> None:
        """Rebuild the buckets in the order in which gradients arrived, unless this was done before.

        Raises RuntimeError if a bucket still waits for a gradient.
        """
        # It reads the order of the buckets, integers, from tensors that it makes.
        with RealIntegers() if self._fake else nullcontext():
            self._reducer._rebuild_buckets()

    def reduce_after_backward(self) -> None:
        """Start all reductions after the current backward, as the first one of a static graph needs."""
        after_backward(self._reducer._delay_all_reduce)

    def register_hook(self, hook: Callable[[Any], torch.futures.Future[Tensor]]) -> None:
        """Pass each bucket to `hook` in place of the all-reduce."""
        # torch raises an error for hooks whose annotations are strings, as in this module.
        self._ddp.register_comm_hook(None, lambda state, bucket: hook(bucket))

"""Reshapes of a custom loop to the size of the global batch, where a micro-batch is smaller."""

from __future__ import annotations

import sys
from itertools import accumulate
from operator import mul

from torch import Tensor

from shoal._torch.autograd import reshapes_of
from shoal.data.micro import MicroBatch
from shoal.distributed.watchdog import stacks
from shoal.distributed.world import World
from shoal.util.errors import StepError


class LoopReshapes:
    """Looks for `view(batch_size, -1)` in the losses of a model, with the size of the global batch.

    Such a reshape makes rows of parts of samples. In the first micro-batch, its first dimension may be
    a multiple of the number of samples by chance, as with heads or groups: that is printed. Another
    number raises, and so does one that stays in a micro-batch with another number of samples.
    """

    def __init__(self) -> None:
        self._samples: int | None = None
        """The number of samples in the first micro-batch, which has such a reshape."""
        self._rows = 0
        self._ended = False

    def check(self, loss: Tensor, micro: MicroBatch, size: int, world: World) -> None:
        """Check the loss of a micro-batch of a global batch of `size`. Raises StepError."""
        first = self._samples is None
        if self._ended or not micro.weight or self._samples == micro.samples:
            return
        self._rows = size if first else self._rows
        found = self._reshape(loss, micro.samples)
        chance = first and size % micro.samples == 0
        self._samples, self._ended = micro.samples, found is None or not chance
        if found is None:
            return
        given = f"a reshape of {found} to {self._rows} rows in the graph of the loss"
        fix = "reshape by the number of samples in the micro-batch: output.view(len(output), -1)"
        if not chance:
            raise StepError(
                given=given,
                found=f"the micro-batch has {micro.samples} samples, and {self._rows} is the size of a "
                "global batch, so that rows are made of parts of samples",
                fix=fix,
            )
        place = stacks.own_line(stacks.stack(sys._getframe()))
        world.print(
            f"shoal: {place}: {given}: {size} is also the size of the global batch, of which this "
            f"micro-batch has {micro.samples} samples. If you mean the batch, {fix}"
        )

    def _reshape(self, loss: Tensor, samples: int) -> tuple[int, ...] | None:
        """Return the shape of a batch of `samples` whose reshape has parts of samples as rows."""
        for before, after in reshapes_of(loss):
            # Rows of whole dimensions, such as (samples, tokens), don't split samples.
            merged = self._rows in accumulate(before, mul)
            if before[:1] == (samples,) and after[:1] == (self._rows,) and not merged:
                return before
        return None

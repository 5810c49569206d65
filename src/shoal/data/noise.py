"""Random numbers per sample: the same at any number of ranks, micro-batches and workers."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from shoal.util.arguments import check_number
from shoal.util.errors import StepError


class Noise:
    """Random numbers that belong to samples: row i depends on (seed, position of sample i) alone.

    They are the same at any number of ranks, micro-batches and workers; numbers from a global generator
    are not. The `inputs` and the `loss` of a Task draw from two independent streams; `named` gives both
    the same numbers, for a loss that needs the numbers that `inputs` drew. `batch` is a Noise with one
    row for the global batch, which is the same for all its samples. Counter-based generation: Philox
    (Salmon et al. 2011), one generator per position, whose counter begins at `stream`.

    Args:
        seed: Seed, any integer.
        first: Position of the first sample.
        samples: Number of samples, at consecutive positions.
        stream: Number of the stream, 0 or more; streams are independent. Default: 0.
        batch_first: Position of the first sample of the global batch. Default: 0.

    Examples:
        >>> both, second = Noise(0, first=6, samples=2), Noise(0, first=7, samples=1)
        >>> bool((both.normal(3)[1] == second.normal(3)[0]).all())
        True
        >>> inputs, loss = Noise(0, first=6, samples=2), Noise(0, first=6, samples=2, stream=1)
        >>> bool((inputs.normal(3) == loss.normal(3)).any())
        False
        >>> bool((inputs.named("added").normal(3) == loss.named("added").normal(3)).all())
        True
        >>> bool((both.batch.beta(0.2, 0.2) == second.batch.beta(0.2, 0.2)).all())
        True
    """

    __slots__ = ("_batch", "_generators", "batch_first", "first", "samples", "seed", "stream")

    def __init__(
        self, seed: int, first: int, samples: int, *, stream: int = 0, batch_first: int = 0
    ) -> None:
        self.seed = seed
        self.first = first
        self.samples = samples
        self.stream = stream
        self.batch_first = batch_first
        self._generators: list[np.random.Generator] | None = None
        self._batch: Noise | None = None

    @property
    def batch(self) -> Noise:
        """The numbers of the global batch: one row, the same for all its samples."""
        if self._batch is None:
            stream = _stream_of(f"batch, stream {self.stream}")
            self._batch = Noise(self.seed, self.batch_first, 1, stream=stream)
        return self._batch

    def named(self, name: str) -> Noise:
        """Return the stream of this name, from its beginning: the same numbers at every call.

        Streams of different names are independent of each other and of the numbered streams.

        Args:
            name: Name of the stream, any string.

        Returns:
            A Noise of the same samples.

        Raises:
            StepError: If the name is not a string.
        """
        if not isinstance(name, str):
            raise StepError(
                given=f"noise.named({name!r})",
                found="the name of a stream is a str",
                fix="noise.named('added').normal(8)",
            )
        stream = _stream_of(name)
        return Noise(self.seed, self.first, self.samples, stream=stream, batch_first=self.batch_first)

    def generators(self) -> list[np.random.Generator]:
        """Return one NumPy generator per sample of the micro-batch; later calls continue them.

        Returns:
            `numpy.random.Generator` objects, in the order of the samples.
        """
        if self._generators is None:
            keys = np.empty((self.samples, 2), np.uint64)
            keys[:, 0] = self.seed & _MASK
            keys[:, 1] = np.arange(self.first, self.first + self.samples)
            counter = np.array(
                [0, 0, 0, self.stream], np.uint64
            )  # the highest word: draws count up from the lowest
            self._generators = [
                np.random.Generator(np.random.Philox(key=key, counter=counter)) for key in keys
            ]
        return self._generators

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        r"""Draw standard normal numbers for each sample.

        Args:
            shape: Shape of the numbers of one sample.
            dtype: Floating-point dtype of the result. Default: torch.float32.

        Returns:
            A tensor of shape (samples, \*shape) on the CPU.
        """
        rows = [generator.standard_normal(shape) for generator in self.generators()]
        return torch.from_numpy(np.stack(rows)).to(dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        r"""Draw uniform numbers in [0, 1) for each sample.

        Args:
            shape: Shape of the numbers of one sample.
            dtype: Floating-point dtype of the result. Default: torch.float32.

        Returns:
            A tensor of shape (samples, \*shape) on the CPU.
        """
        rows = np.stack([generator.random(shape) for generator in self.generators()])
        grain = torch.finfo(dtype).eps / 2  # between numbers below 1; without it some round up to 1
        return torch.from_numpy(np.floor(rows / grain) * grain).to(dtype)

    def beta(
        self, alpha: float, beta: float, *shape: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        r"""Draw numbers from the beta distribution for each sample, such as the weights of mixup.

        Args:
            alpha: First parameter of the distribution, above 0.
            beta: Second parameter, above 0.
            shape: Shape of the numbers of one sample.
            dtype: Floating-point dtype of the result. Default: torch.float32.

        Returns:
            A tensor of shape (samples, \*shape) on the CPU.

        Raises:
            StepError: If a parameter is not a number above 0.
        """
        for name, value in (("alpha", alpha), ("beta", beta)):
            check_number(StepError, "noise.beta", name, value, above=True, usual=0.2)
        rows = [generator.beta(alpha, beta, shape) for generator in self.generators()]
        return torch.from_numpy(np.stack(rows)).to(dtype)


def _stream_of(name: str) -> int:
    # The highest bit keeps it apart from the numbered streams.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") | 1 << 63


_MASK = 2**64 - 1

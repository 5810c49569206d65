"""Random numbers per sample: the same at any number of ranks, micro-batches and workers."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from shoal.util.errors import StepError


class Noise:
    """Random numbers that belong to samples: row i depends on (seed, position of sample i) alone.

    They are the same at any number of ranks, micro-batches and workers; numbers from a global generator
    are not. The `inputs` and the `loss` of a Task draw from two independent streams; `named` gives both
    the same numbers, for a loss that needs the numbers that `inputs` drew. Counter-based generation:
    Philox (Salmon et al. 2011), one generator per position, whose counter begins at `stream`.

    Args:
        seed: Seed, any integer.
        first: Position of the first sample.
        samples: Number of samples, at consecutive positions.
        stream: Number of the stream, 0 or more; streams are independent. Default: 0.

    Examples:
        >>> both, second = Noise(0, first=6, samples=2), Noise(0, first=7, samples=1)
        >>> bool((both.normal(3)[1] == second.normal(3)[0]).all())
        True
        >>> inputs, loss = Noise(0, first=6, samples=2), Noise(0, first=6, samples=2, stream=1)
        >>> bool((inputs.normal(3) == loss.normal(3)).any())
        False
        >>> bool((inputs.named("added").normal(3) == loss.named("added").normal(3)).all())
        True
    """

    __slots__ = ("_generators", "first", "samples", "seed", "stream")

    def __init__(self, seed: int, first: int, samples: int, *, stream: int = 0) -> None:
        self.seed = seed
        self.first = first
        self.samples = samples
        self.stream = stream
        self._generators: list[np.random.Generator] | None = None

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
        digest = hashlib.sha256(name.encode()).digest()
        # The highest bit keeps them apart from the numbered streams.
        stream = int.from_bytes(digest[:8], "big") | 1 << 63
        return Noise(self.seed, self.first, self.samples, stream=stream)

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


_MASK = 2**64 - 1

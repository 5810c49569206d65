"""Map-style datasets: samples fetched one by one or together, each with its own random numbers."""

from __future__ import annotations

import copy
import hashlib
import inspect
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from shoal.data.noise import Noise
from shoal.data.sampler import LocalBatch
from shoal.util.errors import DataError

Collate = Callable[[list[Any]], Any]

SAMPLE_STREAM = 2
"""The stream of Noise for a dataset's samples; 0 and 1 are a task's inputs and loss."""
GLOBAL_STREAM = 3


class BlockDataset(Dataset[list[list[Any]]]):
    """A dataset whose index is a list of local batches and whose item is their micro-batches.

    torch's DataLoader workers hold it: one item per block, fetched at once.
    """

    size: int
    block: int
    """The number of global batches in a block."""
    device = torch.device("cpu")
    """The device of the samples, as far as it is known before one is fetched."""

    def __len__(self) -> int:
        return self.size

    def checksum(self) -> str | None:
        """Return a value that changes with the samples, if it costs next to nothing, else None."""
        return None

    def held(self) -> dict[str, str]:
        """Return digests of a few rows of the arrays that the user's dataset holds, by name."""
        return {}


class SampleSource(BlockDataset):
    """A source of single samples; a collate function makes micro-batches from them."""

    block = 1
    watched = False
    """True if Shoal warns when samples or the collate function draw from the global generators."""

    def __init__(self, collate: Collate, seed: int, *, seed_transforms: bool) -> None:
        self._collate = collate
        self._seed = seed
        self.seed_transforms = seed_transforms

    def samples(self, share: LocalBatch) -> list[Any]:
        """Return the samples that a local batch needs, in the order of its indices."""
        raise NotImplementedError

    def __getitem__(self, shares: list[LocalBatch]) -> list[list[Any]]:
        watched, self.watched = self.watched, False
        with global_generators_kept() if self.seed_transforms else nullcontext():
            before = _generators() if watched else ()
            found = [self.samples(share) for share in shares]
            between = _generators() if watched else ()
            values = [
                collated(one, share, self._collate) for one, share in zip(found, shares, strict=True)
            ]
            if watched and not (self.seed_transforms or _same(before, between)):
                _tell_of_draws(_OF_SAMPLES)
            if watched and not _same(between, _generators()):
                _tell_of_draws(_OF_BATCHES)
        return values


class MapStyleDataset(SampleSource):
    """A map-style dataset: one call of `__getitems__`, or one of `__getitem__` per sample.

    Either may have a parameter `rng`: the numpy.random.Generator of the sample, which depends only on
    (seed, epoch, position), or the list of them. With `seed_transforms`, the global generators are
    seeded the same way before each sample.
    """

    def __init__(
        self, dataset: Any, collate: Collate, seed: int = 0, *, seed_transforms: bool = False
    ) -> None:
        super().__init__(collate, seed, seed_transforms=seed_transforms)
        self._dataset = dataset
        # Samples that are fetched together can't each seed the global generators.
        self._many = None if seed_transforms else getattr(dataset, "__getitems__", None)
        self._takes_rng = takes_rng(self._many or type(dataset).__getitem__)
        inner = dataset
        while not self._takes_rng and (inner := getattr(inner, "dataset", None)) is not None:
            _refuse_to_hide(inner, dataset)
        self.size = len(dataset)

    def held(self) -> dict[str, str]:
        """See BlockDataset."""
        return {name: digest([array]) for name, array in arrays_in(self._dataset)}

    def samples(self, share: LocalBatch) -> list[Any]:
        """See SampleSource."""
        indices = share.indices.tolist()
        own = draws(share, self._seed, SAMPLE_STREAM) if self._takes_rng else None
        if self._many is not None:
            return list(self._many(indices) if own is None else self._many(indices, rng=own))
        if own is None and not self.seed_transforms:
            return [self._dataset[index] for index in indices]
        everyones = draws(share, self._seed, GLOBAL_STREAM) if self.seed_transforms else None
        found = []
        for number, index in enumerate(indices):
            if everyones is not None:
                set_global_generators(everyones[number])
            if own is None:
                found.append(self._dataset[index])
            else:
                found.append(self._dataset.__getitem__(index, rng=own[number]))
        return found


def collated(samples: list[Any], share: LocalBatch, collate: Collate) -> list[Any]:
    """Return the micro-batches of a local batch, from its fetched samples."""
    numbers = np.arange(len(samples))
    parts = [[samples[row] for row in numbers[rows].tolist()] for rows in share.rows()]
    if share.partners:  # a collate function may change its samples, which are in several parts
        parts = [copy.deepcopy(part) for part in parts]
    return share.together([_collate(part, collate) for part in parts])


def _collate(samples: list[Any], collate: Collate) -> Any:
    if collate is not default_collate:
        return collate(samples)
    try:
        return default_collate(samples)
    except Exception as error:
        raise DataError(
            given=f"a Loader without collate_fn, samples of type {type(samples[0]).__name__}",
            found=f"torch's default_collate can't make a batch of them: {error}",
            fix="call shoal.Loader(dataset, world, …, collate_fn=collate), where collate(samples) "
            "makes one micro-batch from a list of samples, and pads them where their lengths differ",
        ) from error


def draws(share: LocalBatch, seed: int, stream: int) -> list[np.random.Generator]:
    """Return a generator for each fetched sample of a local batch, by its position in training."""
    return [
        generator
        for part in share.fetched
        for generator in Noise(
            seed, share.first + part.start, part.stop - part.start, stream=stream
        ).generators()
    ]


def set_global_generators(generator: np.random.Generator) -> None:
    """Seed the generators of `random`, NumPy and torch (on the CPU) from a sample's generator."""
    words = generator.integers(0, 2**32, size=4, dtype=np.uint32)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))


def _generators() -> tuple[Any, ...]:
    """Return the states of the generators of `random`, NumPy and torch (on the CPU)."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    (python, numpy, ours), (python_now, numpy_now, ours_now) = before, after
    equal = all(np.array_equal(one, other) for one, other in zip(numpy, numpy_now, strict=True))
    return python == python_now and equal and torch.equal(ours, ours_now)


_OF_SAMPLES = (
    "the dataset draws random numbers from global generators, so results depend on the numbers of "
    "processes and workers. Write def __getitem__(self, index, rng), which gets a NumPy generator for "
    "the sample, or pass Loader(…, seed_transforms=True), which seeds the global generators for each "
    "sample"
)
_OF_BATCHES = (
    "collate_fn draws random numbers from global generators, so results depend on how the batch is "
    "split into micro-batches. Draw for each sample in __getitem__(self, index, rng); for mixup and "
    "CutMix, use Loader(…, partners=1)"
)


def _tell_of_draws(text: str) -> None:
    """Warn once: only the first worker does."""
    here = get_worker_info()
    if here is None or here.id == 0:
        warnings.warn(text, stacklevel=2)


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Restore the generators of `random`, NumPy and torch (on the CPU) at the end of the block."""
    python, numpy, ours = _generators()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(ours)


def takes_rng(function: Any) -> bool:
    """Return whether a function has a parameter `rng`."""
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _refuse_to_hide(inner: Any, wrapper: Any) -> None:
    if takes_rng(getattr(type(inner), "__getitem__", None)):
        raise DataError(
            given=f"Loader({type(wrapper).__name__} of {type(inner).__name__}, …)",
            found=f"{type(inner).__name__}.__getitem__ takes rng, which {type(wrapper).__name__} does "
            "not pass on: its samples would get no generator",
            fix="choose the samples inside the dataset, or define a __getitem__ of the wrapper that "
            "passes rng on",
        )


class ArrayDataset(Dataset[Any]):
    """A tuple or mapping of arrays as samples, for a custom collate function."""

    def __init__(self, structure: Any, columns: Any) -> None:
        self._structure = structure
        self._columns = columns

    def __len__(self) -> int:
        return min(len(column) for column in values_of(self._columns))

    def __getitem__(self, index: int) -> Any:
        rows = [column[index] for column in values_of(self._columns)]
        if self._structure is dict:
            return dict(zip(self._columns, rows, strict=True))
        return self._structure(rows)


def values_of(columns: tuple[Any, ...] | Mapping[Any, Any]) -> Any:
    """Return the columns of a tuple or mapping of columns."""
    return list(columns.values()) if isinstance(columns, Mapping) else columns


_DEEPEST = 3


def arrays_in(dataset: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and NumPy arrays among the attributes of a dataset, with their names.

    Tuples and lists are searched, and datasets inside a dataset, such as that of a Subset.
    """
    if isinstance(dataset, Tensor):
        yield name, dataset
    elif isinstance(dataset, np.ndarray) and dataset.dtype.kind in "biufc":
        yield name, _bytes(dataset)
    elif depth < _DEEPEST:
        if isinstance(dataset, tuple | list):
            inside: Iterable[tuple[str, Any]] = (
                (f"{name}[{n}]", e) for n, e in enumerate(dataset[:16])
            )
        elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__dict__"):
            inside = ((f"{name}.{key}".lstrip("."), value) for key, value in vars(dataset).items())
        else:
            return
        for key, value in inside:
            yield from arrays_in(value, key, depth + 1)


def _bytes(array: np.ndarray) -> Tensor:
    """Return the bytes of an array, which may be read-only, such as a memory-mapped file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of dtypes, shapes, and the first, the middle and the last row."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        rows = tensor if tensor.ndim else tensor[None]
        for row in sorted({0, len(rows) // 2, len(rows) - 1}) if len(rows) else ():
            flat = rows[row : row + 1].detach().cpu().contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]

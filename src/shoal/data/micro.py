"""Micro-batches: the input of one forward and backward pass on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.data.noise import Noise

if TYPE_CHECKING:
    from shoal.distributed.world import World


class Place(NamedTuple):
    """The place of a micro-batch in its global batch of `size` samples: number `number` of
    `micro_batches`.

    With `unit`, micro-batches are cut at multiples of it, and each one has consecutive positions over
    all ranks. Without, each rank has consecutive positions over all its micro-batches.
    A `whole` one is a virtual rank: one rank has all of it. Ranks have samples in proportion to
    `proportions`; None is equally many.
    """

    size: int
    number: int
    micro_batches: int
    unit: int | None = None
    whole: bool = False
    proportions: tuple[int, ...] | None = None


class MicroBatch(NamedTuple):
    """One micro-batch of one rank.

    `value` is the result of the collate function for `samples` samples from position `first` on.
    `weight` is 1, or 0 for the padding sample that a rank without samples runs to take part in the
    collectives of the step. `world` has the ranks of the global batch; None outside a World. `place` is
    its place in the global batch; None if it is not a micro-batch of a Loader. `batch_first` is the
    position of the first sample of the global batch.
    """

    value: Any
    first: int
    samples: int
    weight: float
    world: World | None = None
    place: Place | None = None
    batch_first: int = 0

    def noise(self, seed: int, stream: int = 0) -> Noise:
        """Return the random numbers of its samples."""
        return Noise(seed, self.first, self.samples, stream=stream, batch_first=self.batch_first)


class Draws:
    """The random draws of a micro-batch: `made` counts those of each module so far.

    `models` numbers the models that have drawn. `made` has this number and the name of the module.
    `scope` separates the functions of a Task, the `owner`, which may call the same modules. `rows` is
    what the micro-batch says of rows that are not samples, once it was asked. `gathered` are the
    sharded parameters that its functions have used directly.
    """

    __slots__ = ("gathered", "made", "micro", "models", "owner", "rows", "scope", "seed")

    def __init__(self, micro: MicroBatch, seed: int, scope: str = "", owner: object = None) -> None:
        self.micro = micro
        self.seed = seed
        self.scope = scope
        self.owner = owner
        self.made: dict[tuple[int, str], int] = {}
        self.models: dict[Any, int] = {}
        self.rows: Any = None
        self.gathered: dict[Any, Any] = {}

    def counts(self, names: Sequence[str]) -> list[int]:
        """Return how many draws these modules of the first model have made."""
        return [self.made.get((0, name), 0) for name in names]

    def set_counts(self, names: Sequence[str], counts: Sequence[int]) -> None:
        """Set how many draws these modules of the first model have made."""
        self.made.update(zip([(0, name) for name in names], counts, strict=True))


CURRENT_MICRO: ContextVar[MicroBatch | None] = ContextVar("current micro-batch", default=None)
"""The micro-batch of the running Task function, for functions such as `shoal.gather`."""

CURRENT_DRAWS: ContextVar[Draws | None] = ContextVar("draws of the current micro-batch", default=None)
"""The draws of the running Task function, or of the current micro-batch of a custom loop."""


class Drawing:
    """The context in which random draws are counted and keyed as those of `draws`. None: by rank."""

    __slots__ = ("_draws", "_token")
    _token: Token[Draws | None]

    def __init__(self, draws: Draws | None) -> None:
        self._draws = draws

    def __enter__(self) -> None:
        self._token = CURRENT_DRAWS.set(self._draws)

    def __exit__(self, *_: object) -> None:
        CURRENT_DRAWS.reset(self._token)

"""How the world is divided: the arithmetic of ranks, axes and groups, as one frozen value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from shoal.util.errors import LayoutError

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Mesh axes from the outermost (ranks far apart) to the innermost (neighbouring ranks).

The axes that talk most per step (tensor, context) sit on neighbouring ranks, which share a machine;
pipeline stages, which talk least, sit furthest apart (Narayanan et al. 2021, section 3).
"""

DATA_AXES = ("replicate", "shard")
"""Axes whose ranks receive different samples."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`replicate x shard x context x tensor x pipeline`: degrees that multiply to the world size.

    One degree may be -1: `resolve` fills it with what the others leave. The text form names the
    degrees that are not 1, as in `"replicate=2,tensor=4"`, and parses back to an equal value.

        >>> layout = Layout.parse("replicate=-1,tensor=2").resolve(8)
        >>> str(layout), layout.data_size, layout.data_rank(5)
        ('replicate=4,tensor=2', 4, 2)
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        degrees = {field.name: getattr(self, field.name) for field in fields(self)}
        wrong = [f"{axis}={degree!r}" for axis, degree in degrees.items() if not _valid(degree)]
        if wrong:
            raise LayoutError(
                given=f"layout with {', '.join(wrong)}",
                found="a degree is a positive integer, or -1 for what the other axes leave",
                fix="for example layout='replicate=-1,tensor=2'",
            )
        open_axes = [axis for axis, degree in degrees.items() if degree == -1]
        if len(open_axes) > 1:
            raise LayoutError(
                given=f"layout with {' and '.join(f'{axis}=-1' for axis in open_axes)}",
                found="only one degree can be left open",
                fix=f"a number for one of them: layout='{open_axes[0]}=2,{open_axes[1]}=-1'",
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `"axis=degree,axis=degree"`. Raises LayoutError for unknown or repeated axes."""
        degrees: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            axis, _, degree = (piece.strip() for piece in part.partition("="))
            if axis not in AXES or axis in degrees or not _is_integer(degree):
                found = (
                    f"axis {axis!r} appears twice"
                    if axis in degrees
                    else f"{part!r} is not one of {', '.join(f'{name}=N' for name in AXES)}"
                )
                raise LayoutError(
                    given=f"layout={text!r}",
                    found=found,
                    fix="for example layout='replicate=-1' or layout='shard=4,tensor=2'",
                )
            degrees[axis] = int(degree)
        if not degrees:
            raise LayoutError(
                given=f"layout={text!r}",
                found="no axis at all",
                fix="for example layout='replicate=-1'",
            )
        return cls(**degrees)

    def __str__(self) -> str:
        parts = [f"{axis}={self.degree(axis)}" for axis in AXES if self.degree(axis) != 1]
        return ",".join(parts) or "replicate=1"

    def degree(self, axis: str) -> int:
        """The number of ranks along one axis."""
        return int(getattr(self, axis))

    @property
    def size(self) -> int:
        """The number of ranks that this layout needs; meaningful once resolved."""
        return math.prod(self.degree(axis) for axis in AXES)

    @property
    def data_size(self) -> int:
        """How many ways the global batch is split."""
        return math.prod(self.degree(axis) for axis in DATA_AXES)

    def resolve(self, world_size: int) -> Layout:
        """The same layout without -1, for a world of `world_size` ranks.

        Raises LayoutError if the degrees don't multiply to `world_size`.
        """
        known = math.prod(degree for axis in AXES if (degree := self.degree(axis)) != -1)
        open_axis = next((axis for axis in AXES if self.degree(axis) == -1), None)
        if world_size % known or (open_axis is None and known != world_size):
            needs = f"{known}" if open_axis is None else f"a multiple of {known}"
            raise LayoutError(
                given=f"layout='{self}' on {world_size} process(es)",
                found=f"its degrees need {needs} processes",
                fix=f"shoal.init(layout='replicate=-1'), or start {needs}: shoal run -n {known} …",
            )
        if open_axis is None:
            return self
        degrees = {axis: self.degree(axis) for axis in AXES} | {open_axis: world_size // known}
        return Layout(**degrees)

    def coordinate(self, rank: int, axis: str) -> int:
        """Where `rank` stands on `axis`, from 0 (row-major over AXES)."""
        return rank // self._stride(axis) % self.degree(axis)

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch `rank` takes; its model-parallel peers take the same."""
        result = 0
        for axis in DATA_AXES:
            result = result * self.degree(axis) + self.coordinate(rank, axis)
        return result

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` at most along `axes`, in rank order."""
        members = [rank]
        for axis in (axis for axis in AXES if axis in axes):
            stride = self._stride(axis)
            steps = range(0, self.degree(axis) * stride, stride)
            back = self.coordinate(rank, axis) * stride
            members = [member - back + step for member in members for step in steps]
        return tuple(members)

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Every group along `axes`, each once, by its first rank."""
        for rank in range(self.size):
            if all(self.coordinate(rank, axis) == 0 for axis in axes):
                yield self.group(rank, *axes)

    def _stride(self, axis: str) -> int:
        return math.prod(self.degree(inner) for inner in AXES[AXES.index(axis) + 1 :])


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isascii() and text.removeprefix("-").isdigit()


def _valid(degree: object) -> bool:
    return isinstance(degree, int) and not isinstance(degree, bool) and (degree > 0 or degree == -1)

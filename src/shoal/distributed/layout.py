"""The device mesh as one frozen value: the arithmetic of ranks, axes and groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from shoal.util.arguments import is_integer
from shoal.util.errors import LayoutError

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
"""Mesh axes from the outermost (ranks far apart) to the innermost (neighbouring ranks).

The axes that communicate most per step (tensor, context, expert) are on neighbouring ranks, which share
a node. Pipeline stages communicate least and are furthest apart (Narayanan et al. 2021, section 3).
"""

DATA_AXES = ("replicate", "shard", "expert")
"""Axes whose ranks receive different samples."""


_PLANNED = (
    ", or let shoal plan find one: shoal plan --model MODEL -n N --json > plan.json, and "
    "layout=shoal.load_plan('plan.json').layout"
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the six axes of the device mesh; their product is the world size.

    One degree may be -1: `resolve` computes it from the world size and the other degrees. The text
    form, as in `"replicate=2,tensor=4"`, lists the degrees that are not 1, and `parse` reads it back.
    From the outermost axis to the innermost, ranks are numbered over pipeline, replicate, shard,
    expert, context and tensor, so that the axes that communicate most are on neighbouring ranks
    (Narayanan et al. 2021).

    Args:
        replicate: Number of replicas of the model, each with its own samples (data parallelism, DDP).
            Default: 1.
        shard: Number of ranks over which the parameters of a replica are sharded, each with its own
            samples (FSDP; together with `replicate`, HSDP). Default: 1.
        expert: Number of ranks over which the experts of each layer are distributed, each with its own
            samples (expert parallelism). Default: 1.
        context: Number of slices into which each sequence is split (context parallelism). Default: 1.
        tensor: Number of ranks over which weight matrices are split (tensor parallelism). Default: 1.
        pipeline: Number of pipeline stages, each on its own ranks (pipeline parallelism). Default: 1.

    Raises:
        LayoutError: If a degree is neither a positive integer nor -1, or if two degrees are -1.

    Examples:
        >>> layout = shoal.Layout(replicate=-1, tensor=2).resolve(8)
        >>> str(layout), layout.data_size, layout.data_rank(5)
        ('replicate=4,tensor=2', 4, 2)
    """

    replicate: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        degrees = {field.name: getattr(self, field.name) for field in fields(self)}
        wrong = [
            f"{axis}={degree!r}"
            for axis, degree in degrees.items()
            if not degree or not is_integer(degree, least=-1)
        ]
        if wrong:
            raise LayoutError(
                given=f"layout with {', '.join(wrong)}",
                found="a degree is a positive integer, or -1 to compute it from the world size",
                fix="pass layout='replicate=-1,tensor=2'",
            )
        open_axes = [axis for axis, degree in degrees.items() if degree == -1]
        if len(open_axes) > 1:
            raise LayoutError(
                given=f"layout with {' and '.join(f'{axis}=-1' for axis in open_axes)}",
                found="only one degree can be -1",
                fix=f"give one of them a number: layout='{open_axes[0]}=2,{open_axes[1]}=-1'",
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout that a string describes.

        Args:
            text: `"axis=degree,axis=degree"`, with the axes `replicate`, `shard`, `expert`, `context`,
                `tensor` and `pipeline` in any order. Axes that are left out have degree 1.

        Returns:
            The layout, not yet resolved.

        Raises:
            LayoutError: If an axis is unknown or repeated, a degree is invalid, or there is no axis.
        """
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
                    fix="pass layout='replicate=-1' or layout='shard=4,tensor=2'"
                    + (_PLANNED if text == "auto" else ""),
                )
            degrees[axis] = int(degree)
        if not degrees:
            raise LayoutError(
                given=f"layout={text!r}",
                found="no axis",
                fix="pass layout='replicate=-1'",
            )
        return cls(**degrees)

    def __str__(self) -> str:
        parts = [f"{axis}={self.degree(axis)}" for axis in AXES if self.degree(axis) != 1]
        return ",".join(parts) or "replicate=1"

    def degree(self, axis: str) -> int:
        """Return the number of ranks along one axis.

        Args:
            axis: `"replicate"`, `"shard"`, `"expert"`, `"context"`, `"tensor"` or `"pipeline"`.

        Returns:
            The degree; -1 if it is not resolved.
        """
        return int(getattr(self, axis))

    @property
    def size(self) -> int:
        """The number of ranks that this layout needs, once it is resolved."""
        return math.prod(self.degree(axis) for axis in AXES)

    @property
    def data_size(self) -> int:
        """The number of local batches into which the global batch is split."""
        return math.prod(self.degree(axis) for axis in DATA_AXES)

    def resolve(self, world_size: int) -> Layout:
        """Return the same layout with -1 replaced by the degree that fits the world size.

        Args:
            world_size: Number of ranks.

        Returns:
            A layout without -1.

        Raises:
            LayoutError: If the product of the degrees can't be `world_size`.
        """
        known = math.prod(degree for axis in AXES if (degree := self.degree(axis)) != -1)
        open_axis = next((axis for axis in AXES if self.degree(axis) == -1), None)
        if world_size % known or (open_axis is None and known != world_size):
            needs = f"{known}" if open_axis is None else f"a multiple of {known}"
            raise LayoutError(
                given=f"layout='{self}' on {world_size} process(es)",
                found=f"its degrees need {needs} processes",
                fix=f"call shoal.init(layout='replicate=-1'), or start {needs}: shoal run -n {known} …",
            )
        if open_axis is None:
            return self
        degrees = {axis: self.degree(axis) for axis in AXES} | {open_axis: world_size // known}
        return Layout(**degrees)

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the coordinate of a rank along one axis.

        Args:
            rank: Global rank.
            axis: Name of an axis.

        Returns:
            The coordinate, from 0. Ranks are numbered row-major over pipeline, replicate, shard,
            expert, context and tensor.
        """
        return rank // self._stride(axis) % self.degree(axis)

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a rank: the number of the local batch that it processes.

        Args:
            rank: Global rank.

        Returns:
            The data-parallel rank, from 0. Model-parallel peers have the same number.
        """
        result = 0
        for axis in DATA_AXES:
            result = result * self.degree(axis) + self.coordinate(rank, axis)
        return result

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group of a rank along some axes.

        Args:
            rank: Global rank.
            axes: Names of axes.

        Returns:
            The ranks whose coordinates equal those of `rank` on all other axes, in rank order.
        """
        members = [rank]
        for axis in (axis for axis in AXES if axis in axes):
            stride = self._stride(axis)
            steps = range(0, self.degree(axis) * stride, stride)
            back = self.coordinate(rank, axis) * stride
            members = [member - back + step for member in members for step in steps]
        return tuple(members)

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Yield every group along some axes once.

        Args:
            axes: Names of axes.

        Returns:
            An iterator over the groups, in the order of their first ranks.
        """
        for rank in range(self.size):
            if all(self.coordinate(rank, axis) == 0 for axis in axes):
                yield self.group(rank, *axes)

    def _stride(self, axis: str) -> int:
        return math.prod(self.degree(inner) for inner in AXES[AXES.index(axis) + 1 :])


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isascii() and text.removeprefix("-").isdigit()
